"""A run directory -> RunSummary, without reading all of it.

What the line needs is kept beside the run, in summary.json: when it ends, and of one that was
killed, or is older, by whoever asks first. It counts as long as nothing was added to the events.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

from oomph.errors import Unreadable
from oomph.records.run import Ending
from oomph.records.run_summary import RunState, RunSummary
from oomph.records.stored import SCHEMA, from_jsonable, to_jsonable
from oomph.running.diary import RunStart, this_host
from oomph.running.diary_reader import read_ending, read_start
from oomph.running.line_files import Complaints, whole_lines
from oomph.running.run_lines import load

SUMMARY = "summary.json"
_SILENT_S = 15.0  # a diary is written each second; a busy disk may keep it waiting for some


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What is kept of a run for its line."""

    events_bytes: int  # of events.jsonl, when it was read
    events_changed_ns: int
    start: RunStart
    ending: Ending | None


def summarise(directory: Path, now: float | None = None) -> RunSummary | None:
    """One line on it; None where it cannot be read."""
    events = _events(directory)
    kept = _read_kept(directory, events)
    is_new = kept is None
    if kept is None:
        try:
            start = read_start(directory)
        except Unreadable:
            return None
        kept = _kept(events, start, read_ending(directory))
    summary = _summary(directory, kept, now or time.time())
    if is_new and summary.state != "running":
        _write_kept(directory, kept)
    return summary


def keep_summary(directory: Path, start: RunStart, ending: Ending) -> None:
    """At the end of a run, whose files are all written."""
    _write_kept(directory, _kept(_events(directory), start, ending))


def _summary(directory: Path, kept: Kept, now: float) -> RunSummary:
    start, ending = kept.start, kept.ending
    written_at = 0.0 if ending else _written_at(directory)
    return RunSummary(
        id=start.id,
        path=str(directory),
        command=start.command,
        host=start.host,
        user=start.user,
        started_at=start.started_at,
        duration_s=max(0.0, ending.at_s if ending else written_at - start.started_at),
        state="ended" if ending else _state(start, written_at, now),
        exit_code=ending.exit_code if ending else None,
        signal=ending.signal if ending else None,
        out_of_memory=ending.out_of_memory if ending else None,
    )


def _events(directory: Path) -> tuple[int, int]:
    """Size of the file of events, and when it was changed."""
    try:
        found = os.stat(directory / "events.jsonl", follow_symlinks=False)
    except OSError:
        return 0, 0
    return found.st_size, found.st_mtime_ns


def _kept(events: tuple[int, int], start: RunStart, ending: Ending | None) -> Kept:
    return Kept(events_bytes=events[0], events_changed_ns=events[1], start=start, ending=ending)


def _read_kept(directory: Path, events: tuple[int, int]) -> Kept | None:
    """None where there is none, or it makes no sense, or the run went on since."""
    line = next(whole_lines(directory / SUMMARY, Complaints()), b"")
    if not line:
        return None
    try:
        content = load(line)
        if not isinstance(content, dict) or content.pop("schema", None) != SCHEMA:
            return None
        kept = from_jsonable(Kept, content)
    except ValueError:
        return None
    return kept if (kept.events_bytes, kept.events_changed_ns) == events else None


def _write_kept(directory: Path, kept: Kept) -> None:
    """Whole or not at all; where it cannot be written, the next one reads the run again."""
    scratch = directory / f".{SUMMARY}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with contextlib.suppress(OSError):
        try:
            with os.fdopen(os.open(scratch, flags, 0o600), "w", encoding="utf-8") as file:
                file.write(json.dumps({"schema": SCHEMA, **to_jsonable(kept)}) + "\n")
            scratch.replace(directory / SUMMARY)
        except OSError:
            scratch.unlink(missing_ok=True)
            raise


def _written_at(directory: Path) -> float:
    """When the run itself wrote last."""
    with os.scandir(directory) as entries:
        own = (entry for entry in entries if SUMMARY not in entry.name)
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in own), default=0.0)


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
