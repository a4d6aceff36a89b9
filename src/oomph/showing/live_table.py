"""Look -> the upper half of the live view: one row per GPU, as `oomph gpus` draws it, over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oomph.records.machine import Device
from oomph.showing.cells import Glyphs, Line, Piece, fit, sparkline
from oomph.showing.columns import Column, fitting, lines
from oomph.showing.gpu_row import (
    OWNER_STYLES,
    Row,
    bar_of,
    memory_of,
    name_of,
    nobody_on,
    power_of,
    ratio_of,
    temperature_of,
)
from oomph.showing.live_history import Histories
from oomph.showing.safe import printable
from oomph.units import format_gib

_BAR = "memory"
_WHO = "who"
# Characters that keep room for a picture; no text has them, for they are not printable.
_BAR_ROOM, _BUSY_ROOM, _FULL_ROOM = _ROOMS = ("\x01", "\x02", "\x03")
# Columns below which figures and headings take their short forms, so that the history has room.
_NARROW, _FOR_SM, _FOR_CUDA = 64, 24, 10
_VERY_WIDE = 150  # room for the history of memory too
# Cells of the bar and of a sparkline, from wide to narrow.
_SIZES = ((24, 40), (24, 24), (16, 16), (12, 12), (8, 8), (8, 0), (6, 0))
_SHORT_SPARK = 12  # a longer one takes no room from other columns
_MOST_PEOPLE = 24  # cells for those on one GPU
_FEW_PEOPLE = 12  # the same where it is narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """All that the table is drawn from."""

    rows: Sequence[Row]
    histories: Histories
    looks_per_cell: int
    interval_s: float
    cuda_indices: Mapping[str, int]  # by UUID; empty where nothing is hidden
    sm_active_ratios: Mapping[str, float]  # by UUID
    glyphs: Glyphs


def table_lines(table: Table, width: int) -> list[Line]:
    """The heading and the rows, with the longest bars and sparklines that there is room for."""
    figures = _figures(table, is_narrow=_is_narrow(table, width))
    for bar_cells, spark_cells in _SIZES:
        pictures = _pictures(table, bar_cells, spark_cells, is_very_wide=width >= _VERY_WIDE)
        wanted = [column for column in _in_order(figures, pictures) if not column.is_empty]
        columns = fitting(wanted, width)
        is_whole = len(columns) == len(wanted)
        if is_whole or (spark_cells <= _SHORT_SPARK and _are_all_in(pictures, columns)):
            break
    heading, *rows = lines(columns)
    return [heading, *(_drawn(row, columns, table, i) for i, row in enumerate(rows))]


def _is_narrow(table: Table, width: int) -> bool:
    sm, cuda = bool(table.sm_active_ratios), bool(table.cuda_indices)
    return width < _NARROW + _FOR_SM * sm + _FOR_CUDA * cuda


def _pictures(
    table: Table, bar_cells: int, spark_cells: int, *, is_very_wide: bool
) -> dict[str, Column]:
    """Room for what is drawn once it is known how large it can be."""
    num_rows = len(table.rows)
    if not table.histories.busy:
        spark_cells = 0
    full_cells = spark_cells if is_very_wide else 0
    seconds = table.interval_s * table.looks_per_cell * spark_cells
    last = "last " if spark_cells >= len("last 120 min") else ""
    span = f"{last}{_in_one_unit(seconds)}"
    return {
        _BAR: Column(heading=_BAR, cells=[_BAR_ROOM * bar_cells] * num_rows, align="<", keep=8),
        "full": Column(heading=span, cells=[_FULL_ROOM * full_cells] * num_rows, keep=3),
        "busy": Column(heading=span, cells=[_BUSY_ROOM * spark_cells] * num_rows, keep=5),
    }


def _in_order(figures: Mapping[str, Column], pictures: Mapping[str, Column]) -> list[Column]:
    return [pictures.get(name) or figures[name] for name in _ORDER]


_ORDER = (
    *("gpu", "cuda", "name", _BAR, "used", "full", "active", "busy"),
    *("sm", "temperature", "power", _WHO),
)


def _are_all_in(pictures: Mapping[str, Column], columns: Sequence[Column]) -> bool:
    """Are the bar and the history of kernel-active time there, as far as they were wanted?"""
    wanted = [pictures[name] for name in (_BAR, "busy") if not pictures[name].is_empty]
    return all(picture in columns for picture in wanted)


def _figures(table: Table, *, is_narrow: bool) -> dict[str, Column]:
    devices = [row.device for row in table.rows]
    people, more = _FEW_PEOPLE if is_narrow else _MOST_PEOPLE, table.glyphs.more
    who = [_text(fit(who_is_on(device), people, more)) for device in devices]
    names = [name_of(device, is_short=True) for device in devices]
    memory = [_short_memory(d) if is_narrow else memory_of(d) for d in devices]
    active = "active" if is_narrow else "kernel-active"
    return {
        "gpu": Column(heading="GPU", cells=[row.label for row in table.rows]),
        "cuda": Column(heading="cuda", cells=[_cuda(table, d) for d in devices], keep=6),
        "name": Column(heading="name", cells=names, align="<", keep=4),
        "used": Column(heading="GiB" if is_narrow else "GiB used", cells=memory),
        "active": Column(
            heading=active, cells=[ratio_of(device.busy_ratio) for device in devices], keep=10
        ),
        "sm": Column(heading="SM active", cells=[_sm_active(table, d) for d in devices], keep=7),
        "temperature": Column(heading="temp", cells=[temperature_of(d) for d in devices], keep=2),
        "power": Column(heading="power", cells=[power_of(d) for d in devices], keep=1),
        _WHO: Column(heading=_WHO, cells=who, align="<", keep=9),
    }


def _cuda(table: Table, device: Device) -> str:
    index = table.cuda_indices.get(device.uuid or "")
    return "" if index is None else f"cuda:{index}"


def _sm_active(table: Table, device: Device) -> str:
    ratio = table.sm_active_ratios.get(device.uuid or "")
    return "" if ratio is None else ratio_of(ratio)


def _short_memory(device: Device) -> str:
    used, total = device.used_bytes, device.total_bytes
    if used is None or total is None:
        return "?"
    return f"{format_gib(used, decimals=0)}/{format_gib(total, decimals=0)}"


# ---- pictures ----------------------------------------------------------------------------------


def _in_one_unit(seconds: float) -> str:
    """
    >>> _in_one_unit(40), _in_one_unit(400), _in_one_unit(9000)
    ('40 s', '7 min', '2.5 h')
    """
    if seconds <= 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds <= 7200 else f"{seconds / 3600:.3g} h"


# ---- whose it is -------------------------------------------------------------------------------


def who_is_on(device: Device) -> list[Piece]:
    """Me first, then the others by name, whoever holds most of it first."""
    processes = sorted(device.processes or (), key=lambda p: -(p.used_bytes or 0))
    if not processes:
        return [(nobody_on(device), "dim")]
    people: dict[str, str] = {}
    for is_mine in (True, False):
        for process in processes:
            if (process.owner in ("this-run", "mine")) == is_mine:
                name = "mine" if is_mine else printable(process.user or "somebody")
                people.setdefault(name, OWNER_STYLES["mine" if is_mine else process.owner])
    pieces: list[Piece] = []
    for name, style in people.items():
        pieces += [(", ", ""), (name, style)]
    return pieces[1:]


def _text(pieces: Sequence[Piece]) -> str:
    return "".join(text for text, _ in pieces)


def _drawn(pieces: list[Piece], columns: list[Column], table: Table, index: int) -> Line:
    """The row with its bar and sparklines, and its people in their colours."""
    row = table.rows[index]
    drawn: list[Piece] = []
    for column, (text, style) in zip(columns, pieces, strict=True):
        if column.heading == _WHO:
            drawn += fit(who_is_on(row.device), column.width, table.glyphs.more)
        elif text.lstrip()[:1] in _ROOMS:
            drawn += _picture(text, table, row)
        else:
            drawn.append((text, style))
    return drawn


def _picture(text: str, table: Table, row: Row) -> list[Piece]:
    """What belongs into the room that was kept for it."""
    room = text.strip()
    before, after = text[: text.index(room)], text[text.index(room) + len(room) :]
    if room[0] == _BAR_ROOM:
        bar = bar_of(row.device, len(room), table.glyphs.bar)
        drawn = bar or [("?" * len(room), "dim")]
    else:
        tracks = table.histories.busy if room[0] == _BUSY_ROOM else table.histories.full
        track = tracks.get(row.device.uuid or "")
        ratios = track.cells(table.looks_per_cell) if track else ()
        drawn = [(sparkline(ratios, len(room), table.glyphs.levels), "")]
    return [(before, ""), *drawn, (after, "")]
