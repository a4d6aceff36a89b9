"""A run directory that `oomph watch` is writing -> its GPUs, and what was seen of them lately.

For the script inside, which asks no driver itself: a look at the end of the newest file.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from oomph.records.run import GpuSpan
from oomph.running.run_lines import GPU_SPANS
from oomph.running.tier_reader import names_in

_TAIL_BYTES = 1 << 16  # a minute of eight GPUs


def read_last_spans(directory: Path) -> tuple[GpuSpan, ...]:
    """Of about the last minute; () where nothing is known, or readable, yet."""
    prefix, suffix = "gpu-1s-", ".jsonl"
    numbers = [
        int(number)
        for name in names_in(directory)
        if name.startswith(prefix)
        and (number := name.removeprefix(prefix).removesuffix(suffix)).isdecimal()
    ]
    if not numbers:
        return ()
    return _tail(directory / f"{prefix}{max(numbers)}{suffix}")


def _tail(path: Path) -> tuple[GpuSpan, ...]:
    try:
        with path.open("rb") as file:
            columns = GPU_SPANS.columns(file.readline())
            end = os.fstat(file.fileno()).st_size
            is_cut = end - file.tell() > _TAIL_BYTES
            if is_cut:
                file.seek(end - _TAIL_BYTES)
            lines = file.read(_TAIL_BYTES).splitlines(keepends=True)
    except (OSError, ValueError):  # it is being made, or was deleted for its age a moment ago
        return ()
    found = []
    for line in lines[is_cut:]:
        if line.endswith(b"\n"):
            with contextlib.suppress(ValueError):  # the report complains of it
                found.append(GPU_SPANS.span(columns, line))
    return tuple(found)
