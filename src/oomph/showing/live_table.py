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
from oomph.showing.live_history import Histories, Track
from oomph.showing.safe import printable
from oomph.units import format_gib

_BAR = "memory"
_WHO = "who"
_NARROW = 64  # columns; below it, short forms of figures and headings
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
    columns: list[Column] = []
    for bar_cells, spark_cells in _SIZES:
        bar = Column(heading=_BAR, cells=["?" * bar_cells] * len(table.rows), align="<", keep=8)
        spark = _spark(table, table.histories.busy, spark_cells, keep=5)
        wanted = [c for c in _columns(table, width, bar, spark) if not c.is_empty]
        columns = fitting(wanted, width)
        is_drawn = bar in columns and (spark in columns or spark.is_empty)
        if is_drawn and (spark_cells <= _SHORT_SPARK or len(columns) == len(wanted)):
            break
    heading, *rows = lines(columns)
    drawn = [_with_bar(row, columns, table, i) for i, row in enumerate(rows)]
    return [heading, *drawn]


def _columns(table: Table, width: int, bar: Column, spark: Column) -> list[Column]:
    is_narrow = width < _NARROW
    devices = [row.device for row in table.rows]
    people, more = _people_cells(width), table.glyphs.more
    names = [name_of(device, is_short=True) for device in devices]
    memory = [_short_memory(d) if is_narrow else memory_of(d) for d in devices]
    spark_cells = max(map(len, spark.cells), default=0) if width >= _VERY_WIDE else 0
    return [
        Column(heading="GPU", cells=[row.label for row in table.rows]),
        Column(heading="cuda", cells=[_cuda(table, device) for device in devices], keep=6),
        Column(heading="name", cells=names, align="<", keep=4),
        bar,
        Column(heading="GiB" if is_narrow else "GiB used", cells=memory),
        _spark(table, table.histories.full, spark_cells, keep=3),
        Column(
            heading="active" if is_narrow else "kernel-active",
            cells=[ratio_of(device.busy_ratio) for device in devices],
            keep=10,
        ),
        spark,
        Column(heading="SM active", cells=[_sm_active(table, d) for d in devices], keep=7),
        Column(heading="temp", cells=[temperature_of(device) for device in devices], keep=2),
        Column(heading="power", cells=[power_of(device) for device in devices], keep=1),
        Column(
            heading=_WHO,
            cells=[_text(fit(who_is_on(d), people, more)) for d in devices],
            align="<",
            keep=9,
        ),
    ]


def _people_cells(width: int) -> int:
    return _FEW_PEOPLE if width < _NARROW else _MOST_PEOPLE


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


# ---- history -----------------------------------------------------------------------------------


def _spark(table: Table, tracks: Mapping[str, Track], num_cells: int, keep: int) -> Column:
    seconds = table.interval_s * table.looks_per_cell * num_cells
    last = "last " if num_cells >= len("last 120 min") else ""
    drawn = [_sparkline(table, tracks.get(row.device.uuid or ""), num_cells) for row in table.rows]
    return Column(heading=f"{last}{_in_one_unit(seconds)}", cells=drawn, align="<", keep=keep)


def _sparkline(table: Table, track: Track | None, num_cells: int) -> str:
    if track is None:
        return ""
    return sparkline(track.cells(table.looks_per_cell), num_cells, table.glyphs.levels)


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


def _with_bar(pieces: list[Piece], columns: list[Column], table: Table, index: int) -> Line:
    """The row with its bar, and its people in their colours."""
    device = table.rows[index].device
    drawn: list[Piece] = []
    for column, (text, style) in zip(columns, pieces, strict=True):
        if column.heading == _BAR:
            bar_cells = len(column.cells[index])
            bar = bar_of(device, bar_cells, table.glyphs.bar)
            drawn += [*bar, (text[bar_cells:], "")] if bar else [(text, "dim")]
        elif column.heading == _WHO:
            drawn += fit(who_is_on(device), column.width, table.glyphs.more)
        else:
            drawn.append((text, style))
    return drawn
