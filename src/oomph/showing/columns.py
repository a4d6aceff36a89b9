"""Cells -> a table that fits: a column that has no room is left out whole, never cut in two."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

_GAP = "  "


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """`keep` decides who goes first where there is no room: the lowest. None never goes."""

    heading: str
    cells: Sequence[str]
    keep: int | None = None
    align: str = ">"
    styles: Sequence[str] = field(default_factory=tuple)  # one per cell, or none at all

    @property
    def width(self) -> int:
        return max(len(self.heading), *map(len, self.cells), 0)

    @property
    def is_empty(self) -> bool:
        return not any(self.cells)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """The columns that have something to say and fit into `width` together."""
    kept = [column for column in columns if not column.is_empty]
    left = width - total_width(kept)
    while left < 0:
        droppable = [column for column in kept if column.keep is not None]
        if not droppable:
            break
        dropped = min(droppable, key=lambda column: column.keep or 0)
        kept.remove(dropped)
        left += dropped.width + len(_GAP)
    return kept


def total_width(columns: Sequence[Column]) -> int:
    return sum(column.width for column in columns) + len(_GAP) * (len(columns) - 1)


def lines(columns: Sequence[Column]) -> list[list[tuple[str, str]]]:
    """The heading and every row, each as (text, style) pieces."""
    widths = [(column, column.width) for column in columns]
    heading = [(_padded(column, column.heading, width), "bold") for column, width in widths]
    rows = [
        [(_padded(column, column.cells[i], width), _style(column, i)) for column, width in widths]
        for i in _rows(columns)
    ]
    return [_joined(pieces) for pieces in (heading, *rows)]


def _rows(columns: Sequence[Column]) -> range:
    return range(len(columns[0].cells) if columns else 0)


def _padded(column: Column, text: str, width: int) -> str:
    return f"{text:{column.align}{width}}"


def _style(column: Column, row: int) -> str:
    return column.styles[row] if column.styles else ""


def _joined(pieces: list[tuple[str, str]]) -> list[tuple[str, str]]:
    last = len(pieces) - 1
    return [
        (text.rstrip() if i == last else text + _GAP, style)
        for i, (text, style) in enumerate(pieces)
    ]
