"""An emulated GPU's size and allocator settings, and the peaks of a command's processes."""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from oomph.errors import UsageError
from oomph.records.run import EmulatedRun
from oomph.store import replace_file
from oomph.units import MIB, format_bytes, parse_bytes


def size_of(memory: str | int) -> int:
    """Parse the size of an emulated GPU; refuse a size too small for one segment."""
    size_bytes = memory if isinstance(memory, int) else parse_bytes(memory)
    if size_bytes < 2 * MIB:
        raise UsageError(
            f"a GPU of {format_bytes(size_bytes)} has room for nothing",
            because="torch's smallest segment is 2 MiB",
            attempt="2GiB: a size without a unit counts as bytes",
        )
    return size_bytes


def settings_text() -> str:
    """Return the allocator's settings from the environment."""
    # Torch reads the new name first (c10/core/AllocatorConfig.cpp).
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    return next((os.environ[name] for name in names if os.environ.get(name)), "")


# ---- the memory peaks of the processes in an emulated run ----------------------------------------
# Each process writes one small file when it ends. A killed process writes none.


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The peaks of one process that had an emulated GPU."""

    allocated_bytes: int
    reserved_bytes: int
    num_out_of_memory: int


def write_peaks(directory: Path, peaks: Peaks) -> None:
    replace_file(directory / f"{os.getpid()}.json", json.dumps(asdict(peaks)))


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
