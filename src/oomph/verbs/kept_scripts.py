"""Rehearsals of a script that were made before -> the same, without running it again.

Kept by the script and its arguments, the directory, the environment, the Python, what is
installed, oomph's own text and the kind of GPU; true as long as every file that a rehearsal looked
at is what it was. A rehearsal that started another program is not kept; one that failed is, where
an op failed, and not where a file or a package may have been missing. An entry that cannot be read
is made anew. What cannot be seen stands in docs/scripts.md.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from oomph.records.script import PretendedGpu, Script, Touched

    Ask = Callable[[bytes], bytes]

_MOST_ENTRIES = 400  # of some 50 KB; a plan takes 10 to 40
_SMALL_BYTES = 1 << 20  # of a file that is known by its content, and not by size and time
# A file system's clock may be so far behind the one that Python reads: it ticks 100 times a second.
_TICK_NS = 20_000_000
# What differs from one window to the next, and decides nothing of a training.
_OF_THE_TERMINAL = ("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM_SESSION_ID", "WINDOWID")
_MODULES = (".py", ".so", ".dist-info", ".egg-info")


class KeptScript:
    """The rehearsals of one script for one GPU: those that are known, and `ask` for the others."""

    def __init__(self, script: Script, gpu: PretendedGpu, ask: Ask, *, is_fresh: bool) -> None:
        self._ask, self._is_fresh = ask, is_fresh
        self._start = _digest(_decided_by(script, gpu))
        self._exact = _digest(asdict(gpu))
        self._now: dict[tuple[str, str], Any] = {}  # how things are, looked at once

    def ask(self, request: bytes) -> bytes:
        """The answer to a request for a rehearsal, by itself or from an earlier one."""
        known = None if self._is_fresh else self._find(request)
        if known is not None:
            return known
        began_ns = time.time_ns()
        answer = self._ask(request)
        self._keep(request, answer, began_ns)
        return answer

    def _find(self, request: bytes) -> bytes | None:
        for path in (self._path(request), self._path(request, self._exact)):
            try:
                entry = json.loads(gzip.decompress(path.read_bytes()))
                if all(self._is(kind, where, was) for kind, where, was in entry["world"]):
                    return str(entry["answer"]).encode()
            except (OSError, EOFError, ValueError, KeyError, TypeError):  # noqa: PERF203 - two
                continue
        return None

    def _is(self, kind: str, path: str, was: Any) -> bool:
        if (kind, path) not in self._now:
            self._now[kind, path] = _LOOKS[kind](path)
        return bool(self._now[kind, path] == was)

    def _keep(self, request: bytes, answer: bytes, began_ns: int) -> None:
        """Unless it may be another next time. A cache that cannot be written is no error."""
        from oomph.tracing.cache import drop_oldest, write
        from oomph.tracing.script.answers import for_later, touched_by

        touched = touched_by(answer)
        if touched is None or touched.unseen is not None:
            return
        places = _places(touched)
        if any(_has_changed_since(began_ns, kind, path) for kind, path in places):
            return
        world = [(kind, path, _LOOKS[kind](path)) for kind, path in places]
        content = json.dumps({"world": world, "answer": for_later(answer).decode()}).encode()
        path = self._path(request, self._exact if touched.asked_gpu else "any")
        if write(path, gzip.compress(content, compresslevel=1)):
            drop_oldest(path.parent, _MOST_ENTRIES)

    def _path(self, request: bytes, gpu: str = "any") -> Path:
        from oomph.tracing.cache import cache_directory

        name = f"{self._start}-{hashlib.sha256(request).hexdigest()[:16]}-{gpu}"
        return cache_directory().with_name("scripts") / f"{name}.json.gz"


def _decided_by(script: Script, gpu: PretendedGpu) -> list[Any]:
    from oomph.tracing.cache import hashes_of_rooms
    from oomph.tracing.kept import installed
    from oomph.tracing.traces import kind_of

    environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_TERMINAL}
    return [
        hashes_of_rooms("records", "tracing", "training"),
        (sys.version, sys.executable, sys.flags.optimize, installed()),
        {**asdict(script), "directory": os.path.realpath(script.directory)},
        sorted(environment.items()),
        (kind_of(gpu.capability), gpu.count),
    ]


def _digest(what: Any) -> str:
    return hashlib.sha256(json.dumps(what).encode()).hexdigest()[:24]


# ---- the world -----------------------------------------------------------------------------------


def _places(touched: Touched) -> list[tuple[str, str]]:
    kinds = {
        "file": touched.looked_at,
        "directory": touched.listed,
        "modules": touched.imported_from,
    }
    return [(kind, path) for kind, paths in kinds.items() for path in paths]


def _has_changed_since(since_ns: int, kind: str, path: str) -> bool:
    """While it was rehearsed: then nobody knows which of the two it saw."""
    import stat

    try:
        found = os.stat(path)
    except (OSError, ValueError):  # it is not there, or a zero byte is in its name
        return False
    decides = kind == "directory" or stat.S_ISREG(found.st_mode)
    return decides and max(found.st_mtime_ns, found.st_ctime_ns) > since_ns - _TICK_NS


def _file(path: str) -> Any:
    """A file: its content if it is small, else its size and time; a directory: that it is one."""
    import stat
    from pathlib import Path

    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return stat.S_IFMT(found.st_mode)
        if found.st_size <= _SMALL_BYTES:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        return type(error).__name__
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]


def _directory(path: str) -> Any:
    try:
        return os.stat(path).st_mtime_ns
    except (OSError, ValueError) as error:
        return type(error).__name__


def _modules(path: str) -> Any:
    """The names in a directory that an import could find."""
    from pathlib import Path

    try:
        names = sorted(os.listdir(path))  # noqa: PTH208 - as names
    except (OSError, ValueError) as error:
        return type(error).__name__
    return [name for name in names if _is_module(Path(path), name)]


def _is_module(directory: Path, name: str) -> bool:
    return name.endswith(_MODULES) or (directory / name / "__init__.py").exists()


_LOOKS: dict[str, Callable[[str], Any]] = {
    "file": _file,
    "directory": _directory,
    "modules": _modules,
}
