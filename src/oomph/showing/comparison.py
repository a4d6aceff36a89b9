"""Comparison -> what `oomph compare` prints: figure beside figure, and what came and went."""

from __future__ import annotations

from oomph.records.report import Change, Comparison
from oomph.showing.columns import Column, fitting, lines
from oomph.showing.terminal import new_console, print_line, print_prose, text_of
from oomph.units import format_bytes, format_duration, format_rate, format_ratio

_WORDS = {True: "better", False: "worse", None: ""}
_STYLES = {True: "green", False: "red", None: ""}


def print_comparison(found: Comparison) -> None:
    """Both runs on the terminal."""
    console = new_console()
    print_prose(console, f"before: {found.before}", "bold")
    print_prose(console, f"after: {found.after}", "bold")
    for caution in found.cautions:
        print_prose(console, f"mind: {caution}", "yellow")
    changes = found.changes
    table = [
        Column(heading="", cells=[change.what for change in changes], align="<"),
        Column(heading="before", cells=[_value(c, c.before) for c in changes]),
        Column(heading="after", cells=[_value(c, c.after) for c in changes]),
        Column(heading="change", cells=[_difference(change) for change in changes], keep=2),
        Column(
            heading="",
            cells=[_WORDS[change.is_better] for change in changes],
            styles=[_STYLES[change.is_better] for change in changes],
            align="<",
            keep=1,
        ),
    ]
    for pieces in lines(fitting(table, console.width)):
        print_line(console, text_of(pieces))
    for one in found.gone:
        print_prose(console, f"gone: {one.sentence} [{one.confidence}]")
    for one in found.new:
        print_prose(console, f"new: {one.sentence} [{one.confidence}]", "bold")


def _value(change: Change, value: float | None) -> str:
    if value is None:
        return "?"
    return {
        "bytes": lambda: format_bytes(int(value)),
        "s": lambda: format_duration(value) if value >= 60 else f"{value:.3g} s",
        "ratio": lambda: format_ratio(value),
        "w": lambda: f"{value:.0f} W",
        "per-s": lambda: format_rate(value),
        "cores": lambda: f"{value:.1f}",
        "steps": lambda: f"{value:.0f}",
    }[change.unit]()


def _difference(change: Change) -> str:
    """Of shares in points, of the rest in percent."""
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
