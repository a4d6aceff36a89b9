"""Measurements -> a Markdown table that can be read on the terminal too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Measured:
    what: str
    cpu_ms: float


def _figure(cpu_ms: float) -> str:
    return f"{cpu_ms:.0f}" if cpu_ms >= 100 else f"{cpu_ms:.3g}"


def as_table(title: str, floor: str, rows: Sequence[Measured]) -> str:
    """Each row with its ratio to the row named `floor`."""
    floor_ms = next(row.cpu_ms for row in rows if row.what == floor)
    width = max(len(row.what) for row in rows)
    lines = [
        f"| {title:<{width}} | CPU ms | x floor |",
        f"|{'-' * (width + 2)}|-------:|--------:|",
    ]
    lines += [
        f"| {row.what:<{width}} | {_figure(row.cpu_ms):>6} | {row.cpu_ms / floor_ms:7.2f} |"
        for row in rows
    ]
    return "\n".join(lines)
