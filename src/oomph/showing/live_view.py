"""Keys -> View: what the person at the keyboard wants to see. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from oomph.showing.live_history import LOOKS_PER_CELL

Filter = Literal["all", "mine", "visible"]
Sort = Literal["GPU", "memory", "user", "newest"]
T = TypeVar("T")

KEYS = (
    ("q", "quit (as Ctrl-C does)"),
    ("f", "filter: all, mine, visible (what CUDA_VISIBLE_DEVICES shows)"),
    ("s", "sort the processes: by GPU, memory, user, newest first"),
    ("t", "time that a sparkline spans"),
    ("space", "pause, and go on"),
    ("up, down", "scroll; also j and k, page up and down, home and end"),
    ("?", "this help, and back"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How it is looked at."""

    filter: Filter = "all"
    sort: Sort = "GPU"
    looks_per_cell: int = LOOKS_PER_CELL[0]
    is_paused: bool = False
    is_help: bool = False
    scroll: int = 0  # lines above the first that is shown; drawing keeps it within what there is


_TO_THE_END = 1 << 30


def pressed(view: View, key: str, page: int) -> View | None:
    """The view after a key; None to quit. `page` is how many lines are shown at once."""
    if key == "q":
        return None
    if key in _STEPS:
        lines, pages = _STEPS[key]
        return replace(view, scroll=max(view.scroll + lines + pages * page, 0))
    if key in ("?", "h", "escape"):
        return replace(view, is_help=not view.is_help and key != "escape", scroll=0)
    if key in ("f", "s", "t"):
        return _next_choice(replace(view, is_help=False), key)
    if key in (" ", "p"):
        return replace(view, is_paused=not view.is_paused)
    return view


_STEPS = {
    "up": (-1, 0),
    "k": (-1, 0),
    "down": (1, 0),
    "j": (1, 0),
    "page up": (0, -1),
    "page down": (0, 1),
    "home": (-_TO_THE_END, 0),
    "end": (_TO_THE_END, 0),
}


def _next_choice(view: View, key: str) -> View:
    if key == "f":
        return replace(view, filter=_after(get_args(Filter), view.filter), scroll=0)
    if key == "s":
        return replace(view, sort=_after(get_args(Sort), view.sort), scroll=0)
    return replace(view, looks_per_cell=_after(LOOKS_PER_CELL, view.looks_per_cell))


def _after(choices: Sequence[T], choice: T) -> T:
    return choices[(choices.index(choice) + 1) % len(choices)]


# ---- what a terminal sends ---------------------------------------------------------------------

# An escape sequence whole (CSI or SS3), so that the letters in it are not taken for keys.
_KEY = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|O.|)|.", re.DOTALL)

_SEQUENCES = {
    "\x1b": "escape",
    **{f"\x1b{i}A": "up" for i in "[O"},
    **{f"\x1b{i}B": "down" for i in "[O"},
    **{f"\x1b{i}H": "home" for i in "[O"},
    **{f"\x1b{i}F": "end" for i in "[O"},
    "\x1b[1~": "home",
    "\x1b[7~": "home",
    "\x1b[4~": "end",
    "\x1b[8~": "end",
    "\x1b[5~": "page up",
    "\x1b[6~": "page down",
}


def keys_in(raw: bytes) -> list[str]:
    """The keys behind what a terminal sent; of an unknown sequence, all of it as one key.

    >>> keys_in(b"f\\x1b[B\\x1b[6~q")
    ['f', 'down', 'page down', 'q']
    """
    found = _KEY.findall(raw.decode("latin-1"))
    return [_SEQUENCES.get(key, key) for key in found]
