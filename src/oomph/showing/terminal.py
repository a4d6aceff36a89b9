"""What every terminal view needs: a console that fits, and text that is safe to print."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.showing.safe import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_NO_EDGE = 10_000  # in a file or a pipe nothing has to fit, unless COLUMNS says so


def new_console(*, to_stderr: bool = False) -> Console:
    """A console on standard output, or error. Colours only on a terminal, and not with NO_COLOR."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the program with 1, which means "no"

    columns = os.environ.get("COLUMNS", "")
    is_told = columns.isdecimal() and int(columns[:5]) > 0
    stream = sys.stderr if to_stderr else sys.stdout
    width = None if stream.isatty() or is_told else _NO_EDGE
    return Quiet(highlight=False, markup=False, emoji=False, width=width, stderr=to_stderr)


def draws_blocks(console: Console) -> bool:
    """Can this terminal show more than ASCII?"""
    return console.encoding.lower().replace("-", "").startswith("utf")


def text_of(pieces: Sequence[tuple[str, str]]) -> Text:
    """(text, style) pieces as one line."""
    from rich.text import Text

    line = Text(no_wrap=True)
    for content, style in pieces:
        line.append(content, style)
    return line


def print_line(console: Console, line: Text) -> None:
    """One line, cut where the terminal ends."""
    line.truncate(console.width, overflow="ellipsis")
    console.print(line, soft_wrap=True)


def print_prose(console: Console, prose: str, style: str = "", indent: int = 0) -> None:
    """Sentences, broken between words."""
    from rich.padding import Padding
    from rich.text import Text

    console.print(Padding(Text(printable(prose), style=style), (0, 0, 0, indent), expand=False))
