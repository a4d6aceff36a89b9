"""What a script asks of the files around it -> Touched: what must be unchanged for the same answer.

Python's audit events tell of everything that Python opens, lists or starts; `os.stat` and its like
have none and are patched. What compiled code opens by itself is seen if it is open or mapped at
the end, or if Python looked at it before, as libraries do to check that it is there.
"""

from __future__ import annotations

import fcntl
import os
import sys
from importlib.util import source_from_cache
from pathlib import Path
from typing import Any

from oomph.records.script import Touched
from oomph.tracing.script.users_line import is_users

_MOST_PATHS = 20_000  # a data set of more single files takes longer to look at than to rehearse
# https://docs.python.org/3/library/audit_events.html. A program that is started opens what it
# likes, unheard; a process that is forked off hears for itself alone.
_STARTING = frozenset(
    {"subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"}
    | {"os.forkpty", "pty.spawn"}
)
# These tell of the machine, and open nothing of the user's; accelerate, say, asks nvidia-smi.
_HARMLESS = frozenset({"nvidia-smi", "uname", "lscpu", "nproc", "hostname", "ldconfig"})
_LISTING = frozenset({"os.listdir", "os.scandir"})
_CHANGING = ("/proc/", "/sys/", "/dev/")  # of the moment, and not the user's
_OF_THE_SYSTEM = ("/usr/lib", "/usr/share/", "/lib", "/etc/")  # hier(7)


class Touching:
    """Hears what is opened, listed and looked at, from `listen` on and for good."""

    def __init__(self) -> None:
        self._looked_at: set[str] = set()
        self._listed: set[str] = set()
        self._imported_from: set[str] = set()
        self._unseen: str | None = None
        self._path: list[str] = []

    def listen(self) -> None:
        self._path = [os.path.abspath(path) for path in sys.path]  # noqa: PTH100 - "" is here
        sys.addaudithook(self._hear)
        for name in ("stat", "lstat", "access"):
            original = getattr(os, name)
            setattr(os, name, self._noting(original))
            for able in (os.supports_dir_fd, os.supports_fd, os.supports_follow_symlinks):
                if original in able:  # shutil asks there
                    able.add(getattr(os, name))

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            self._note_open(*args)
        elif event in _LISTING:
            # Modules and their versions are looked for in every directory of sys.path.
            is_import = "importlib" in sys._getframe(1).f_code.co_filename
            _note(args[0] or ".", self._imported_from if is_import else self._listed)
        elif event in _STARTING and not _is_harmless(event, args):
            self._unseen = self._unseen or f"it started a process ({event})"

    def _note_open(self, path: Any, _: Any, flags: Any) -> None:
        is_emptied = isinstance(flags, int) and flags & os.O_TRUNC
        if not is_emptied:
            _note(path, self._looked_at)

    def _noting(self, original: Any) -> Any:
        def noting(path: Any, *args: Any, **kwargs: Any) -> Any:
            _note(path, self._looked_at)
            return original(path, *args, **kwargs)

        return noting

    def found(self, files: tuple[str, ...], asked_gpu: set[str]) -> Touched:
        """All so far; `files` are those of the modules that the script has loaded."""
        looked_at = {*files, *_held_open(), *self._looked_at}
        imported_from = self._imported_from | set(self._path)
        found = {_source_of(path) for path in looked_at if _decides(path)}
        unseen = self._unseen
        if len(found) > _MOST_PATHS:
            found, unseen = set(), f"it looked at {len(found)} files"
        return Touched(
            looked_at=tuple(sorted(found)),
            listed=tuple(sorted(filter(_decides, self._listed))),
            imported_from=tuple(sorted(filter(_decides, imported_from))),
            asked_gpu=tuple(sorted(asked_gpu)),
            unseen=unseen,
        )


def _is_harmless(event: str, args: tuple[Any, ...]) -> bool:
    """Whether a program is started that reads nothing of the user's; a shell may do anything."""
    program = args[0] if event == "subprocess.Popen" else None
    return isinstance(program, str) and os.path.basename(program) in _HARMLESS  # noqa: PTH119


def _note(path: Any, where: set[str]) -> None:
    """A number is of a file that was opened before."""
    if isinstance(path, str | bytes | os.PathLike):
        where.add(os.path.join(os.getcwd(), os.fsdecode(path)))  # noqa: PTH109, PTH118 - thousands


def _decides(path: str) -> bool:
    """Whether it is the user's: what is installed is known by its version."""
    is_library = path.startswith((sys.prefix, sys.base_prefix)) or not is_users(path)
    return not is_library and not path.startswith((*_CHANGING, *_OF_THE_SYSTEM))


def _source_of(path: str) -> str:
    """Of a compiled module its text: Python may compile it again at any time."""
    if path.endswith(".pyc") and Path(path).parent.name == "__pycache__":
        try:
            return source_from_cache(path)
        except ValueError:  # a name that Python would not give
            return path
    return path


def _held_open() -> set[str]:
    """The files that this process has open or mapped, whoever opened them."""
    mapped = {
        words[5]
        for line in Path("/proc/self/maps").read_text().splitlines()
        if len(words := line.split(maxsplit=5)) == 6 and words[5].startswith("/")
    }
    own = Path("/proc/self/fd")
    names = [name for name in os.listdir(own) if _is_readable(int(name))]  # noqa: PTH208 - as names
    opened = {os.path.realpath(own / name) for name in names}
    return {path for path in mapped | opened if path.startswith("/") and _decides(path)}


def _is_readable(descriptor: int) -> bool:
    """The file that a shell sends the output to is none that was looked at."""
    try:
        return fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
    except OSError:  # that of the listing itself, which is closed by now
        return False
