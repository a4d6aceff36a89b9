"""Text of others (a command line, a name, a driver's words) -> text that cannot move the cursor."""

from __future__ import annotations


def printable(text: str) -> str:
    """The same text in one line, without control characters.

    >>> printable("python \\x1b[2Jtrain.py")
    'python ?[2Jtrain.py'
    """
    if text.isprintable():  # as nearly always
        return text
    return "".join(character if character.isprintable() else "?" for character in text)
