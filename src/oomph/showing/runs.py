"""RunSummary -> the table of `oomph runs`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence

from oomph.records.run import RunSummary
from oomph.showing.terminal import (
    Line,
    new_console,
    print_command,
    print_line,
    print_prose,
    printable,
)
from oomph.units import format_duration

_STYLES = {"running": "green", "failed": "red", "unknown": "yellow"}


def print_runs(runs: Sequence[RunSummary]) -> None:
    """Print one line per run."""
    console = new_console()
    if not runs:
        print_prose(console, "no run is recorded yet: oomph watch -- python train.py")
    for run in runs:
        print_line(console, _line(run))
    if runs:
        print_command(console, f"oomph report {runs[0].id}  # what happened in it, and why")


def _line(run: RunSummary) -> Line:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at))
    ending, style = _ending(run)
    return [
        (f"{printable(run.id):<22}", "bold"),
        (f"  {started}", "dim"),
        (f"  {format_duration(run.duration_s):>11}", ""),
        (f"  {ending:<16}", style),
        (f"  {printable(shlex.join(run.command))}", ""),
    ]


def how_it_went(run: RunSummary) -> str:
    """Return "running", "exit 0", "out of GPU mem." ..."""
    return _ending(run)[0]


def _ending(run: RunSummary) -> tuple[str, str]:
    if run.state != "ended":
        state = "running" if run.state == "running" else "no ending seen"
        return state, _STYLES[run.state]
    if run.out_of_memory:
        where = "GPU" if run.out_of_memory == "gpu" else "host"
        return f"out of {where} mem.", _STYLES["failed"]
    if run.signal:
        return printable(run.signal), _STYLES["failed"]
    return f"exit {run.exit_code}", _STYLES["failed"] if run.exit_code else ""
