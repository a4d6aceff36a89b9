"""Machine -> the table of `oomph gpus`: one row per GPU, drawn to scale, and who is on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from oomph.records.machine import Device, Machine, Process
from oomph.showing.cells import ASCII, UNICODE, Piece
from oomph.showing.columns import Column, fitting, lines, total_width
from oomph.showing.gpu_row import (
    OWNER_STYLES,
    Row,
    bar_of,
    memory_of,
    name_of,
    nobody_on,
    power_of,
    ratio_of,
    rows_of,
    temperature_of,
)
from oomph.showing.safe import printable
from oomph.showing.terminal import draws_blocks, new_console, print_line, print_prose, text_of
from oomph.units import format_bytes, format_duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_BAR_WIDTHS = (24, 12, 8)
_BAR = "memory"
_WIDE_ENOUGH = 10_000
_INDENT = 5


def print_machine(machine: Machine, now: float) -> None:
    """All GPUs of a machine on the terminal."""
    console = new_console()
    if machine.gpus:  # else the problem says all; "0 GPUs" would claim to know
        print_prose(console, _headline(machine), "bold")
        _print_table(machine, console, now)
        _print_footer(machine, console)
    if machine.problem:
        print_prose(console, machine.problem, "red")


def _print_table(machine: Machine, console: Console, now: float) -> None:
    rows = list(rows_of(machine))
    heading, *drawn = _draw(rows, console)
    print_line(console, heading)
    for row, line in zip(rows, drawn, strict=True):
        print_line(console, line)
        for process in () if row.device.slices else row.device.processes or ():
            print_line(console, _process_line(process, now))
        if row.device.problem:
            print_prose(console, row.device.problem, "dim red", _INDENT)


def _print_footer(machine: Machine, console: Console) -> None:
    devices = [row.device for row in rows_of(machine) if not row.device.mig_enabled]
    free = ", ".join(row.label for row in rows_of(machine) if row.device.is_free)
    if any(device.is_free for device in devices):
        print_prose(console, f"free: {free}")
    glyphs = _glyphs(console)
    print_prose(
        console,
        f"{_BAR}: {glyphs['mine']} mine  {glyphs['others']} others'  {glyphs['rest']} taken, no"
        f" owner known  {glyphs['free']} free.  kernel-active: share of time, not of the"
        " GPU",
        "dim",
    )


def _headline(machine: Machine) -> str:
    count = len(machine.gpus)
    driver = f", driver {machine.driver_version}" if machine.driver_version else ""
    emulated = ", emulated: neither the GPUs nor the processes exist" if machine.emulated else ""
    return f"{count} GPU{'s' * (count != 1)}{driver}{emulated}"


def _glyphs(console: Console) -> dict[str, str]:
    return (UNICODE if draws_blocks(console) else ASCII).bar


# ---- rows of the table -----------------------------------------------------------------------


def _draw(rows: list[Row], console: Console) -> Iterator[Text]:
    """The heading and the rows. Where it is narrow, brands go first, then sensors, then the bar."""
    columns = fitting(_columns(rows, _BAR_WIDTHS[0], short_names=False), _WIDE_ENOUGH)
    if total_width(columns) > console.width:
        for bar_width in _BAR_WIDTHS:
            columns = fitting(_columns(rows, bar_width, short_names=True), console.width)
            if any(column.heading == _BAR for column in columns):
                break
    for i, pieces in enumerate(lines(columns)):
        yield text_of(_with_bars(pieces, columns, rows[i - 1], console) if i else pieces)


def _columns(rows: list[Row], bar_width: int, *, short_names: bool) -> list[Column]:
    devices = [row.device for row in rows]
    return [
        Column(heading="GPU", cells=[row.label for row in rows]),
        Column(heading="cuda", cells=[_cuda(device) for device in devices], keep=8),
        Column(
            heading="name",
            cells=[name_of(d, is_short=short_names) for d in devices],
            align="<",
            keep=5,
        ),
        Column(heading=_BAR, cells=["?" * bar_width for _ in rows], align="<", keep=3),
        Column(heading="GiB used", cells=[memory_of(device) for device in devices]),
        Column(
            heading="kernel-active",
            cells=[ratio_of(device.busy_ratio) for device in devices],
            keep=6,
        ),
        Column(heading="temp", cells=[temperature_of(device) for device in devices], keep=2),
        Column(heading="power", cells=[power_of(device) for device in devices], keep=1),
        Column(heading="who", cells=[nobody_on(device) for device in devices], align="<", keep=7),
    ]


def _cuda(device: Device) -> str:
    return "" if device.cuda_index is None else f"cuda:{device.cuda_index}"


def _with_bars(
    pieces: list[Piece], columns: list[Column], row: Row, console: Console
) -> list[Piece]:
    """The row with its bar drawn where the column has a place for it."""
    drawn: list[Piece] = []
    for column, (text, style) in zip(columns, pieces, strict=True):
        width = len(column.cells[0])
        bar = bar_of(row.device, width, _glyphs(console)) if column.heading == _BAR else None
        if bar:
            drawn += [*bar, (text[width:], "")]
        else:
            drawn.append((text, style or ("dim" if column.heading == "who" else "")))
    return drawn


# ---- who is on it ----------------------------------------------------------------------------


def _process_line(process: Process, now: float) -> Text:
    used = "?" if process.used_bytes is None else format_bytes(process.used_bytes)
    since = "" if process.started_at is None else f"for {format_duration(now - process.started_at)}"
    kind = " (graphics)" if process.kind == "graphics" else ""
    command = printable(process.command or process.note or "?") + kind
    return text_of(
        [
            (f"{'':{_INDENT}}{process.owner:<8} ", OWNER_STYLES[process.owner]),
            (f"{printable(process.user or '?'):<10} {process.pid:>7} {used:>9}  ", ""),
            (f"{since:<14}  " if since else "", "dim"),
            (command, ""),
        ]
    )
