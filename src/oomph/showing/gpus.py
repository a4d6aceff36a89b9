"""Machine -> the table of `oomph gpus`: one row per GPU, drawn to scale, and who is on it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.records.machine import NOBODYS_BYTES, Device, Machine, Owner, Process
from oomph.showing.columns import Column, fitting, lines, total_width
from oomph.showing.safe import printable
from oomph.showing.terminal import draws_blocks, new_console, print_line, print_prose, text_of
from oomph.units import format_bytes, format_duration, format_gib, format_ratio

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_STYLES: dict[Owner, str] = {
    "this-run": "bold green",
    "mine": "green",
    "others": "yellow",
    "unknown": "magenta",
}
_BLOCKS: dict[str, str] = {"mine": "█", "others": "▓", "rest": "▒", "free": "░"}
_ASCII: dict[str, str] = {"mine": "#", "others": "%", "rest": "?", "free": "."}
_PARTS = ("mine", "others", "rest", "free")
_PART_STYLES = {"mine": "green", "others": "yellow", "rest": "magenta", "free": "dim"}
_BAR_WIDTHS = (24, 12, 8)
_BAR = "memory"
_WIDE_ENOUGH = 10_000
_BRANDS = ("NVIDIA ", "GeForce ")
_INDENT = 5


@dataclass(frozen=True, slots=True)
class _Row:
    """A GPU or a slice, with its place in the first column."""

    device: Device
    label: str


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
    rows = list(_rows(machine))
    heading, *drawn = _draw(rows, console)
    print_line(console, heading)
    for row, line in zip(rows, drawn, strict=True):
        print_line(console, line)
        for process in () if row.device.slices else row.device.processes or ():
            print_line(console, _process_line(process, now))
        if row.device.problem:
            print_prose(console, row.device.problem, "dim red", _INDENT)


def _print_footer(machine: Machine, console: Console) -> None:
    devices = [row.device for row in _rows(machine) if not row.device.mig_enabled]
    free = ", ".join(row.label for row in _rows(machine) if row.device.is_free)
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


def _rows(machine: Machine) -> Iterator[_Row]:
    for gpu in machine.gpus:
        yield _Row(gpu, str(gpu.index))
        for part in gpu.slices:
            yield _Row(part, f"{gpu.index}.{part.index}")


def _glyphs(console: Console) -> dict[str, str]:
    return _BLOCKS if draws_blocks(console) else _ASCII


# ---- rows of the table -----------------------------------------------------------------------


def _draw(rows: list[_Row], console: Console) -> Iterator[Text]:
    """The heading and the rows. Where it is narrow, brands go first, then sensors, then the bar."""
    columns = fitting(_columns(rows, _BAR_WIDTHS[0], short_names=False), _WIDE_ENOUGH)
    if total_width(columns) > console.width:
        for bar_width in _BAR_WIDTHS:
            columns = fitting(_columns(rows, bar_width, short_names=True), console.width)
            if any(column.heading == _BAR for column in columns):
                break
    for i, pieces in enumerate(lines(columns)):
        yield text_of(_with_bars(pieces, columns, rows[i - 1], console) if i else pieces)


def _columns(rows: list[_Row], bar_width: int, *, short_names: bool) -> list[Column]:
    devices = [row.device for row in rows]
    return [
        Column(heading="GPU", cells=[row.label for row in rows]),
        Column(heading="cuda", cells=[_cuda(device) for device in devices], keep=8),
        Column(heading="name", cells=[_name(d, short_names) for d in devices], align="<", keep=5),
        Column(heading=_BAR, cells=["?" * bar_width for _ in rows], align="<", keep=3),
        Column(heading="GiB used", cells=[_memory(device) for device in devices]),
        Column(heading="kernel-active", cells=[_busy(device) for device in devices], keep=6),
        Column(heading="temp", cells=[_temperature(device) for device in devices], keep=2),
        Column(heading="power", cells=[_power(device) for device in devices], keep=1),
        Column(heading="who", cells=[_nobody(device) for device in devices], align="<", keep=7),
    ]


def _cuda(device: Device) -> str:
    return "" if device.cuda_index is None else f"cuda:{device.cuda_index}"


def _name(device: Device, is_short: bool) -> str:
    name = printable(device.name or "unknown model")
    if device.is_slice and " MIG " in name:  # what tells slices apart
        return name[name.index(" MIG ") + 1 :]
    for brand in _BRANDS if is_short else ():
        name = name.removeprefix(brand)
    return name


def _memory(device: Device) -> str:
    used, total = device.used_bytes, device.total_bytes
    if used is None or total is None:
        return "unknown"
    return f"{format_gib(used)} of {format_gib(total)} {format_ratio(used / total):>4}"


def _busy(device: Device) -> str:
    return "?" if device.busy_ratio is None else format_ratio(device.busy_ratio)


def _temperature(device: Device) -> str:
    return "" if device.temperature_c is None else f"{device.temperature_c} C"


def _power(device: Device) -> str:
    return "" if device.power_w is None else f"{device.power_w:.0f} W"


def _nobody(device: Device) -> str:
    """What to say where no process is listed."""
    if device.processes is None:
        return "could not be read"
    if device.processes or device.slices:
        return ""
    return "nobody" if device.is_free else "nobody in sight"


def _with_bars(
    pieces: list[tuple[str, str]], columns: list[Column], row: _Row, console: Console
) -> list[tuple[str, str]]:
    """The row with its bar drawn where the column has a place for it."""
    drawn: list[tuple[str, str]] = []
    for column, (text, style) in zip(columns, pieces, strict=True):
        if column.heading == _BAR and row.device.used_bytes is not None and row.device.total_bytes:
            width = len(column.cells[0])
            cells = _cells(row.device, width)
            glyphs = _glyphs(console)
            drawn += [(glyphs[part] * cells[part], _PART_STYLES[part]) for part in _PARTS]
            drawn.append((text[width:], ""))
        else:
            drawn.append((text, style or ("dim" if column.heading == "who" else "")))
    return drawn


def _cells(device: Device, width: int) -> dict[str, int]:
    """How many cells each part of the memory gets: to scale, and never none for something."""
    total, used = device.total_bytes or 1, device.used_bytes or 0
    mine, others = _held(device, "this-run", "mine"), _held(device, "others")
    rest = max(used - mine - others, 0)
    sizes = [mine, others, rest if rest > NOBODYS_BYTES else 0]
    ends = [min(end, total) for end in itertools.accumulate(sizes)]
    edges = [0, *(round(width * end / total) for end in ends)]
    counts = [after - before for before, after in itertools.pairwise(edges)]
    counts = [max(count, 1) if size else 0 for count, size in zip(counts, sizes, strict=True)]
    while sum(counts) > width:
        counts[counts.index(max(counts))] -= 1
    return dict(zip(_PARTS, [*counts, width - sum(counts)], strict=True))


def _held(device: Device, *owners: Owner) -> int:
    return sum(p.used_bytes or 0 for p in device.processes or () if p.owner in owners)


# ---- who is on it ----------------------------------------------------------------------------


def _process_line(process: Process, now: float) -> Text:
    used = "?" if process.used_bytes is None else format_bytes(process.used_bytes)
    since = "" if process.started_at is None else f"for {format_duration(now - process.started_at)}"
    kind = " (graphics)" if process.kind == "graphics" else ""
    command = printable(process.command or process.note or "?") + kind
    return text_of(
        [
            (f"{'':{_INDENT}}{process.owner:<8} ", _STYLES[process.owner]),
            (f"{printable(process.user or '?'):<10} {process.pid:>7} {used:>9}  ", ""),
            (f"{since:<14}  " if since else "", "dim"),
            (command, ""),
        ]
    )
