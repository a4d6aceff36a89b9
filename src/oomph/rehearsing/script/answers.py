"""Requests for a rehearsal, and its answers <-> bytes that carry no code.

The script controlled the process that answers, so nothing from it may be executed here: answers are
JSON, parsed strictly.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from oomph.errors import OomphError, UsageError, UserCodeError
from oomph.records.generation import trace_capability
from oomph.records.script import Overrides, PretendedGpu, Script, Seen, Touched
from oomph.records.stored import as_json, from_json, to_jsonable
from oomph.records.trace import Trace, from_columns, to_columns
from oomph.records.workload import Possible
from oomph.store import Store, digest, surroundings

_ANEW = "--fresh, for it was rehearsed before"
# Errors that malformed JSON may cause while it is parsed.
_MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)
_KINDS = {kind.__name__: kind for kind in (OomphError, UsageError, UserCodeError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """The result of rehearsing a script."""

    trace: Trace
    seen: Seen
    possible: Possible | None  # tricks that apply to the model; None: nothing was trained
    files: tuple[str, ...]  # the user's own imported files
    touched: Touched  # the answer is valid while these are unchanged


def to_request(overrides: Overrides) -> bytes:
    return as_json(overrides).encode()


def from_request(request: bytes) -> Overrides:
    return from_json(Overrides, request.decode())


def to_answer(found: Rehearsed) -> bytes:
    content = {
        "trace": to_columns(found.trace),
        "seen": as_json(found.seen),
        "possible": None if found.possible is None else as_json(found.possible),
        "files": found.files,
        "touched": as_json(found.touched),
    }
    return json.dumps(content).encode()


def mark_repeatable(error: OomphError, touched: Touched) -> OomphError:
    """Mark an error as repeatable while everything the script touched is unchanged."""
    vars(error)["touched"] = touched
    return error


def error_answer(error: OomphError) -> bytes:
    kind = next(name for name, kind in reversed(_KINDS.items()) if isinstance(error, kind))
    texts = {"what": error.what, "because": error.because, "attempt": error.attempt}
    touched = vars(error).get("touched")
    content = {
        "kind": kind,
        "error": to_jsonable(texts),
        "touched": None if touched is None else as_json(touched),
    }
    return json.dumps(content).encode()


def _touched_by(content: bytes) -> Touched | None:
    """Return what an answer or a repeatable error depends on; None if unknown or malformed."""
    try:
        return _parsed(content)[1]
    except _MALFORMED:
        return None


def _as_stored(content: bytes) -> bytes:
    """Return an answer as the cache gives it: an error also says how to rehearse again."""
    read = json.loads(content)
    if "error" not in read:
        return content
    attempt = read["error"]["attempt"]
    read["error"]["attempt"] = f"{attempt}; {_ANEW}" if attempt else _ANEW
    return json.dumps(read).encode()


def with_output(content: bytes, lines: Sequence[str]) -> bytes:
    """Return the answer; if the script failed, add the last lines it printed."""
    read = json.loads(content)
    if "error" not in read or read["kind"] == "UsageError":
        return content
    read["error"]["printed"] = list(lines)
    return json.dumps(read).encode()


def from_answer(content: bytes) -> Rehearsed:
    """Parse an answer. Raises what the rehearsal raised, or UserCodeError if it is malformed."""
    try:
        found, _ = _parsed(content)
    except _MALFORMED as reason:
        raise UserCodeError(
            "the rehearsal's answer makes no sense",
            because=f"{type(reason).__name__}: {reason}"[:300],
            attempt="running the script by itself: something in it wrote to files it did not open",
        ) from None
    if isinstance(found, OomphError):
        raise found
    return found


def _parsed(content: bytes) -> tuple[Rehearsed | OomphError, Touched | None]:
    read = json.loads(content)
    touched = None if read["touched"] is None else from_json(Touched, read["touched"])
    if "error" in read:
        return _error(read), touched
    found = Rehearsed(
        trace=from_columns(read["trace"]),
        seen=from_json(Seen, read["seen"]),
        possible=None if read["possible"] is None else from_json(Possible, read["possible"]),
        files=tuple(str(file) for file in read["files"]),
        touched=from_json(Touched, read["touched"]),
    )
    return found, touched


def _error(content: dict[str, Any]) -> OomphError:
    texts = {name: content["error"][name] for name in ("what", "because", "attempt")}
    if any(text is not None and not isinstance(text, str) for text in texts.values()):
        raise TypeError("an error that is no text")
    error = _KINDS[content["kind"]](texts.pop("what"), **texts)
    error.printed = tuple(str(line) for line in content["error"].get("printed", ()))
    return error


# ---- stored answers of earlier rehearsals --------------------------------------------------------
# The key of an entry: the script and its arguments, the directory, the environment, Python, the
# installed packages, oomph's own code and the kind of GPU. An entry is valid while every file that
# the rehearsal looked at is unchanged. A rehearsal that started another program is not stored. A
# failed one is stored if an op failed, but not if a file or a package may have been missing.
# docs/scripts.md lists what oomph cannot see.

_STORE = Store("scripts", most_entries=400)  # some 50 KB each; a plan takes 10 to 40
_SMALL_BYTES = 1 << 20  # judgement: larger files are compared by size and time, not by content
# A file system's clock may lag this far behind Python's: it ticks 100 times a second.
_TICK_NS = 20_000_000
# These differ between terminal windows and do not affect training.
_OF_THE_TERMINAL = ("_", "OLDPWD", "SHLVL", "COLUMNS", "LINES", "TERM_SESSION_ID", "WINDOWID")
_MODULES = (".py", ".so", ".dist-info", ".egg-info")


class AnswerStore:
    """The rehearsals of one script for one GPU: stored ones, and `ask` for new ones."""

    def __init__(
        self,
        script: Script,
        gpu: PretendedGpu,
        ask: Callable[[bytes], bytes],
        *,
        is_fresh: bool,
    ) -> None:
        self._ask, self._is_fresh = ask, is_fresh
        self._start = _decided_by(script, gpu)
        self._gpu = digest(asdict(gpu))
        self._now: dict[tuple[str, str], Any] = {}  # state of files, each looked up once

    def ask(self, request: bytes) -> bytes:
        """Return the answer to a request, from an earlier rehearsal if that is still valid."""
        known = None if self._is_fresh else self._find(request)
        if known is not None:
            return known
        began_ns = time.time_ns()
        answer = self._ask(request)
        self._keep(request, answer, began_ns)
        return answer

    def _find(self, request: bytes) -> bytes | None:
        for gpu in ("any", self._gpu):
            entry = _STORE.read_json(self._name(request, gpu))
            try:
                if all(self._is(kind, where, was) for kind, where, was in entry["world"]):
                    return str(entry["answer"]).encode()
            except (ValueError, KeyError, TypeError):
                continue
        return None

    def _is(self, kind: str, path: str, was: Any) -> bool:
        if (kind, path) not in self._now:
            self._now[kind, path] = _state_of(kind, path)
        return bool(self._now[kind, path] == was)

    def _keep(self, request: bytes, answer: bytes, began_ns: int) -> None:
        """Store an answer, unless it may differ next time."""
        touched = _touched_by(answer)
        if touched is None or touched.unseen is not None:
            return
        places = _places(touched)
        if any(_has_changed_since(began_ns, kind, path) for kind, path in places):
            return
        world = [(kind, path, _state_of(kind, path)) for kind, path in places]
        name = self._name(request, self._gpu if touched.asked_gpu else "any")
        _STORE.write_json(name, {"world": world, "answer": _as_stored(answer).decode()})

    def _name(self, request: bytes, gpu: str) -> str:
        return f"{digest(self._start, request.decode(), gpu)}.json.gz"


def _decided_by(script: Script, gpu: PretendedGpu) -> str:
    environment = {k: v for k, v in os.environ.items() if k not in _OF_THE_TERMINAL}
    return digest(
        *surroundings(),
        (sys.executable, sys.flags.optimize),
        {**asdict(script), "directory": os.path.realpath(script.directory)},
        sorted(environment.items()),
        (trace_capability(gpu.capability), gpu.count),
    )


# ---- the files that a rehearsal looked at --------------------------------------------------------


def _places(touched: Touched) -> list[tuple[str, str]]:
    kinds = {
        "file": touched.looked_at,
        "directory": touched.listed,
        "modules": touched.imported_from,
    }
    return [(kind, path) for kind, paths in kinds.items() for path in paths]


def _has_changed_since(since_ns: int, kind: str, path: str) -> bool:
    """Return whether the file changed during the rehearsal, which may have seen either version."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):  # missing, or its name contains a zero byte
        return False
    decides = kind == "directory" or stat.S_ISREG(found.st_mode)
    return decides and max(found.st_mtime_ns, found.st_ctime_ns) > since_ns - _TICK_NS


def _state_of(kind: str, path: str) -> Any:
    """Return what must be unchanged; for a path that cannot be read, the name of the error."""
    try:
        if kind == "directory":
            return os.stat(path).st_mtime_ns
        if kind == "modules":
            return _importable(path)
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            return stat.S_IFMT(found.st_mode)
        if found.st_size <= _SMALL_BYTES:
            return hashlib.sha256(Path(path).read_bytes()).hexdigest()
        return [found.st_size, found.st_mtime_ns, found.st_ctime_ns]
    except (OSError, ValueError) as error:
        return type(error).__name__


def _importable(path: str) -> list[str]:
    """Return the names in a directory that an import could find."""
    names = sorted(os.listdir(path))  # noqa: PTH208 - as names
    return [
        name
        for name in names
        if name.endswith(_MODULES) or Path(path, name, "__init__.py").exists()
    ]
