"""A moment of a script -> the line of the user's that is running."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from types import FrameType

OURS = str(Path(__file__).parents[2])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {OURS}
)


_own: set[str] = set()  # where the script itself is, though it be among libraries


def know_own(place: str) -> None:
    """A file or a directory that is the user's wherever it lies: what they asked for by name."""
    _own.add(place)


def is_users(file: str) -> bool:
    """Is a file neither of a library nor of oomph?"""
    return any(map(file.startswith, _own)) or not (
        file.startswith((*_LIBRARIES, "<")) or "site-packages" in file or "dist-packages" in file
    )


def users_line(frame: FrameType | None = None) -> tuple[str, int] | None:
    """The innermost line of the user's, from a frame outwards; None if there is none."""
    frame = frame or sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


def in_words(place: tuple[str, int] | None) -> str:
    return f"{place[0]}:{place[1]}" if place else "a line that is not the script's own"
