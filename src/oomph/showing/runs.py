"""RunSummary -> the table of `oomph runs`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.records.run_summary import RunSummary
from oomph.showing.safe import printable
from oomph.showing.terminal import new_console, print_line, print_prose, text_of
from oomph.units import format_duration

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {"running": "green", "failed": "red", "unknown": "yellow"}


def print_runs(runs: Sequence[RunSummary]) -> None:
    """One line a run."""
    console = new_console()
    if not runs:
        print_prose(console, "no run is kept yet: oomph watch -- python train.py")
    for run in runs:
        print_line(console, _line(run))


def _line(run: RunSummary) -> Text:
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.started_at))
    how, style = _how(run)
    return text_of(
        [
            (f"{printable(run.id):<22}", "bold"),
            (f"  {started}", "dim"),
            (f"  {format_duration(run.duration_s):>11}", ""),
            (f"  {how:<16}", style),
            (f"  {printable(shlex.join(run.command))}", ""),
        ]
    )


def how_it_went(run: RunSummary) -> str:
    """ "running", "exit 0", "out of GPU mem." ..."""
    return _how(run)[0]


def _how(run: RunSummary) -> tuple[str, str]:
    if run.state != "ended":
        told = "running" if run.state == "running" else "no ending seen"
        return told, _STYLES[run.state]
    if run.out_of_memory:
        where = "GPU" if run.out_of_memory == "gpu" else "host"
        return f"out of {where} mem.", _STYLES["failed"]
    if run.signal:
        return printable(run.signal), _STYLES["failed"]
    return f"exit {run.exit_code}", _STYLES["failed"] if run.exit_code else ""
