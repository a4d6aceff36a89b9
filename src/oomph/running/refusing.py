"""A directory -> Python code that can write only below it. Weak: it binds Python's own calls.

An audit hook sees what Python code does through Python's functions. It does not see native code
(ctypes, an extension that opens files itself, as torch.save does), so this is no barrier. It
refuses to start other programs and to reach the network, because it could not follow them there.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from pathlib import Path

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_SINKS = ("/dev/null", "/dev/zero", "/dev/full", "/dev/tty", "/dev/pts", "/dev/ptmx")
# Events of Python's audit table. Of their arguments, which are paths that change, and which is
# the open directory that such a path starts from (-1 if it starts from none).
_CHANGED_PATHS: dict[str, tuple[tuple[int, int | None], ...]] = {
    "os.remove": ((0, 1),),
    "os.rename": ((0, 2), (1, 3)),
    "os.mkdir": ((0, 2),),
    "os.rmdir": ((0, 1),),
    "os.link": ((1, 3),),
    "os.symlink": ((1, 2),),
    "os.truncate": ((0, None),),
    "os.chmod": ((0, 2),),
    "os.chown": ((0, 3),),
    "os.utime": ((0, 3),),
    "os.setxattr": ((0, None),),
    "os.removexattr": ((0, None),),
    "sqlite3.connect": ((0, None),),
}
_OTHER_PROGRAMS = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile"}
)
_NETWORK = frozenset({"socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo"})


def refuse_writes_outside(directories: tuple[str, ...]) -> None:
    """Put the hook on this process. It cannot be taken off again."""
    allowed = tuple(str(Path(directory).resolve()) for directory in directories)
    is_checking = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_checking
        if is_checking:  # looking a path up raises events of its own
            return
        is_checking = True
        try:
            _check(event, arguments, lambda path: _is_below(path, allowed))
        finally:
            is_checking = False

    sys.addaudithook(watch)


def _check(event: str, arguments: tuple[object, ...], is_ours: Callable[[object], bool]) -> None:
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & _WRITING and not is_ours(path):
            raise _refused(errno.EROFS, path)
    elif event in _OTHER_PROGRAMS:
        raise _refused(errno.EACCES, arguments[0])
    elif event in _NETWORK and _is_of_the_network(arguments):
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))
    else:
        for index, directory in _CHANGED_PATHS.get(event, ()):
            start = None if directory is None else arguments[directory]
            if not is_ours(_starting_from(start, arguments[index])):
                raise _refused(errno.EROFS, arguments[index])


def _starting_from(directory: object, path: object) -> object:
    """A path that may be relative to an open directory, as shutil.rmtree has it."""
    if isinstance(directory, int) and directory >= 0 and isinstance(path, (str, bytes)):
        return Path(f"/proc/self/fd/{directory}", os.fsdecode(path))
    return path


def _refused(number: int, path: object) -> OSError:
    return OSError(number, f"{os.strerror(number)} (refused by oomph, --unprotected)", str(path))


def _is_of_the_network(arguments: tuple[object, ...]) -> bool:
    """Not a socket on disk: that one has a path for an address."""
    family = getattr(arguments[0], "family", None)
    return family is None or family.name in ("AF_INET", "AF_INET6")


def _is_below(path: object, allowed: tuple[str, ...]) -> bool:
    """Whether a path, or what is open under a number, lies where writing is allowed."""
    if isinstance(path, int):
        return True  # opened before, and checked then
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    named = Path(os.fsdecode(path))
    where = str(named.parent.resolve() / named.name if named.is_symlink() else named.resolve())
    return any(where == place or where.startswith(f"{place}/") for place in (*allowed, *_SINKS))
