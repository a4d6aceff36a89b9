"""Places -> a view of the file system in which writes stay private. Runs in the namespaces.

First the kernel makes every mount read-only at once, so none can be forgotten. Then directories get
overlays in place: reads see the existing files, writes go to a private tmpfs. Directories that
cannot have an overlay stay read-only. Nothing is created outside: the tmpfs is mounted on /dev,
which gets a small replacement at the end.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from oomph.errors import NoSandbox
from oomph.sandbox import linux
from oomph.units import MIB

# ---- /proc/self/mountinfo -> mount points --------------------------------------------------------

_OCTAL = re.compile(r"\\([0-7]{3})")


def mount_points(table: str) -> tuple[str, ...]:
    r"""Return the mount points of a mountinfo table as paths.

    >>> mount_points("36 35 98:0 / /mnt/my\\040disk rw,noatime - ext3 /dev/root rw")
    ('/mnt/my disk',)
    """
    return tuple(path for _, path in _roots_and_points(table))


def bound_points(table: str) -> tuple[str, ...]:
    """Return mount points that show part of a file system, even a single file or socket.

    >>> bound_points("41 35 0:25 /docker.sock /run/docker.sock rw - tmpfs tmpfs rw")
    ('/run/docker.sock',)
    """
    return tuple(path for root, path in _roots_and_points(table) if root != "/")


def _roots_and_points(table: str) -> Iterator[tuple[str, str]]:
    """Yield the fourth and fifth field; blanks and backslashes are octal escapes (proc(5))."""
    for fields in (line.split(" ") for line in table.splitlines()):
        if len(fields) > 4:
            root, point = (_OCTAL.sub(lambda m: chr(int(m[1], 8)), text) for text in fields[3:5])
            yield root, point


def read_mount_table() -> str:
    """Return the mount table of this process."""
    return Path("/proc/self/mountinfo").read_text(errors="surrogateescape")


def is_above_a_mount(directory: str, points: Iterable[str]) -> bool:
    """Return whether something is mounted strictly below a directory.

    >>> is_above_a_mount("/home/u", ["/", "/home/u", "/home/user/disk"])
    False
    >>> is_above_a_mount("/home", ["/home/user/disk"])
    True
    """
    below = directory.rstrip("/") + "/"
    return any(point.startswith(below) and point != below for point in points)


# ---- where a program may want to write -> the directories to cover -------------------------------
# This runs before anything is mounted: afterwards the roots of overlays look like the user's own
# directories. Everything that is not covered is read-only inside, so the program cannot write to a
# place that is missed here, and cannot damage it either.

# Directories that the kernel generates. They stay as they are, read-only, or are recreated.
OF_THE_KERNEL = frozenset({"/dev", "/proc", "/sys"})
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - only looked at, never written to
# Services that only look up user and host names; without them a user may have no name.
NAME_SERVICES = ("/run/nscd/", "/var/run/nscd/", "/var/lib/sss/", "/run/systemd/userdb/")
# Limit on separate overlays for subdirectories of another owner or group: judgement, a mount
# costs 0.1 ms.
MOST_SUBDIRECTORIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What the sandbox must know about the outside: who owns it, and where it may write."""

    cwd: str
    home: str | None
    temporary: str
    uid: int
    gid: int
    named: tuple[str, ...] = ()
    """Every other directory that an argument or the environment names."""
    mount_points: tuple[str, ...] = ()
    sockets: tuple[str, ...] = ()
    """Doors to programs outside, which are hidden inside."""
    devices: tuple[str, ...] = ()
    """Device nodes below /dev that exist inside besides the usual ones, by name."""

    def probed(self) -> tuple[str, ...]:
        """Return the places where a probe checks that writes do not leave the sandbox."""
        return tuple(dict.fromkeys(p for p in (self.cwd, self.home, self.temporary) if p))


def find_places(devices: Iterable[str] = ()) -> Places:
    """Return the places of this process, without writing anything.

    `devices` are names below /dev; those that do not exist are left out.
    """
    table = read_mount_table()
    texts = [*TEMPORARY, sys.prefix, *sys.argv, *os.environ.values()]
    return Places(
        cwd=_current_directory(),
        home=_home(),
        temporary=_temporary(),
        uid=os.getuid(),
        gid=os.getgid(),
        named=tuple(dict.fromkeys(named_directories(texts))),
        mount_points=mount_points(table),
        sockets=tuple(socket_paths(bound_points(table))),
        devices=tuple(name for name in devices if stat.S_ISCHR(mode_of(f"/dev/{name}"))),
    )


def _current_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError as error:
        raise NoSandbox(
            "the current directory no longer exists", attempt="cd to a directory that exists"
        ) from error


def _home() -> str | None:
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor the user database has one
        return None
    return str(home.resolve()) if stat.S_ISDIR(mode_of(str(home))) else None


def _temporary() -> str:
    """Return tempfile's directory, without its test of writing to each candidate."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for path in (*named, *TEMPORARY):
        if path and is_writable(path):
            return str(Path(path).resolve())
    return str(Path.cwd())


def named_directories(texts: Iterable[str]) -> Iterator[str]:
    """Yield each directory that a text names, or its nearest existing parent.

    >>> list(named_directories(["--out=/usr/bin/no-such-file", "PATH", "relative/x"]))
    ['/usr/bin']
    """
    for text in texts:
        for part in text.replace("=", ":").split(":"):
            if part.startswith("/"):
                yield str(_nearest_directory(Path(part)).resolve())


def _nearest_directory(path: Path) -> Path:
    while not stat.S_ISDIR(mode_of(str(path))):
        path = path.parent
    return path


def everything() -> tuple[str, ...]:
    """Return what root may write to: all top-level directories but the kernel's own."""
    with os.scandir("/") as entries:
        found = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
    return tuple(path for path in found if path not in OF_THE_KERNEL)


def to_cover(places: Places) -> tuple[str, ...]:
    """Return the directories that get their own overlay, parents first.

    An unprivileged user can map only their own user and group. Files of another owner, and anything
    below a directory of another owner, cannot be copied into an overlay (EOVERFLOW). So there is
    one overlay on the topmost directory the user may write to, and one more wherever the owner
    changes below it.
    """
    found: set[str] = set()
    for path in (*places.probed(), *places.named):
        found.update(_on_the_way(path, places))
    for path in dict.fromkeys(p for p in (places.cwd, places.home) if p):
        found.update(_foreign_subdirectories(path, places))
    kernels = tuple(f"{name}/" for name in OF_THE_KERNEL)
    return tuple(sorted(path for path in found if not f"{path}/".startswith(kernels)))


def _on_the_way(path: str, places: Places) -> Iterator[str]:
    is_above_foreign = True
    for directory in (*reversed(Path(path).parents), Path(path)):
        is_foreign = _is_foreign(str(directory), places)
        if is_writable(str(directory)) and directory != Path("/"):
            if is_foreign or is_above_foreign:
                yield str(directory)
            is_above_foreign = False
        else:
            is_above_foreign = True


def _foreign_subdirectories(path: str, places: Places) -> list[str]:
    if not os.access(path, os.R_OK):
        return []
    with os.scandir(path) as entries:
        inner = (e.path for e in entries if e.is_dir(follow_symlinks=False))
        foreign = [p for p in inner if _is_foreign(p, places) and is_writable(p)]
    return sorted(foreign)[:MOST_SUBDIRECTORIES]


def is_writable(directory: str) -> bool:
    return os.access(directory, os.W_OK | os.X_OK)


def _is_foreign(path: str, places: Places) -> bool:
    status = os.lstat(path)
    return (status.st_uid, status.st_gid) != (places.uid, places.gid)


def is_socket(path: str) -> bool:
    """Return whether a path is a socket."""
    return stat.S_ISSOCK(mode_of(path))


def mode_of(path: str) -> int:
    """Return the mode of the path's target; 0 if nothing can be seen there."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):  # missing, forbidden, too long, or not a path at all
        return 0


def socket_paths(bound: Iterable[str]) -> Iterator[str]:
    """Yield Unix sockets with a path: a Docker daemon, an ssh agent, a desktop's bus.

    The kernel's table lists those of this network namespace. A host socket mounted into a container
    is a mount point instead, so mount points that show part of a file system are checked too. No
    others are: a network file system with a dead server would never answer.
    """
    table = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    fields = (line.split(maxsplit=7) for line in table)
    listed = (f[7] for f in fields if len(f) == 8 and f[7].startswith("/"))
    for path in dict.fromkeys((*listed, *bound)):
        if not path.startswith(NAME_SERVICES) and is_socket(path):
            yield path


# ---- the cover -----------------------------------------------------------------------------------

SCRATCH = "/dev"
ORIGINAL = f"{SCRATCH}/original"  # the whole original tree, read-only
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
# Judgement: tmpfs takes about a KiB of kernel memory per file, on top of its size limit.
MOST_FILES = 1_000_000
# Judgement: limits for rebuilding a directory above a mount entry by entry.
MOST_ENTRIES = 2000
LARGEST_COPY_BYTES = MIB


class Cover:
    """Covers directories one by one, and lists those that stayed read-only."""

    def __init__(self, places: Places, scratch_bytes: int) -> None:
        self._points = places.mount_points
        self._sockets = places.sockets
        self._num_layers = 0
        self.read_only: list[str] = []
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        _make_scratch(scratch_bytes, (*DEVICES, *places.devices))

    def directories(self, paths: Iterable[str]) -> None:
        """Cover these directories, parents first."""
        for path in paths:
            self._directory(path, path)

    def _directory(self, path: str, target: str) -> None:
        """Cover `path` at `target`, a different place only while a parent is rebuilt."""
        cover = self._rebuild if is_above_a_mount(path, self._points) else self._overlay
        if cover(path, target):
            return
        self.read_only.append(path)
        if path != target:
            _bind(ORIGINAL + path, target)

    def _overlay(self, path: str, target: str) -> bool:
        layer = self._layer()
        for name in ("upper", "work"):
            Path(f"{layer}/{name}").mkdir()
        _look_like(ORIGINAL + path, f"{layer}/upper")
        # "." because a path may contain the commas and colons that separate options.
        os.chdir(ORIGINAL + path)
        options = f"lowerdir=.,upperdir={layer}/upper,workdir={layer}/work,userxattr"
        try:
            linux.mount("overlay", target, "overlay", linux.MS_NODEV | linux.MS_NOSUID, options)
        except OSError:  # some file systems do not support overlays
            return False
        finally:
            os.chdir("/")
        return True

    def _rebuild(self, path: str, target: str) -> bool:
        """Recreate a directory with its entries: an overlay cannot span mounts below it."""
        names = [entry.name for entry in Path(ORIGINAL + path).iterdir()]
        if len(names) > MOST_ENTRIES:
            return False
        fresh = f"{self._layer()}/rebuilt"
        Path(fresh).mkdir()
        for name in names:
            self._entry(f"{path}/{name}", f"{fresh}/{name}")
        _look_like(ORIGINAL + path, fresh)
        _bind(fresh, target)
        return True

    def _entry(self, path: str, fresh: str) -> None:
        original = Path(ORIGINAL + path)
        if original.is_symlink():
            Path(fresh).symlink_to(original.readlink())
        elif original.is_dir():
            Path(fresh).mkdir()
            if _may_write(str(original)) or is_above_a_mount(path, self._points):
                self._directory(path, fresh)
            else:
                _bind(str(original), fresh)
        elif original.is_file():
            _copy_or_bind(original, Path(fresh))

    def _layer(self) -> str:
        self._num_layers += 1
        layer = f"{SCRATCH}/layers/{self._num_layers}"
        Path(layer).mkdir()
        return layer

    def finish(self) -> None:
        """Hide the sockets of other programs, and replace /dev and /proc."""
        self._directory("/dev/shm", f"{SCRATCH}/dev/shm")  # noqa: S108
        for path in self._sockets:
            if is_socket(path):  # it may be gone by now
                _bind(f"{SCRATCH}/nothing", path)
        _bind(f"{SCRATCH}/dev", "/dev")
        flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        try:
            linux.mount("proc", "/proc", "proc", flags)
        except PermissionError:
            # A container hides parts of /proc, so the kernel refuses a fresh one. The old one is
            # read-only by now, and no process listed there can be entered from inside.
            return


def _make_scratch(scratch_bytes: int, devices: Sequence[str]) -> None:
    """Mount the tmpfs, keep the original tree and the devices in it, make the rest read-only."""
    opened = {name: os.open(f"/dev/{name}", os.O_PATH) for name in (*devices, "shm")}
    options = f"size={scratch_bytes},nr_inodes={MOST_FILES},mode=755"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for name in ("original", "layers", "shm", "dev", "dev/pts", "dev/shm"):
        Path(SCRATCH, name).mkdir()
    for name in ("nothing", *devices):
        Path(SCRATCH, name).parent.mkdir(exist_ok=True)
        Path(SCRATCH, name).touch()
    for name, descriptor in opened.items():
        _bind(f"/proc/self/fd/{descriptor}", f"{SCRATCH}/{name}")
        os.close(descriptor)
    _bind("/", ORIGINAL)
    closed = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_NOSUID
    linux.set_mount_attributes("/", add=closed, is_recursive=True)
    linux.set_mount_attributes(SCRATCH, remove=linux.MOUNT_ATTR_RDONLY)
    _furnish_devices(devices)


def _furnish_devices(devices: Iterable[str]) -> None:
    """Create /dev with these devices: no disks, and GPUs only if they are asked for."""
    for name in devices:
        device = Path(f"{SCRATCH}/dev/{name}")
        device.parent.mkdir(exist_ok=True)
        device.touch()
        _bind(f"{ORIGINAL}/dev/{name}", str(device))
        linux.set_mount_attributes(str(device), remove=linux.MOUNT_ATTR_NODEV)
    for name, destination in _LINKS.items():
        Path(f"{SCRATCH}/dev/{name}").symlink_to(destination)
    flags = linux.MS_NOSUID | linux.MS_NOEXEC
    linux.mount("devpts", f"{SCRATCH}/dev/pts", "devpts", flags, "newinstance,ptmxmode=0666")


def _bind(source: str, target: str) -> None:
    linux.mount(source, target, None, linux.MS_BIND | linux.MS_REC)


def _copy_or_bind(original: Path, fresh: Path) -> None:
    """Copy a small readable file; bind any other one, which stays read-only."""
    if original.stat().st_size <= LARGEST_COPY_BYTES and os.access(original, os.R_OK):
        try:
            shutil.copyfile(original, fresh)
            _look_like(str(original), str(fresh))
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
        else:
            return
    fresh.touch()
    _bind(str(original), str(fresh))


def _look_like(original: str, fresh: str) -> None:
    """Copy the mode, the times, and the owner if it exists inside."""
    status = os.stat(original)
    try:
        os.chown(fresh, status.st_uid, status.st_gid)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL, errno.EOVERFLOW):
            raise
    Path(fresh).chmod(status.st_mode & 0o7777)
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))


def _may_write(directory: str) -> bool:
    """Decide by the mode: the kernel cannot tell, as everything is read-only by now."""
    status = os.stat(directory)
    if status.st_uid == os.geteuid() or os.geteuid() == 0:
        return bool(status.st_mode & stat.S_IWUSR)
    is_in_group = status.st_gid in (os.getegid(), *os.getgroups())
    return bool(status.st_mode & (stat.S_IWGRP if is_in_group else stat.S_IWOTH))
