"""What the processes of an emulated run say of their memory, and what follows for the run.

Each process writes one small file when it ends. One that is killed writes none.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from oomph.records.emulated_run import EmulatedRun


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """Of one process that had an emulated GPU."""

    allocated_bytes: int
    reserved_bytes: int
    num_out_of_memory: int


def write_peaks(directory: Path, peaks: Peaks) -> None:
    """Whole or not at all: whoever reads must not find half a file."""
    path = directory / f"{os.getpid()}.json"
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(asdict(peaks)))
    unfinished.replace(path)


def read_run(directory: Path, *, exit_code: int, total_bytes: int) -> EmulatedRun:
    found = [Peaks(**json.loads(path.read_text())) for path in sorted(directory.glob("*.json"))]
    most = max(found, key=lambda peaks: peaks.reserved_bytes, default=None)
    return EmulatedRun(
        exit_code=exit_code,
        total_bytes=total_bytes,
        num_processes=len(found),
        peak_allocated_bytes=None if most is None else most.allocated_bytes,
        peak_reserved_bytes=None if most is None else most.reserved_bytes,
        num_out_of_memory=sum(peaks.num_out_of_memory for peaks in found),
    )
