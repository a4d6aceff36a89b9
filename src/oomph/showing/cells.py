"""Styled pieces of text -> a line of the terminal that is never wider than it.

A terminal counts in cells: a CJK character or an emoji takes two, an accent on the letter before
it none. Limits: Unicode's own table of widths (East Asian Width), which most terminals follow.
"""

from __future__ import annotations

import functools
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Piece = tuple[str, str]  # text, style
Line = Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """What this terminal can draw with."""

    bar: dict[str, str]  # by part of the memory
    levels: str  # of a sparkline, lowest first
    more: str  # where something was cut off


UNICODE = Glyphs(
    bar={"mine": "█", "others": "▓", "rest": "▒", "free": "░"}, levels="▁▂▃▄▅▆▇█", more="…"
)
ASCII = Glyphs(
    bar={"mine": "#", "others": "%", "rest": "?", "free": "."}, levels="_.-:=+*#", more="~"
)

# ECMA-48, SGR
_SGR = {
    "bold": "1",
    "dim": "2",
    "reverse": "7",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "magenta": "35",
    "cyan": "36",
}


def num_cells(text: str) -> int:
    """
    >>> num_cells("GPU"), num_cells("訓練"), num_cells("é")
    (3, 4, 1)
    """
    return len(text) if text.isascii() else sum(map(_cells_of, text))


@functools.lru_cache(maxsize=4096)
def _cells_of(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Me", "Mn"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1


def cut(text: str, width: int, more: str = "…") -> str:
    """The text in at most `width` cells; where some of it is missing, `more` says so.

    >>> cut("python train.py", 9), cut("訓練.py", 4)
    ('python t…', '訓…')
    """
    if num_cells(text) <= width:
        return text
    kept: list[str] = []
    left = width - len(more)
    for character in text:
        left -= _cells_of(character)
        if left < 0:
            break
        kept.append(character)
    return "".join(kept) + more if width >= len(more) else ""


def fit(line: Line, width: int, more: str = "…") -> list[Piece]:
    """The line in at most `width` cells; where some of it is missing, `more` says so."""
    if sum(num_cells(text) for text, _ in line) <= width:
        return list(line)
    fitted: list[Piece] = []
    left = width - len(more)
    for text, style in line if left >= 0 else ():
        needed = num_cells(text)
        if needed > left:
            fitted.append((cut(text, left, more="") + more, style))
            break
        fitted.append((text, style))
        left -= needed
    return fitted


def ansi(line: Iterable[Piece], *, colours: bool) -> str:
    """The line as a terminal takes it, or as plain text."""
    if not colours:
        return "".join(text for text, _ in line)
    return "".join(f"\x1b[{sgr(style)}m{text}\x1b[0m" if style else text for text, style in line)


def sgr(style: str) -> str:
    """
    >>> sgr("bold green")
    '1;32'
    """
    return ";".join(_SGR[word] for word in style.split())


def wrap(prose: str, width: int) -> Iterator[str]:
    """Sentences, broken between words; a word that is too long stays whole, to be cut."""
    line = ""
    for word in prose.split():
        longer = f"{line} {word}" if line else word
        if line and num_cells(longer) > width:
            yield line
            longer = word
        line = longer
    if line:
        yield line


def sparkline(ratios: Sequence[float | None], width: int, levels: str) -> str:
    """The last of them, one a cell, the newest at the right. Unknown is a gap.

    >>> sparkline([0.0, 0.5, None, 1.0], 5, "▁▂▃▄▅▆▇█")
    ' ▁▅ █'
    """
    top = len(levels) - 1
    drawn = [
        " " if ratio is None else levels[min(max(round(ratio * top), 0), top)]
        for ratio in ratios[max(len(ratios) - width, 0) :]
    ]
    return "".join(drawn).rjust(width)
