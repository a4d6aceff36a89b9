"""Keys -> View: what the live view shows; and the history that it draws. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar, get_args

from oomph.records.machine import Device, Look
from oomph.showing.gpus import rows_of

# ---- history for the sparklines ------------------------------------------------------------------
# Kept at three resolutions at once (a cell of a sparkline is 1, 10 or 60 looks), each with a fixed
# number of cells, so a view that stays open for weeks stays small.

LOOKS_PER_CELL = (1, 10, 60)
_MOST_CELLS = 64
_MOST_GRAPH_CELLS = 256  # as wide as a graph gets


class Track:
    """One figure over time: the mean of the looks in each cell."""

    def __init__(self, most_cells: int = _MOST_CELLS) -> None:
        self._cells: dict[int, deque[float | None]] = {
            pace: deque(maxlen=most_cells) for pace in LOOKS_PER_CELL
        }
        self._open: dict[int, list[float]] = {pace: [] for pace in LOOKS_PER_CELL}
        self._num_looks = 0

    def add(self, ratio: float | None) -> None:
        """Add a value; None: unknown."""
        for pace, cells in self._cells.items():
            known = self._open[pace]
            if self._num_looks % pace == 0:
                known.clear()
                cells.append(None)
            if ratio is not None:
                known.append(ratio)
                cells[-1] = sum(known) / len(known)
        self._num_looks += 1

    def cells(self, pace: int) -> Sequence[float | None]:
        return tuple(self._cells[pace])


class Histories:
    """The tracks of all GPUs and slices, by UUID, and of the machine as a whole."""

    def __init__(self) -> None:
        self.busy: dict[str, Track] = {}
        self.full: dict[str, Track] = {}
        self.all_busy, self.all_full = Track(_MOST_GRAPH_CELLS), Track(_MOST_GRAPH_CELLS)
        self.cpu = Track(_MOST_GRAPH_CELLS)

    def add(self, look: Look) -> None:
        """Add one look."""
        machine = look.machine
        devices = {row.device.uuid: row.device for row in rows_of(machine) if row.device.uuid}
        for uuid in devices:
            self.busy.setdefault(uuid, Track())
            self.full.setdefault(uuid, Track())
        for uuid, busy in self.busy.items():
            device = devices.get(uuid)  # None: it is lost
            busy.add(device.busy_ratio if device else None)
            self.full[uuid].add(_full_ratio(device))
        self.all_busy.add(_mean([device.busy_ratio for device in machine.gpus]))
        self.all_full.add(_all_full_ratio(machine.gpus))
        self.cpu.add(look.host.cpu_ratio if look.host else None)


def _mean(ratios: Sequence[float | None]) -> float | None:
    """Return the mean of what is known."""
    known = [ratio for ratio in ratios if ratio is not None]
    return sum(known) / len(known) if known else None


def _all_full_ratio(gpus: Sequence[Device]) -> float | None:
    """Return the share of all their memory that is used, of the GPUs for which it is known."""
    known = [gpu for gpu in gpus if gpu.used_bytes is not None and gpu.total_bytes]
    total_bytes = sum(gpu.total_bytes or 0 for gpu in known)
    return sum(gpu.used_bytes or 0 for gpu in known) / total_bytes if known else None


def _full_ratio(device: Device | None) -> float | None:
    if device is None or device.used_bytes is None or not device.total_bytes:
        return None
    return device.used_bytes / device.total_bytes


Filter = Literal["all", "mine", "visible"]
Sort = Literal["GPU", "memory", "user", "newest"]
T = TypeVar("T")

KEYS = (
    ("q", "quit (as Ctrl-C does)"),
    ("f", "filter: all, mine, visible (what CUDA_VISIBLE_DEVICES shows)"),
    ("s", "sort the processes: by GPU, memory, user, newest first"),
    ("v", "processes as a list, or as a tree below what started them"),
    ("t", "time that sparklines and graphs span"),
    ("space", "pause, and go on"),
    ("up, down", "scroll; also j and k, page up and down, home and end"),
    ("?", "this help, and back"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """The user's view settings."""

    filter: Filter = "all"
    sort: Sort = "GPU"
    looks_per_cell: int = LOOKS_PER_CELL[0]
    is_paused: bool = False
    is_help: bool = False
    is_tree: bool = False
    scroll: int = 0  # hidden lines above the first visible one; drawing limits it to what exists


_TO_THE_END = 1 << 30


def pressed(view: View, key: str, page: int) -> View | None:
    """Return the view after a key; None to quit. `page` is the number of visible lines."""
    if key == "q":
        return None
    if key in _STEPS:
        lines, pages = _STEPS[key]
        return replace(view, scroll=max(view.scroll + lines + pages * page, 0))
    if key in ("?", "h", "escape"):
        return replace(view, is_help=not view.is_help and key != "escape", scroll=0)
    if key in ("f", "s", "t"):
        return _next_choice(replace(view, is_help=False), key)
    if key == "v":
        return replace(view, is_tree=not view.is_tree, is_help=False, scroll=0)
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

# Match an escape sequence (CSI or SS3) as a whole, so that its letters are not taken for keys.
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
    """Return the keys in what a terminal sent; an unknown sequence is one key.

    >>> keys_in(b"f\\x1b[B\\x1b[6~q")
    ['f', 'down', 'page down', 'q']
    """
    found = _KEY.findall(raw.decode("latin-1"))
    return [_SEQUENCES.get(key, key) for key in found]
