"""A run directory -> RunSummary."""

from __future__ import annotations

import os
import time
from pathlib import Path

from oomph.errors import Unreadable
from oomph.records.run_summary import RunState, RunSummary
from oomph.running.diary import RunStart, this_host
from oomph.running.diary_reader import read_ending, read_start

_SILENT_S = 15.0  # a diary is written each second; a busy disk may keep it waiting for some


def summarise(directory: Path, now: float | None = None) -> RunSummary | None:
    """One line on it; None where it cannot be read."""
    try:
        start = read_start(directory)
    except Unreadable:
        return None
    ending, written_at = read_ending(directory), _written_at(directory)
    seen_s = written_at - start.started_at
    return RunSummary(
        id=start.id,
        path=str(directory),
        command=start.command,
        host=start.host,
        user=start.user,
        started_at=start.started_at,
        duration_s=max(0.0, ending.at_s if ending else seen_s),
        state="ended" if ending else _state(start, written_at, now or time.time()),
        exit_code=ending.exit_code if ending else None,
        signal=ending.signal if ending else None,
        out_of_memory=ending.out_of_memory if ending else None,
    )


def _written_at(directory: Path) -> float:
    with os.scandir(directory) as entries:
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in entries), default=0.0)


def _state(start: RunStart, written_at: float, now: float) -> RunState:
    if now - written_at < _SILENT_S:
        return "running"
    is_here = start.host == this_host() and _still_lives(start)
    return "running" if is_here else "unknown"


def _still_lives(start: RunStart) -> bool:
    """Does what kept the run stand still, by Ctrl-Z? Another process may have its number by now,
    but hardly one that is an oomph, too, or the same script."""
    try:
        words = Path(f"/proc/{start.pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return False
    is_script = words.split(b"\0") == [os.fsencode(word) for word in start.command]
    return is_script or b"oomph" in words
