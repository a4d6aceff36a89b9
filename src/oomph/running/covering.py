"""Places -> a view of the files in which writing reaches nobody. Runs inside the namespaces.

First every mount becomes read-only, at once and by the kernel, so that nothing can be
forgotten. Then overlays are put on directories, in place: reading goes through to what is there,
writing goes to a private tmpfs. What no overlay fits on stays read-only. No directory is made
outside: the tmpfs lies on /dev, which gets a small one of our own in the end.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from oomph.running import linux
from oomph.running.mount_points import is_above_a_mount
from oomph.running.places import Places, is_socket
from oomph.units import MIB

SCRATCH = "/dev"
ORIGINAL = f"{SCRATCH}/original"  # the whole tree as it was, read-only
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
_LINKS = {
    "ptmx": "pts/ptmx",
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}
# tmpfs keeps about a KiB of kernel memory per file, beyond its size limit.
MOST_FILES = 1_000_000
# A directory above a mount is built anew, entry by entry, up to these sizes.
MOST_ENTRIES = 2000
LARGEST_COPY_BYTES = MIB


class Cover:
    """Covers directories one by one, and remembers those that stayed read-only."""

    def __init__(self, places: Places, scratch_bytes: int) -> None:
        self._points = places.mount_points
        self._sockets = places.sockets
        self._num_layers = 0
        self.read_only: list[str] = []
        linux.mount("none", "/", None, linux.MS_REC | linux.MS_PRIVATE)
        _make_scratch(scratch_bytes)

    def directories(self, paths: Iterable[str]) -> None:
        """Cover these, parents first."""
        for path in paths:
            self._directory(path, path)

    def _directory(self, path: str, target: str) -> None:
        """Cover what `path` names, at `target`: the same place, once it is in place."""
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
        # Named by ".", because a path may hold the commas and colons that separate options.
        os.chdir(ORIGINAL + path)
        options = f"lowerdir=.,upperdir={layer}/upper,workdir={layer}/work,userxattr"
        try:
            linux.mount("overlay", target, "overlay", linux.MS_NODEV | linux.MS_NOSUID, options)
        except OSError:  # there are file systems that the kernel puts none on
            return False
        finally:
            os.chdir("/")
        return True

    def _rebuild(self, path: str, target: str) -> bool:
        """A new directory with the same entries: no overlay goes over one with mounts below."""
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
        """Hide the sockets of others, and put a fresh /dev and /proc over the old ones."""
        self._directory("/dev/shm", f"{SCRATCH}/dev/shm")  # noqa: S108
        for path in self._sockets:
            if is_socket(path):  # it may be gone by now
                _bind(f"{SCRATCH}/nothing", path)
        _bind(f"{SCRATCH}/dev", "/dev")
        flags = linux.MS_RDONLY | linux.MS_NOSUID | linux.MS_NODEV | linux.MS_NOEXEC
        try:
            linux.mount("proc", "/proc", "proc", flags)
        except PermissionError:
            # In a container parts of /proc are hidden, and the kernel refuses a whole one. The
            # old one is read-only by now, and no process in it may be entered from in here.
            return


def _make_scratch(scratch_bytes: int) -> None:
    """The tmpfs with the original tree and the devices, and everything else read-only."""
    kept = {name: os.open(f"/dev/{name}", os.O_PATH) for name in (*DEVICES, "shm")}
    options = f"size={scratch_bytes},nr_inodes={MOST_FILES},mode=755"
    linux.mount("tmpfs", SCRATCH, "tmpfs", linux.MS_NOSUID | linux.MS_NODEV, options)
    for name in ("original", "layers", "shm", "dev", "dev/pts", "dev/shm"):
        Path(SCRATCH, name).mkdir()
    for name in ("nothing", *DEVICES):
        Path(SCRATCH, name).touch()
    for name, descriptor in kept.items():
        _bind(f"/proc/self/fd/{descriptor}", f"{SCRATCH}/{name}")
        os.close(descriptor)
    _bind("/", ORIGINAL)
    closed = linux.MOUNT_ATTR_RDONLY | linux.MOUNT_ATTR_NODEV | linux.MOUNT_ATTR_NOSUID
    linux.set_mount_attributes("/", add=closed, is_recursive=True)
    linux.set_mount_attributes(SCRATCH, remove=linux.MOUNT_ATTR_RDONLY)
    _furnish_devices()


def _furnish_devices() -> None:
    """/dev as every program expects it, without the disks and the GPUs."""
    for name in DEVICES:
        device = Path(f"{SCRATCH}/dev/{name}")
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
    """A small file that can be read becomes a copy; another stays what it is, read-only."""
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
    """Give the owner, if that one exists in here, the mode and the times."""
    status = os.stat(original)
    try:
        os.chown(fresh, status.st_uid, status.st_gid)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.EINVAL, errno.EOVERFLOW):
            raise
    Path(fresh).chmod(status.st_mode & 0o7777)
    os.utime(fresh, ns=(status.st_atime_ns, status.st_mtime_ns))


def _may_write(directory: str) -> bool:
    """As its mode says. The kernel is no help: everything is read-only by now."""
    status = os.stat(directory)
    if status.st_uid == os.geteuid() or os.geteuid() == 0:
        return bool(status.st_mode & stat.S_IWUSR)
    is_in_group = status.st_gid in (os.getegid(), *os.getgroups())
    return bool(status.st_mode & (stat.S_IWGRP if is_in_group else stat.S_IWOTH))
