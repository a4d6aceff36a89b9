"""Ratios over time -> a graph of several lines of text, the newest at the right. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomph.showing.terminal import Glyphs, Line, Piece, cut
from oomph.units import format_ratio

# ---- colours by load -----------------------------------------------------------------------------

# Judgement: below the first, there is room for more; above the second, it is nearly full.
_LIGHT, _HEAVY = 0.5, 0.9


def load_style(ratio: float | None) -> str:
    """
    >>> load_style(None), load_style(0.2), load_style(0.7), load_style(0.95)
    ('', 'green', 'yellow', 'red')
    """
    if ratio is None:
        return ""
    return "green" if ratio < _LIGHT else "yellow" if ratio < _HEAVY else "red"


# ---- graphs --------------------------------------------------------------------------------------

_AXIS = ("100%", "  0%")
AXIS_CELLS = len(_AXIS[0]) + 1


@dataclass(frozen=True, slots=True)
class Graph:
    """One figure over time."""

    title: str
    ratios: Sequence[float | None]
    span: str  # what the whole width stands for, in words


def graph_lines(graph: Graph, width: int, height: int, glyphs: Glyphs) -> list[Line]:
    """Return a title and `height` lines below it, each `width` cells wide."""
    room = width - AXIS_CELLS
    shown = graph.ratios[-room:] if room > 0 else ()
    newest = graph.ratios[-1] if graph.ratios else None
    value = "?" if newest is None else format_ratio(newest)
    title = cut(f"{graph.title} ", max(width - len(value), 0), "")
    span = f"  {graph.span}"
    left = max(width - len(title) - len(value), 0)
    heading: list[Piece] = [(title, "bold"), (value, load_style(newest))]
    heading.append((span.ljust(left) if len(span) <= left else " " * left, "dim"))
    return [heading, *_rows(shown, room, height, glyphs)]


def _rows(ratios: Sequence[float | None], room: int, height: int, glyphs: Glyphs) -> list[Line]:
    levels = glyphs.levels
    # In steps of a character: an unknown value is a gap, and 0 is a line at the foot.
    heights = [
        -1 if ratio is None else max(round(min(max(ratio, 0.0), 1.0) * height * len(levels)), 1)
        for ratio in ratios
    ]
    rows: list[Line] = []
    for row in range(height - 1, -1, -1):
        label = _AXIS[0] if row == height - 1 else _AXIS[1] if row == 0 else ""
        floor = row * len(levels)
        cells = [
            " " if steps <= floor else levels[min(steps - floor, len(levels)) - 1]
            for steps in heights
        ]
        style = load_style((row + 0.5) / height)
        rows.append([(f"{label:<{AXIS_CELLS}}", "dim"), ("".join(cells).rjust(room), style)])
    return rows


def beside(parts: Sequence[Sequence[Line]], gap: int) -> list[Line]:
    """Put blocks of lines of equal number and constant width next to each other."""
    joined: list[Line] = []
    for row in zip(*parts, strict=True):
        pieces: list[Piece] = []
        for line in row:
            pieces += [(" " * gap, ""), *line] if pieces else list(line)
        joined.append(pieces)
    return joined
