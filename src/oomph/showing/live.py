"""Look, histories, View -> the lines of one frame of the live view. Pure.

From top to bottom: what there is and when, what is wrong, the GPUs, the processes, the keys. The
middle scrolls. No line is wider than the terminal, and there are never more than fit.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from oomph.records.live import Look
from oomph.records.machine import Device
from oomph.showing.cells import Glyphs, Line, Piece, fit, wrap
from oomph.showing.gpu_row import Row, rows_of
from oomph.showing.live_groups import group_lines, groups_of, members_of
from oomph.showing.live_history import Histories
from oomph.showing.live_table import Table, table_lines
from oomph.showing.live_view import KEYS, View
from oomph.showing.safe import printable

_MINE = ("this-run", "mine")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All that one frame is drawn from."""

    look: Look | None  # None: the driver has not answered yet
    histories: Histories
    view: View
    interval_s: float
    glyphs: Glyphs
    silent_s: float = 0.0  # how long the first answer has been waited for, if that is long
    hears_keys: bool = True


@dataclass(frozen=True, slots=True)
class Drawn:
    lines: Sequence[Line]
    scroll: int  # as far as it could be done
    page: int  # how many lines of the middle are shown


def draw(frame: Frame, width: int, height: int) -> Drawn:
    """The frame for a terminal of that size."""
    top, middle, bottom = _top(frame, width), _middle(frame, width), [_keys(frame, width)]
    if height < 6:  # every line counts
        top, bottom = top[:1] if height > 2 else [], []
    page = max(height - len(top) - len(bottom), 0)
    scroll = max(min(frame.view.scroll, len(middle) - page), 0)
    shown = middle[scroll : scroll + page]
    if bottom:
        shown += [[]] * (page - len(shown))
        bottom = [_with_place(bottom[0], scroll, page, len(middle))]
    lines = [fit(line, width, frame.glyphs.more) for line in (*top, *shown, *bottom)]
    return Drawn(lines[:height], scroll, page)


def draw_once(frame: Frame, width: int) -> list[Line]:
    """One look, as long as it is: for --once, and for what is no terminal."""
    lines = [*_top(frame, width), *_middle(frame, width)]
    return [fit(line, width, frame.glyphs.more) for line in lines]


# ---- above -------------------------------------------------------------------------------------


def _top(frame: Frame, width: int) -> list[Line]:
    look = frame.look
    if look is None:
        waited = f" for {frame.silent_s:.0f} s, without an answer" if frame.silent_s else ""
        return [[(f"asking the driver{waited}", "bold")]]
    told: list[Piece] = [("paused", "reverse"), ("  ", "")] if frame.view.is_paused else []
    if look.machine.gpus:  # else "0 GPUs" would claim to know
        told += [(_counted(look), "bold"), ("  ", "")]
    told.append((time.strftime("%H:%M:%S", time.localtime(look.at)), ""))
    told.append((_driver(look), "dim"))
    return [told, *_prose(look.machine.problem or "", width, "bold red")]


def _counted(look: Look) -> str:
    """How many there are, and whose."""
    machine = look.machine
    devices = [row.device for row in rows_of(machine) if not row.device.slices]
    counts = {
        "mine": sum(_is_mine(device) for device in devices),
        "others'": sum(_is_others(device) for device in devices),
        "free": sum(device.is_free is True for device in devices),
        "unknown": sum(_is_unknown(device) for device in devices),
    }
    gpus = f"{len(machine.gpus)} GPU{'s' * (len(machine.gpus) != 1)}"
    if any(gpu.slices for gpu in machine.gpus):
        gpus += f", {sum(device.is_slice for device in devices)} slices"
    whose = ", ".join(f"{count} {whose}" for whose, count in counts.items() if count)
    return f"{gpus}: {whose}" if whose else gpus


def _driver(look: Look) -> str:
    version = look.machine.driver_version
    if look.machine.emulated:
        return "  emulated: neither the GPUs nor the processes exist"
    return f"  driver {printable(version)}" if version else ""


def _is_mine(device: Device) -> bool:
    return any(process.owner in _MINE for process in device.processes or ())


def _is_others(device: Device) -> bool:
    return any(process.owner == "others" for process in device.processes or ())


def _is_unknown(device: Device) -> bool:
    is_placed = _is_mine(device) or _is_others(device)
    return not is_placed and device.is_free is not True


# ---- in the middle -----------------------------------------------------------------------------


def _middle(frame: Frame, width: int) -> list[Line]:
    if frame.view.is_help:
        return _help(frame)
    look = frame.look
    if look is None:
        return []
    rows = _rows(look, frame.view)
    lines = table_lines(_table(frame, look, rows), width) if rows else []
    if not rows and look.machine.gpus:
        lines += _prose(_NOTHING[frame.view.filter], width, "dim")
    for row in rows:
        if row.device.problem:
            lines += _prose(f"GPU {row.label}: {row.device.problem}", width, "red")
    for note in look.notes:
        lines += _prose(note, width, "dim")
    members = members_of(rows, look.jobs, only_mine=frame.view.filter == "mine")
    grouped = group_lines(groups_of(members, frame.view.sort), look.at, width)
    return [*lines, [], *grouped] if grouped else lines


_NOTHING = {
    "all": "",
    "mine": "no process of yours is on a GPU; f shows all of them",
    "visible": "CUDA_VISIBLE_DEVICES shows none of these GPUs; f shows all of them",
}


def _rows(look: Look, view: View) -> list[Row]:
    """The GPUs and slices that are wanted."""
    rows = list(rows_of(look.machine))
    if view.filter == "mine":
        return [row for row in rows if _is_mine(row.device)]
    if view.filter == "visible" and look.visible is not None:
        places = {uuid: i for i, uuid in enumerate(look.visible)}
        shown = [row for row in rows if row.device.uuid in places]
        return sorted(shown, key=lambda row: places[row.device.uuid or ""])
    return rows


def _table(frame: Frame, look: Look, rows: Sequence[Row]) -> Table:
    return Table(
        rows=rows,
        histories=frame.histories,
        looks_per_cell=frame.view.looks_per_cell,
        interval_s=frame.interval_s,
        cuda_indices={uuid: i for i, uuid in enumerate(look.visible or ())},
        sm_active_ratios=look.sm_active_ratios,
        glyphs=frame.glyphs,
    )


def _prose(text: str, width: int, style: str) -> list[Line]:
    return [[(line, style)] for line in wrap(printable(text), width)]


def _help(frame: Frame) -> list[Line]:
    lines: list[Line] = [[("keys", "bold")], *map(_explained, KEYS)]
    bar = frame.glyphs.bar
    parts = {"mine": "mine", "others": "others'", "rest": "taken, no owner known", "free": "free"}
    memory = "  ".join(f"{bar[part]} {whose}" for part, whose in parts.items())
    return [*lines, [], [("figures", "bold")], *map(_explained, (("memory", memory), *_LEGEND))]


def _explained(entry: tuple[str, str]) -> Line:
    word, meaning = entry
    return [(f"  {word:<13}  ", "cyan"), (meaning, "")]


_LEGEND = (
    ("kernel-active", "share of the time with at least one kernel running, however small"),
    ("SM active", "how many of its multiprocessors worked, over the time: Hopper and later"),
    ("mine", "of this user"),
    ("others", "of other users"),
    ("unknown", "nobody can tell: a container with PIDs of its own, say"),
)


# ---- below -------------------------------------------------------------------------------------


def _keys(frame: Frame, width: int) -> Line:
    if not frame.hears_keys:
        return [("standard input is no terminal: no keys; Ctrl-C quits", "dim")]
    view = frame.view
    told = [
        ("q", "quit"),
        ("f", view.filter),
        ("s", f"by {view.sort}"),
        ("?", "help"),
        ("space", "go on" if view.is_paused else "pause"),
        ("t", "time span"),
    ]
    pieces: list[tuple[str, str]] = []
    left = width - 12  # where the place in the list is told
    for key, what in told:
        left -= len(f"{key} {what}  ")
        if left >= 0:
            pieces += [(key, "bold"), (f" {what}  ", "dim")]
    return pieces


def _with_place(line: Line, scroll: int, page: int, num_lines: int) -> Line:
    """Where in the middle we are, if not all of it is shown."""
    if num_lines <= page:
        return line
    return [*line, (f"{scroll + 1}-{scroll + page}/{num_lines}", "reverse")]
