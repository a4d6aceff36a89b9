"""The verb explain: a message, a log, a memory snapshot or a run -> why memory ran out."""

from __future__ import annotations

import os
from itertools import chain
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from oomph.records.explanation import Explanation
    from oomph.records.run import Run

_PIECE_BYTES = 1 << 20
_START_BYTES = 1 << 12  # that tell a snapshot from a log


def explain(
    what: str | os.PathLike[str] | BaseException | BinaryIO = "last",
    later: str | os.PathLike[str] | None = None,
    *,
    alloc_conf: str = "",
    gpu_memory: str | int | None = None,
) -> Explanation | None:
    """Return why memory ran out, and what would have avoided it; None: it did not run out.

    oomph.explain(error)                    # the exception
    oomph.explain("train.log")              # a log of any size
    oomph.explain("oom.pickle")             # a memory snapshot of torch
    oomph.explain("a.pickle", "b.pickle")   # two of them: what grew
    oomph.explain("last")                   # the last run of `oomph watch`, or its id

    `alloc_conf` is the value of PYTORCH_CUDA_ALLOC_CONF in the run, so that nothing is advised that
    was on already. `gpu_memory` is the GPU's, which a snapshot does not have. Raises OomphError.
    """
    if later is not None:
        return _of_two(what, os.fspath(later))
    if isinstance(what, BaseException):
        return _of_text([str(what).encode()], type(what).__name__, alloc_conf)
    if not isinstance(what, str | os.PathLike):
        return _of_text(_pieces(what), "standard input", alloc_conf)
    name = os.fspath(what)
    if os.path.isdir(name) or not os.path.exists(name):  # noqa: PTH110, PTH112 - as it was given
        return _of_run(name, alloc_conf, gpu_memory)
    return _of_file(name, alloc_conf, gpu_memory)


def _of_file(name: str, alloc_conf: str, gpu_memory: str | int | None) -> Explanation | None:
    from oomph.errors import Unreadable
    from oomph.snapshots.loading import is_snapshot

    try:
        with open(name, "rb") as file:  # noqa: PTH123 - a FIFO is read as well
            start = file.read(_START_BYTES)
            if not is_snapshot(start):
                return _of_text(chain([start], _pieces(file)), name, alloc_conf)
    except OSError as error:
        raise Unreadable(f"{name} cannot be read", because=error.strerror) from None
    return _of_snapshot(name, gpu_memory)


def _of_snapshot(name: str, gpu_memory: str | int | None) -> Explanation:
    from pathlib import Path

    from oomph.explaining.snapshot import explain_snapshot
    from oomph.records.recording_facts import RecordingFacts, facts_path
    from oomph.records.stored import from_json_file
    from oomph.snapshots.loading import load
    from oomph.units import parse_bytes

    gpu_bytes = parse_bytes(gpu_memory) if isinstance(gpu_memory, str) else gpu_memory
    beside, facts = facts_path(Path(name)), None
    if beside.exists():
        facts = from_json_file(RecordingFacts, beside, what="file of oomph.record")
    return explain_snapshot(load(name), source=name, gpu_bytes=gpu_bytes, facts=facts)


def _of_two(earlier: object, later: str) -> Explanation:
    from oomph.errors import UsageError
    from oomph.explaining.snapshot import compare_snapshots
    from oomph.snapshots.loading import load

    if not isinstance(earlier, str | os.PathLike):
        raise UsageError("two snapshots are compared by their paths", attempt='"a.pickle"')
    name = os.fspath(earlier)
    return compare_snapshots(load(name), load(later), source=f"{name}, {later}")


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE_BYTES):
        yield piece


def _of_text(pieces: Iterable[bytes], name: str, alloc_conf: str) -> Explanation | None:
    from oomph.explaining.log import read_log
    from oomph.explaining.message import explain_log

    return explain_log(read_log(pieces), source=name, settings=alloc_conf)


def _of_run(name: str, alloc_conf: str, gpu_memory: str | int | None) -> Explanation | None:
    from dataclasses import replace

    from oomph.errors import UsageError
    from oomph.explaining.ended import explain_run
    from oomph.verbs.watch import load_run, memory_snapshots

    try:
        run: Run = load_run(name)
    except UsageError as error:
        if name == "last":
            raise
        raise UsageError(
            f"{name!r:.200} is neither a file nor a run",
            because=error.what,
            attempt="oomph explain oom.log, or python train.py 2>&1 | oomph explain -",
        ) from None
    explained = explain_run(run, settings=alloc_conf)
    recorded = memory_snapshots(name)
    if not recorded:
        return explained
    found = _of_snapshot(str(recorded[0]), gpu_memory)
    message = explained.message if explained else None
    return replace(found, source=f"run {run.id}", message=message)
