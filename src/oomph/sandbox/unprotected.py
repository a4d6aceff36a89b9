"""A server function -> the same function in a process that is watched but not contained.

For machines whose kernel refuses namespaces, and only if the user asks for it. Writes outside a
scratch directory are refused: by Landlock if the kernel has it, and by a hook in Python, which
native code bypasses. The keeper adopts and kills whatever the script leaves behind.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from oomph.sandbox import linux
from oomph.sandbox.inside import (
    GO,
    Outside,
    Serve,
    ending,
    furnish,
    go_offline,
    make_terminal,
    with_exit,
)

# ---- let Python code write only below some directories -------------------------------------------
# Weak: an audit hook sees what Python code does through Python's functions. It does not see native
# code (ctypes, or an extension that opens files itself, as torch.save does), so it is no barrier.
# It also refuses other programs and the network, because it could not follow the script there.

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
# Events of Python's audit table. For each changed path: the index of its argument, and the index of
# the open directory that it is relative to (the argument is -1 if there is none).
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
    """Install the audit hook in this process. It cannot be removed."""
    allowed = tuple(str(Path(directory).resolve()) for directory in directories)
    is_checking = False

    def watch(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal is_checking
        if is_checking:  # resolving a path raises events, too
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
    """Return a path that may be relative to an open directory, as in shutil.rmtree."""
    if isinstance(directory, int) and directory >= 0 and isinstance(path, (str, bytes)):
        return Path(f"/proc/self/fd/{directory}", os.fsdecode(path))
    return path


def _refused(number: int, path: object) -> OSError:
    return OSError(number, f"{os.strerror(number)} (refused by oomph, --unprotected)", str(path))


def _is_of_the_network(arguments: tuple[object, ...]) -> bool:
    """Return whether the socket is on a network; a Unix socket has a path as its address."""
    family = getattr(arguments[0], "family", None)
    return family is None or family.name in ("AF_INET", "AF_INET6")


def _is_below(path: object, allowed: tuple[str, ...]) -> bool:
    """Return whether a path or an open file lies where writing is allowed."""
    if isinstance(path, int):
        return True  # checked when it was opened
    if not isinstance(path, (str, bytes, os.PathLike)):
        return False
    named = Path(os.fsdecode(path))
    where = str(named.parent.resolve() / named.name if named.is_symlink() else named.resolve())
    return any(
        where == place or where.startswith(f"{place}/") for place in (*allowed, *linux.SINKS)
    )


# ---- the server and its keeper -------------------------------------------------------------------

# Caches and settings that libraries write unasked; each gets a directory of its name.
CACHES = (
    "XDG_CACHE_HOME",
    "XDG_CONFIG_HOME",
    "MPLCONFIGDIR",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "WANDB_DIR",
    "NUMBA_CACHE_DIR",
)


class _Ended(BaseException):
    """The keeper should end, or its parent has ended."""


def watch(serve: Serve, outside: Outside, parent: int, devices: tuple[str, ...]) -> int:
    """Run the keeper of an unprotected server, until the server ends. Return its exit code."""
    linux.adopt_orphans()
    linux.refuse_to_be_traced()
    scratch = tempfile.mkdtemp(prefix="oomph-")
    try:
        signal.signal(signal.SIGTERM, _end)
        if os.getppid() != parent:  # it ended before the handler was installed
            return 1
        terminal = make_terminal()
        server = os.fork()
        if server == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            with_exit(lambda: _be_server(serve, outside, scratch, terminal, devices))
        return ending(server)
    except _Ended:
        return 128 + signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _kill_descendants()
        shutil.rmtree(scratch, ignore_errors=True)


def _end(_number: int, _frame: FrameType | None) -> None:
    raise _Ended


def _kill_descendants() -> None:
    """Kill children until none are left: the orphans of a killed child become ours."""
    while True:
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _children() -> list[int]:
    numbers = (entry.name for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [pid for pid in map(int, numbers) if _is_child(pid)]


def _is_child(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:  # it ended meanwhile
        return False
    # proc(5): the name is in parentheses and may contain any character; then state and parent pid
    return int(stat.rpartition(")")[2].split()[1]) == os.getpid()


def _be_server(
    serve: Serve, outside: Outside, scratch: str, terminal: int, devices: tuple[str, ...]
) -> int:
    furnish(terminal)
    linux.die_with_parent()
    for name in CACHES:
        os.environ[name] = f"{scratch}/{name.lower()}"
    go_offline(scratch)
    writable = (scratch, "/dev/shm")  # noqa: S108 - loaders pass tensors there
    opened = tuple(f"/dev/{name}" for name in devices)
    has_landlock = linux.write_only_below(writable, opened)
    refuse_writes_outside((*writable, *opened))
    outside.report(has_landlock=has_landlock)
    outside.wait_for(GO)
    serve(outside.requests, outside.answers)
    return 0
