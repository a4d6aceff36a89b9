"""Comparison -> what `oomph compare` prints: figures side by side, and new and gone findings."""

from __future__ import annotations

from oomph.records.report import Change, Comparison
from oomph.showing.terminal import Column, new_console, print_command, print_prose, print_table
from oomph.units import format_bytes, format_rate, format_ratio, format_time

_VERDICTS = {True: ("better", "green"), False: ("worse", "red"), None: ("", "")}


def print_comparison(found: Comparison) -> None:
    """Print both runs."""
    console = new_console()
    print_prose(console, f"before: {found.before}", "bold")
    print_prose(console, f"after: {found.after}", "bold")
    for caution in found.cautions:
        print_prose(console, f"note: {caution}", "yellow")
    changes = found.changes
    columns = [
        Column("", [change.what for change in changes], align="<"),
        Column("before", [_value(change, change.before) for change in changes]),
        Column("after", [_value(change, change.after) for change in changes]),
        Column("change", [_difference(change) for change in changes], keep=2),
        Column("", [[_VERDICTS[change.is_better]] for change in changes], keep=1, align="<"),
    ]
    print_table(console, columns)
    for one in found.gone:
        print_prose(console, f"gone: {one.sentence} [{one.confidence}]")
    for one in found.new:
        print_prose(console, f"new: {one.sentence} [{one.confidence}]", "bold")
    print_command(console, f"oomph report {found.after}  # what to change next")


def _value(change: Change, value: float | None) -> str:
    if value is None:
        return "?"
    return {
        "bytes": lambda: format_bytes(int(value)),
        "s": lambda: format_time(value),
        "ratio": lambda: format_ratio(value),
        "w": lambda: f"{value:.0f} W",
        "per-s": lambda: format_rate(value),
        "cores": lambda: f"{value:.1f}",
        "steps": lambda: f"{value:.0f}",
    }[change.unit]()


def _difference(change: Change) -> str:
    """Return the difference: in points for shares, in percent for the rest."""
    if change.before is None or change.after is None:
        return ""
    difference = change.after - change.before
    if change.unit == "ratio":
        return _signed(100 * difference, " points")
    return _signed(100 * difference / change.before, "%") if change.before else ""


def _signed(figure: float, unit: str) -> str:
    """
    >>> _signed(-0.3, "%"), _signed(4.6, " points")
    ('same', '+5 points')
    """
    return f"{figure:+.0f}{unit}" if round(figure) else "same"
