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
# Events of Python's audit table, and which of their arguments are paths that change.
_CHANGED_PATHS = {
    "os.remove": (0,),
    "os.rename": (0, 1),
    "os.mkdir": (0,),
    "os.rmdir": (0,),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "os.chown": (0,),
    "os.chflags": (0,),
    "os.utime": (0,),
    "os.setxattr": (0,),
    "os.removexattr": (0,),
    "sqlite3.connect": (0,),
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
        for index in _CHANGED_PATHS.get(event, ()):
            if not is_ours(arguments[index]):
                raise _refused(errno.EROFS, arguments[index])


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
