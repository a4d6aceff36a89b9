"""What every terminal view needs: a console that fits the terminal, and text that is safe in it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_WIDTH_WITHOUT_TERMINAL = 160  # in a file or a pipe nothing has to fit


def new_console() -> Console:
    """A console on standard output. Colours only on a terminal, and not with NO_COLOR."""
    from rich.console import Console

    width = None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=True, width=width)


def draws_blocks(console: Console) -> bool:
    """Can this terminal show more than ASCII?"""
    return console.encoding.lower().replace("-", "").startswith("utf")


def printable(text: str) -> str:
    """Text of others (a command line, a name) without anything that moves the cursor.

    >>> printable("python \\x1b[2Jtrain.py")
    'python ?[2Jtrain.py'
    """
    return "".join(character if character.isprintable() else "?" for character in text)
