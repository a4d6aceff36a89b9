"""What ranks and torchrun wrote down when a training failed -> the rank that failed first.

A rank whose Python raised writes `error-RANK.json` into the run's directory before it goes away,
so that a peer that then loses its connection is always later. torchrun's list has the exit codes
and signals, but orders failures only to the second.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from oomph.records.launch import RankFailure
from oomph.records.stored import as_json, from_json
from oomph.store import replace_file

FAILURE = "failure.json"
_MOST_BYTES = 1 << 20
# How gloo, NCCL and torch's store say that a peer is gone.
_OF_A_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Connection refused",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
    "DistNetworkError",
    "DistStoreError",
)


@dataclass(frozen=True, slots=True)
class RankError:
    """An exception that ended a rank."""

    rank: int
    at: float  # seconds of the machine's CLOCK_MONOTONIC
    error: str
    traceback: str


def write_error(directory: Path, error: RankError) -> None:
    """Write what ended this rank. Raises OSError."""
    fields = {"rank": error.rank, "at": error.at, "error": error.error}
    text = json.dumps({**fields, "traceback": error.traceback[-_MOST_BYTES // 2 :]})
    replace_file(directory / f"error-{error.rank}.json", text, permissions=0o600)


def read_errors(directory: Path, after: float = 0.0) -> list[RankError]:
    """Return the errors that ranks wrote after a time, first one first."""
    found = []
    for path in directory.glob("error-*.json"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if path.stat().st_size <= _MOST_BYTES:
                read = json.loads(path.read_bytes())
                found.append(
                    RankError(
                        int(read["rank"]),
                        float(read["at"]),
                        str(read["error"]),
                        str(read["traceback"]),
                    )
                )
    return sorted((one for one in found if one.at >= after), key=lambda one: one.at)


def first_failure(errors: list[RankError], exit_codes: Mapping[int, int]) -> RankFailure | None:
    """Return the rank that failed first; exit_codes are torchrun's, by rank, a signal negative.

    An error that blames a peer is the cause only if no other rank is known to have failed. torchrun
    ends the other ranks by SIGTERM, then by SIGKILL, and lists them among the failures.
    """
    own = [one for one in errors if not blames_a_peer(one.error)]
    if own:
        return _failed(own[0], exit_codes)
    # Killed, or ended by sys.exit: no exception was seen.
    silent = exit_codes.keys() - {one.rank for one in errors}
    first = min(silent, key=lambda rank: (_by_torchrun(exit_codes[rank]), rank), default=None)
    if first is not None and (not errors or exit_codes[first] != -signal.SIGTERM):
        code = exit_codes[first]
        return RankFailure(rank=first, exit_code=_shell_code(code), signal=_signal(code))
    return _failed(errors[0], exit_codes) if errors else None


def _by_torchrun(code: int) -> int:
    """Return how likely torchrun itself ended a rank with that code."""
    return {-signal.SIGTERM: 2, -signal.SIGKILL: 1}.get(code, 0)


def blames_a_peer(error: str) -> bool:
    """Return whether an error says that another rank went away."""
    return any(text in error for text in _OF_A_PEER)


def _failed(error: RankError, exit_codes: Mapping[int, int]) -> RankFailure:
    code = exit_codes.get(error.rank)
    return RankFailure(
        rank=error.rank,
        exit_code=None if code is None else _shell_code(code),
        signal=None if code is None else _signal(code),
        error=error.error,
        traceback=error.traceback,
        is_consequence=blames_a_peer(error.error),
    )


def _shell_code(code: int) -> int:
    return 128 - code if code < 0 else code


def _signal(code: int) -> str | None:
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name if code < 0 else None
    return f"signal {-code}"


def write_failure(directory: Path, failure: RankFailure) -> None:
    """Write which rank failed first. Raises OSError."""
    replace_file(directory / FAILURE, as_json(failure) + "\n", permissions=0o600)


def read_failure(directory: Path) -> RankFailure | None:
    """Return which rank failed first; None if no rank did, or nobody could write it down."""
    with contextlib.suppress(OSError, ValueError):
        return from_json(RankFailure, (directory / FAILURE).read_text())
    errors = read_errors(directory)
    return first_failure(errors, {}) if errors else None


def forget_failures(directory: str | os.PathLike[str]) -> None:
    """Remove what an earlier attempt in this directory wrote."""
    for path in (*Path(directory).glob("error-*.json"), Path(directory, FAILURE)):
        path.unlink(missing_ok=True)
