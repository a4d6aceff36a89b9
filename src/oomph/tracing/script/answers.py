"""What is asked of a rehearsal, and what it answers <-> bytes that carry no code.

The script has had the process that answers: nothing of it may be run here, so it is JSON, read
strictly.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from oomph.errors import OomphError, UsageError, UserCodeError
from oomph.records.possible import Possible
from oomph.records.script import Overrides, Seen, Touched
from oomph.records.stored import as_json, from_json, to_jsonable
from oomph.records.trace import Trace
from oomph.records.trace_columns import from_columns, to_columns

_ANEW = "--fresh, for it was rehearsed before"
_KINDS = {kind.__name__: kind for kind in (OomphError, UsageError, UserCodeError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What a rehearsal of a script has found."""

    trace: Trace
    seen: Seen
    possible: Possible | None  # what can be put on the model; None: nothing was trained
    files: tuple[str, ...]  # the user's own, that were imported
    touched: Touched  # what must be unchanged for the same answer


def question(overrides: Overrides) -> bytes:
    return as_json(overrides).encode()


def asked(request: bytes) -> Overrides:
    return from_json(Overrides, request.decode())


def answer(found: Rehearsed) -> bytes:
    content = {
        "trace": to_columns(found.trace),
        "seen": as_json(found.seen),
        "possible": None if found.possible is None else as_json(found.possible),
        "files": found.files,
        "touched": as_json(found.touched),
    }
    return json.dumps(content).encode()


def lasting(error: OomphError, touched: Touched) -> OomphError:
    """An error that would be the same again, as long as what the script touched is."""
    vars(error)["touched"] = touched
    return error


def refusal(error: OomphError) -> bytes:
    kind = next(name for name, kind in reversed(_KINDS.items()) if isinstance(error, kind))
    told = {"what": error.what, "because": error.because, "attempt": error.attempt}
    touched = vars(error).get("touched")
    content = {
        "kind": kind,
        "error": to_jsonable(told),
        "touched": None if touched is None else as_json(touched),
    }
    return json.dumps(content).encode()


def touched_by(content: bytes) -> Touched | None:
    """What an answer, or an error that lasts, rests on; None: nobody knows, or it is no answer."""
    try:
        return heard(content).touched
    except OomphError:
        pass
    try:
        told = json.loads(content)
        _error(told)
        return from_json(Touched, told["touched"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError):
        return None


def for_later(content: bytes) -> bytes:
    """An answer as it is told another time: of an error, also how to ask anew."""
    told = json.loads(content)
    if "error" not in told:
        return content
    attempt = told["error"]["attempt"]
    told["error"]["attempt"] = f"{attempt}; {_ANEW}" if attempt else _ANEW
    return json.dumps(told).encode()


def with_output(content: bytes, lines: Sequence[str]) -> bytes:
    """An answer, and where the script failed, the last that it wrote besides."""
    told = json.loads(content)
    if "error" not in told or told["kind"] == "UsageError":
        return content
    told["error"]["printed"] = list(lines)
    return json.dumps(told).encode()


def heard(content: bytes) -> Rehearsed:
    """The answer. Raises what the rehearsal raised, and UserCodeError for what is no answer."""
    try:
        told = json.loads(content)
        error = _error(told) if "error" in told else None
        if error is None:
            return _rehearsed(told)
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as reason:
        raise UserCodeError(
            "the rehearsal's answer makes no sense",
            because=f"{type(reason).__name__}: {reason}"[:300],
            attempt="running the script by itself: something in it wrote to files it did not open",
        ) from None
    raise error


def _error(told: dict[str, Any]) -> OomphError:
    texts = {name: told["error"][name] for name in ("what", "because", "attempt")}
    if any(text is not None and not isinstance(text, str) for text in texts.values()):
        raise TypeError("an error that is no text")
    error = _KINDS[told["kind"]](texts.pop("what"), **texts)
    error.printed = tuple(str(line) for line in told["error"].get("printed", ()))
    return error


def _rehearsed(told: dict[str, Any]) -> Rehearsed:
    return Rehearsed(
        trace=from_columns(told["trace"]),
        seen=from_json(Seen, told["seen"]),
        possible=None if told["possible"] is None else from_json(Possible, told["possible"]),
        files=tuple(str(file) for file in told["files"]),
        touched=from_json(Touched, told["touched"]),
    )
