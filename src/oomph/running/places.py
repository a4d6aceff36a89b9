"""Where a program may want to write -> the directories that have to be covered for it.

Read before anything is mounted: afterwards the roots of overlays look as if they were the
user's own. Everything that is not covered is read-only inside, so a place that is missed here
is refused to the program and not damaged.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from oomph.running.failures import NoSandbox
from oomph.running.mount_points import bound_points, mount_points, read_mount_table

# Directories that the kernel makes up. They stay as they are, read-only, or are made anew.
OF_THE_KERNEL = frozenset({"/dev", "/proc", "/sys"})
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - looked at; nothing is written to them
# Services that only look up names of users and hosts; without them a user may have no name.
NAME_SERVICES = ("/run/nscd/", "/var/run/nscd/", "/var/lib/sss/", "/run/systemd/userdb/")
# Overlays on subdirectories that belong to another group, each for itself; a mount costs 0.1 ms.
MOST_SUBDIRECTORIES = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """What the sandbox has to know of the outside: whose it is, and where it may write."""

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

    def probed(self) -> tuple[str, ...]:
        """The places where a write must be seen not to leave the sandbox."""
        return tuple(dict.fromkeys(p for p in (self.cwd, self.home, self.temporary) if p))


def find_places() -> Places:
    """Those of this process. Nothing is written to find them."""
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
    )


def _current_directory() -> str:
    try:
        return str(Path.cwd())
    except FileNotFoundError as error:
        raise NoSandbox("the current directory is gone", attempt="cd to one that exists") from error


def _home() -> str | None:
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor the list of users knows one
        return None
    return str(home.resolve()) if stat.S_ISDIR(mode_of(str(home))) else None


def _temporary() -> str:
    """As Python's tempfile finds it, which writes a file to each candidate to see if it can."""
    named = (os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    for path in (*named, *TEMPORARY):
        if path and is_writable(path):
            return str(Path(path).resolve())
    return str(Path.cwd())


def named_directories(texts: Iterable[str]) -> Iterator[str]:
    """Each directory that a text names, or the nearest one above that exists.

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
    """What root may write to: every directory of the root that the kernel did not make up."""
    with os.scandir("/") as entries:
        found = sorted(e.path for e in entries if e.is_dir(follow_symlinks=False))
    return tuple(path for path in found if path not in OF_THE_KERNEL)


def to_cover(places: Places) -> tuple[str, ...]:
    """The directories that get an overlay of their own, parents first.

    A user without privileges can map only his own user and group. What belongs to another
    cannot be copied into an overlay (EOVERFLOW), nor can anything below it: so there is one
    on the topmost directory that the user may write to, and more where owners change below.
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
    """Whether there is a socket at a path."""
    return stat.S_ISSOCK(mode_of(path))


def mode_of(path: str) -> int:
    """The mode of what a path leads to; 0 where nothing can be seen there."""
    try:
        return os.stat(path).st_mode
    except (OSError, ValueError):  # not there, not allowed, too long, not a path at all
        return 0


def socket_paths(bound: Iterable[str]) -> Iterator[str]:
    """Unix sockets with a name on disk: a Docker daemon, an ssh agent, a desktop's bus.

    The kernel's table has those of this network namespace; a socket of the host that was
    mounted into a container is a mount point instead. No other mount point is looked at: a
    network file system whose server is gone would never answer.
    """
    table = Path("/proc/net/unix").read_text(errors="surrogateescape").splitlines()[1:]
    fields = (line.split(maxsplit=7) for line in table)
    listed = (f[7] for f in fields if len(f) == 8 and f[7].startswith("/"))
    for path in dict.fromkeys((*listed, *bound)):
        if not path.startswith(NAME_SERVICES) and is_socket(path):
            yield path
