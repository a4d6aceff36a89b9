"""Shared by all terminal views: a console, safe text, lines and tables that fit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console


# ---- text from others, made safe to print --------------------------------------------------------


def printable(text: str) -> str:
    """Return the text on one line, without control characters.

    >>> printable("python \\x1b[2Jtrain.py")
    'python ?[2Jtrain.py'
    """
    if text.isprintable():  # the usual case
        return text
    return "".join(character if character.isprintable() else "?" for character in text)


_NO_EDGE = 10_000  # columns: a file or a pipe has no width limit


def given_width(file: TextIO) -> int | None:
    """Return the width that COLUMNS or a file or pipe gives; None: ask the terminal."""
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns[:5]) > 0:
        return int(columns[:5])
    return None if file.isatty() else _NO_EDGE


def new_console(stream: TextIO | None = None) -> Console:
    """Return a console on standard output, or on another stream.

    Colours only on a terminal, and not with NO_COLOR.
    """
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would exit with 1, which means "no"

    file = stream or sys.stdout
    is_own = file not in (sys.stdout, sys.stderr)  # FORCE_COLOR is not meant for it
    return Quiet(
        file=file,
        force_terminal=False if is_own else None,
        force_jupyter=False,  # a notebook takes what is printed, and draws what a cell returns
        width=given_width(file),
        highlight=False,
        markup=False,
        emoji=False,
    )


def as_html(draw: Callable[[Console], None]) -> str:
    """Return what `draw` prints as an element of a web page, with its colours."""
    import io

    from rich.console import Console

    console = Console(
        file=io.StringIO(),
        width=_NO_EDGE,
        record=True,
        force_jupyter=False,
        highlight=False,
        markup=False,
        emoji=False,
    )
    draw(console)
    style = "white-space: pre-wrap; font-family: monospace; line-height: 1.3"
    return console.export_html(
        inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>'
    )


def print_line(console: Console, line: Line) -> None:
    """Print one line, cut at the terminal's width."""
    from rich.text import Text

    text = Text.assemble(*line, no_wrap=True)
    text.truncate(console.width, overflow="ellipsis")
    console.print(text, soft_wrap=True)


def print_table(console: Console, columns: Sequence[Column]) -> None:
    """Print the columns that fit."""
    for line in lines(fitting(columns, console.width)):
        print_line(console, line)


def print_prose(console: Console, prose: str, style: str = "", indent: int = 0) -> None:
    """Print sentences, wrapped between words."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(printable(prose), style=style), (0, 0, 0, indent), expand=False))


def print_command(console: Console, command: str) -> None:
    """Print what to type next, in one line of any length: it is there to be copied."""
    from rich.text import Text

    console.print(Text(printable(f"next: {command}"), style="bold"), soft_wrap=True)


def print_written(
    paths: Iterable[str | os.PathLike[str] | None], *, to_stderr: bool = False
) -> None:
    """Name the files that were written, and which may be opened now."""
    console = new_console(sys.stderr if to_stderr else None)
    for path in paths:
        if path is not None:
            print_prose(console, f"wrote {os.fspath(path)}")


# ---- styled text that fits the terminal ----------------------------------------------------------
# A terminal counts cells: a CJK character or an emoji takes two, a combining accent none.

Piece = tuple[str, str]  # text, style
Line = Sequence[Piece]


@dataclass(frozen=True, slots=True)
class Glyphs:
    """The characters this terminal can draw with."""

    bar: dict[str, str]  # by part of the memory
    parts: str  # for a bar of many parts; distinguishable without colours
    levels: str  # for a sparkline, lowest first
    more: str  # marks text that was cut off


UNICODE = Glyphs(
    bar={"mine": "█", "others": "▓", "rest": "▒", "free": "░"},
    parts="█▓▒▞▚▤▥▦▧",
    levels="▁▂▃▄▅▆▇█",
    more="…",
)
ASCII = Glyphs(
    bar={"mine": "#", "others": "%", "rest": "?", "free": "."},
    parts="#%@*+=oxc",
    levels="_.-:=+*#",
    more="~",
)


def glyphs_for(encoding: str) -> Glyphs:
    """Return the characters that an encoding can show."""
    return UNICODE if encoding.lower().replace("-", "").startswith("utf") else ASCII


def num_cells(text: str) -> int:
    """
    >>> num_cells("GPU"), num_cells("訓練"), num_cells("é")
    (3, 4, 1)
    """
    if text.isascii():  # the usual case
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def width_of(line: Line) -> int:
    return sum(num_cells(text) for text, _ in line)


def cut(text: str, width: int, more: str = "…") -> str:
    """Cut the text to at most `width` cells; `more` marks that something is missing.

    >>> cut("python train.py", 9), cut("訓練.py", 4)
    ('python t…', '訓 …')
    """
    if num_cells(text) <= width:
        return text
    from rich.cells import set_cell_size

    return set_cell_size(text, width - len(more)) + more if width >= len(more) else ""


def fit(line: Line, width: int, more: str = "…") -> list[Piece]:
    """Cut the line to at most `width` cells; `more` marks that something is missing."""
    if width_of(line) <= width:
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
    """Return the line with escape sequences for a terminal, or as plain text."""
    if not colours:
        return "".join(text for text, _ in line)
    return "".join(f"\x1b[{_sgr(style)}m{text}\x1b[0m" if style else text for text, style in line)


# ECMA-48, SGR. Not rich's styles: they take some megabytes for as long as a live view is open.
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


def _sgr(style: str) -> str:
    return ";".join(_SGR[word] for word in style.split())


def wrap(prose: str, width: int) -> Iterator[str]:
    """Wrap sentences between words; a word that is too long stays whole, to be cut later."""
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
    """Draw the latest ratios, one per cell, the newest at the right. Unknown is a gap.

    >>> sparkline([0.0, 0.5, None, 1.0], 5, "▁▂▃▄▅▆▇█")
    ' ▁▅ █'
    """
    top = len(levels) - 1
    drawn = [
        " " if ratio is None else levels[min(max(round(ratio * top), 0), top)]
        for ratio in ratios[max(len(ratios) - width, 0) :]
    ]
    return "".join(drawn).rjust(width)


# ---- tables that fit: a column without room is dropped, never cut in two -------------------------

GAP = "  "


@dataclass(frozen=True)
class Column:
    """A column. Without room, the column with the lowest `keep` is dropped first; None stays."""

    heading: str
    cells: Sequence[str | Line]
    keep: int | None = None
    align: str = ">"

    @property
    def width(self) -> int:
        return max(num_cells(self.heading), self._content_width)

    @property
    def is_empty(self) -> bool:
        return self._content_width == 0

    @cached_property
    def _content_width(self) -> int:
        return max((width_of(_pieces(cell)) for cell in self.cells), default=0)


def fitting(columns: Sequence[Column], width: int) -> list[Column]:
    """Return the columns that are not empty and fit into `width` together."""
    kept = [column for column in columns if not column.is_empty]
    left = width - sum(column.width for column in kept) - len(GAP) * (len(kept) - 1)
    while left < 0:
        droppable = [column for column in kept if column.keep is not None]
        if not droppable:
            break
        dropped = min(droppable, key=lambda column: column.keep or 0)
        kept.remove(dropped)
        left += dropped.width + len(GAP)
    return kept


def with_wrapped(columns: Sequence[Column], heading: str, width: int) -> list[Column]:
    """Return the columns with the long texts of one of them on several lines.

    >>> wide = Column("names", ["a, bb, cc", "d"], align="<")
    >>> [one.cells for one in with_wrapped([wide, Column("n", ["1", "2"])], "names", 5)]
    [['a,', 'bb,', 'cc', 'd'], ['1', '', '', '2']]
    """
    import textwrap

    wrapped = next(column for column in columns if column.heading == heading)
    texts = [textwrap.wrap(str(text), width) or [""] for text in wrapped.cells]

    def spread(column: Column) -> Column:
        pairs = zip(column.cells, texts, strict=True)
        cells = [part for cell, parts in pairs for part in (cell, *[""] * (len(parts) - 1))]
        return replace(column, cells=cells)

    return [
        replace(column, cells=[part for parts in texts for part in parts])
        if column is wrapped
        else spread(column)
        for column in columns
        if not column.is_empty
    ]


def lines(columns: Sequence[Column]) -> list[Line]:
    """Return the heading and every row."""
    widths = [column.width for column in columns]
    headings = tuple([(column.heading, "bold")] for column in columns)
    rows = zip(*(map(_pieces, column.cells) for column in columns), strict=True)
    return [_row(columns, widths, cells) for cells in (headings, *rows)]


def _row(columns: Sequence[Column], widths: Sequence[int], cells: Iterable[Line]) -> list[Piece]:
    row: list[Piece] = []
    for column, width, cell in zip(columns, widths, cells, strict=True):
        room = (" " * (width - width_of(cell)), "")
        row += [*cell, room] if column.align == "<" else [room, *cell]
        row.append((GAP, ""))
    while row and not row[-1][0].strip():
        row.pop()
    return [piece for piece in row if piece[0]]


def _pieces(cell: str | Line) -> Line:
    return [(cell, "")] if isinstance(cell, str) else cell
