"""Machine -> the table of `oomph gpus`; GpuModel -> the tables of `oomph gpus --catalog`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from oomph.records.gpu_model import Found, GpuModel
from oomph.records.machine import NOBODYS_BYTES, Device, Machine, Owner, Process
from oomph.showing.graph import load_style
from oomph.showing.terminal import (
    Column,
    Glyphs,
    Line,
    Piece,
    fit,
    fitting,
    glyphs_for,
    lines,
    new_console,
    print_line,
    print_prose,
    print_table,
    printable,
    sparkline,
)
from oomph.units import format_bytes, format_duration, format_gib, format_ratio

if TYPE_CHECKING:
    from rich.console import Console


# ---- the table of GPUs, the same in `oomph gpus` and in the live view ----------------------------

OWNER_STYLES: dict[Owner, str] = {
    "this-run": "bold green",
    "mine": "green",
    "others": "yellow",
    "unknown": "magenta",
}
MINE: tuple[Owner, ...] = ("this-run", "mine")
_PARTS = ("mine", "others", "rest", "free")
_PART_STYLES = {"mine": "green", "others": "yellow", "rest": "magenta", "free": "dim"}
_NEAR_LIMIT = 0.95  # share of the power cap; judgement: clocks are held down from here on
_BRANDS = ("NVIDIA ", "GeForce ")


@dataclass(frozen=True, slots=True)
class Row:
    """A GPU or a slice, with its label for the first column."""

    device: Device
    label: str


def rows_of(machine: Machine) -> Iterator[Row]:
    for gpu in machine.gpus:
        yield Row(gpu, str(gpu.index))
        for part in gpu.slices:
            yield Row(part, f"{gpu.index}.{part.index}")


def short_name(name: str) -> str:
    """Return a GPU's name without its brand."""
    for brand in _BRANDS:
        name = name.removeprefix(brand)
    return name


def _name(device: Device) -> str:
    name = printable(device.name or "unknown model")
    if device.is_slice and " MIG " in name:  # only this part differs between slices
        return name[name.index(" MIG ") + 1 :]
    return short_name(name)


def memory_of(device: Device) -> str:
    used, total = device.used_bytes, device.total_bytes
    if used is None or total is None:
        return "unknown"
    share = ratio_of(used / total if total else None)
    return f"{format_gib(used)} of {format_gib(total)} {share:>4}"


def _short_memory(device: Device) -> str:
    used, total = device.used_bytes, device.total_bytes
    if used is None or total is None:
        return "?"
    return f"{format_gib(used, decimals=0)}/{format_gib(total, decimals=0)}"


def _fullness_style(device: Device) -> str:
    """Return a style for memory that is filling up; memory that is free needs none."""
    if device.used_bytes is None or not device.total_bytes:
        return ""
    style = load_style(device.used_bytes / device.total_bytes)
    return style if style != "green" else ""


def ratio_of(ratio: float | None) -> str:
    return "?" if ratio is None else format_ratio(ratio)


def _when_empty(device: Device) -> str:
    """Return the text to show if no process is listed."""
    if device.processes is None:
        return "could not be read"
    if device.processes or device.slices:
        return ""
    return "nobody" if device.is_free else "no process visible"


def _users_on(device: Device) -> list[Piece]:
    """Return me first, then the other users by name, by memory held."""
    processes = sorted(device.processes or (), key=lambda p: -(p.used_bytes or 0))
    if not processes:
        return [(_when_empty(device), "dim")]
    users: dict[str, str] = {}
    for is_mine in (True, False):
        for process in processes:
            if (process.owner in MINE) == is_mine:
                name = "mine" if is_mine else printable(process.user or "somebody")
                users.setdefault(name, OWNER_STYLES["mine" if is_mine else process.owner])
    pieces: list[Piece] = []
    for name, style in users.items():
        pieces += [(", ", ""), (name, style)]
    return pieces[1:]


def bar_of(device: Device, width: int, glyphs: dict[str, str]) -> list[Piece] | None:
    """Draw its memory to scale, by owner; None if the owners are unknown."""
    if device.used_bytes is None or not device.total_bytes:
        return None
    counts = _counts(device, width)
    return [(glyphs[part] * counts[part], _PART_STYLES[part]) for part in _PARTS]


def _counts(device: Device, width: int) -> dict[str, int]:
    """Return the cells for each part of the memory: to scale, at least one if not empty."""
    total, used = device.total_bytes or 1, device.used_bytes or 0
    mine, others = _bytes_of(device, *MINE), _bytes_of(device, "others")
    rest = max(used - mine - others, 0)
    sizes = [mine, others, rest if rest > NOBODYS_BYTES else 0]
    ends = [min(end, total) for end in itertools.accumulate(sizes)]
    edges = [0, *(round(width * end / total) for end in ends)]
    counts = [after - before for before, after in itertools.pairwise(edges)]
    counts = [max(count, 1) if size else 0 for count, size in zip(counts, sizes, strict=True)]
    while sum(counts) > width:
        counts[counts.index(max(counts))] -= 1
    return dict(zip(_PARTS, [*counts, width - sum(counts)], strict=True))


def _bytes_of(device: Device, *owners: Owner) -> int:
    return sum(p.used_bytes or 0 for p in device.processes or () if p.owner in owners)


# Below this width, figures and headings use their short forms, so that the history has room.
_NARROW, _FOR_SM, _FOR_CUDA = 64, 24, 10
_VERY_WIDE = 150  # room for the history of memory too
# Cells of the bar and of a sparkline, from wide to narrow.
_SIZES = ((24, 40), (24, 24), (16, 16), (12, 12), (8, 8), (8, 0), (6, 0))
_SHORT_SPARK = 12  # up to this length it takes no room from other columns
_MOST_USERS, _FEW_USERS = 24, 12  # cells for the users of one GPU; the second if it is narrow


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """What the table shows. Mappings are by UUID."""

    rows: Sequence[Row]
    glyphs: Glyphs
    names_users: bool  # False: processes are listed below their GPU
    # Besides Device.cuda_index; empty if nothing is hidden.
    cuda_indices: Mapping[str, int] = field(default_factory=dict)
    sm_active_ratios: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # history
    full: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # history
    cell_s: float = 1.0  # time that one value of a history spans


def table_lines(table: Table, width: int) -> list[Line]:
    """Return heading and rows, with the longest bars and sparklines that fit."""
    *names, memory, active, sm, temperature, power, who = _figures(table, width)
    is_very_wide = width >= _VERY_WIDE
    for bar_cells, spark_cells in _SIZES:
        # Blanks of the same width first: most of these pictures would be drawn in vain.
        bar, busy, full = _blanks(table, bar_cells, spark_cells if table.busy else 0)
        middle = [bar, memory, *([full] if is_very_wide else []), active, busy]
        wanted = [*names, *middle, sm, temperature, power, who]
        wanted = [column for column in wanted if not column.is_empty]
        columns = fitting(wanted, width)
        has_pictures = all(one in columns for one in (bar, busy) if not one.is_empty)
        if len(columns) == len(wanted) or (spark_cells <= _SHORT_SPARK and has_pictures):
            break
    pictures = {
        id(bar): _bars(table, bar, bar_cells),
        id(busy): _sparks(table, busy, table.busy, spark_cells),
        id(full): _sparks(table, full, table.full, spark_cells if is_very_wide else 0),
    }
    return lines([pictures.get(id(column), column) for column in columns])


def _blanks(table: Table, bar_cells: int, spark_cells: int) -> tuple[Column, Column, Column]:
    """Return the columns of the bar and of both histories, with nothing drawn yet."""
    last = "last " if spark_cells >= len("last 120 min") else ""
    span = f"{last}{in_one_unit(table.cell_s * spark_cells)}"
    blank = [" " * spark_cells]
    return (
        Column("memory", [" " * bar_cells], keep=8, align="<"),
        Column(span, blank, keep=5),
        Column(span, blank, keep=3),
    )


def _bars(table: Table, column: Column, cells: int) -> Column:
    bars = [bar_of(row.device, cells, table.glyphs.bar) for row in table.rows]
    return replace(column, cells=[bar or [("?" * cells, "dim")] for bar in bars])


def _sparks(
    table: Table, column: Column, histories: Mapping[str, Sequence[float | None]], cells: int
) -> Column:
    uuids = [row.device.uuid or "" for row in table.rows]
    levels = table.glyphs.levels
    return replace(
        column, cells=[sparkline(histories.get(uuid, ()), cells, levels) for uuid in uuids]
    )


def _figures(table: Table, width: int) -> list[Column]:
    """Return the columns of text."""
    devices = [row.device for row in table.rows]
    uuids = [device.uuid or "" for device in devices]
    # A GPU that is lost has an index, but no UUID.
    indices = [table.cuda_indices.get(d.uuid or "", d.cuda_index) for d in devices]
    cuda = ["" if index is None else f"cuda:{index}" for index in indices]
    has_sm, has_cuda = bool(table.sm_active_ratios), any(cuda)
    is_narrow = width < _NARROW + _FOR_SM * has_sm + _FOR_CUDA * has_cuda
    sm = [
        format_ratio(table.sm_active_ratios[u]) if u in table.sm_active_ratios else ""
        for u in uuids
    ]
    who: list[Line] = [[(_when_empty(device), "dim")] for device in devices]
    if table.names_users:
        most = _FEW_USERS if is_narrow else _MOST_USERS
        who = [fit(_users_on(device), most, table.glyphs.more) for device in devices]
    return [
        Column("GPU", [row.label for row in table.rows]),
        Column("cuda", cuda, keep=6),
        Column("name", [_name(device) for device in devices], keep=4, align="<"),
        Column("GiB", [[(_short_memory(d), _fullness_style(d))] for d in devices])
        if is_narrow
        else Column("GiB used", [[(memory_of(d), _fullness_style(d))] for d in devices]),
        Column(
            "active" if is_narrow else "kernel-active",
            [[(ratio_of(d.busy_ratio), load_style(d.busy_ratio))] for d in devices],
            keep=10,
        ),
        Column("SM active", sm, keep=7),
        Column("temp", [_temperature(d.temperature_c) for d in devices], keep=2),
        Column("power", [_power(d) for d in devices], keep=1),
        Column("who", who, keep=9, align="<"),
    ]


# Judgement: GPUs for servers slow down between 85 and 93 degrees.
_WARM_C, _HOT_C = 75, 85


def _temperature(celsius: int | None) -> Line:
    if celsius is None:
        return []
    style = "red" if celsius >= _HOT_C else "yellow" if celsius >= _WARM_C else ""
    return [(f"{celsius} C", style)]


def _power(device: Device) -> Line:
    """Return the power, and its cap where that is known."""
    power_w, limit_w = device.power_w, device.power_limit_w
    if power_w is None:
        return []
    if not limit_w:
        return [(f"{power_w:.0f} W", "")]
    style = "yellow" if power_w >= _NEAR_LIMIT * limit_w else ""
    return [(f"{power_w:.0f}", style), (f" of {limit_w:.0f} W", "dim")]


def in_one_unit(seconds: float) -> str:
    """
    >>> in_one_unit(40), in_one_unit(400), in_one_unit(9000)
    ('40 s', '7 min', '2.5 h')
    """
    if seconds <= 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds <= 7200 else f"{seconds / 3600:.3g} h"


# ---- `oomph gpus` --------------------------------------------------------------------------------

_INDENT = 5
_LEGEND = {"mine": "mine", "others": "others'", "rest": "taken, no owner known", "free": "free"}


def bar_legend(glyphs: Glyphs) -> str:
    """Return what the parts of a memory bar mean."""
    return "  ".join(f"{glyphs.bar[part]} {whose}" for part, whose in _LEGEND.items())


def print_machine(machine: Machine, now: float) -> None:
    """Print all GPUs of a machine."""
    console = new_console()
    if machine.gpus:  # else the problem says it all; "0 GPUs" would claim to know
        print_prose(console, _headline(machine), "bold")
        _print_table(machine, console, now)
        _print_footer(machine, console)
    if machine.problem:
        print_prose(console, machine.problem, "red")


def _print_table(machine: Machine, console: Console, now: float) -> None:
    rows = list(rows_of(machine))
    table = Table(rows=rows, glyphs=glyphs_for(console.encoding), names_users=False)
    heading, *drawn = table_lines(table, console.width)
    print_line(console, heading)
    for row, line in zip(rows, drawn, strict=True):
        print_line(console, line)
        for process in () if row.device.slices else row.device.processes or ():
            print_line(console, _process_line(process, now))
        if row.device.problem:
            print_prose(console, row.device.problem, "dim red", _INDENT)


def _print_footer(machine: Machine, console: Console) -> None:
    rows = [row for row in rows_of(machine) if not row.device.mig_enabled]
    free = [row.label for row in rows if row.device.is_free]
    if free:
        print_prose(console, f"free: {', '.join(free)}")
    legend = bar_legend(glyphs_for(console.encoding))
    active = "kernel-active: share of time, not of the GPU"
    print_prose(console, f"memory: {legend}.  {active}", "dim")


def _headline(machine: Machine) -> str:
    count = len(machine.gpus)
    origin = provenance(machine)
    return f"{count} GPU{'s' * (count != 1)}{origin and f', {origin}'}"


def provenance(machine: Machine) -> str:
    """Return who answers for the GPUs: a driver, or nobody if they are emulated."""
    if machine.emulated:
        return "emulated: neither the GPUs nor the processes exist"
    return f"driver {printable(machine.driver_version)}" if machine.driver_version else ""


def _process_line(process: Process, now: float) -> Line:
    used = "?" if process.used_bytes is None else format_bytes(process.used_bytes)
    since = "" if process.started_at is None else f"for {format_duration(now - process.started_at)}"
    kind = " (graphics)" if process.kind == "graphics" else ""
    command = printable(process.command or process.note or "?") + kind
    return [
        (f"{'':{_INDENT}}{process.owner:<8} ", OWNER_STYLES[process.owner]),
        (f"{printable(process.user or '?'):<10} {process.pid:>7} {used:>9}  ", ""),
        (f"{since:<14}  " if since else "", "dim"),
        (command, ""),
    ]


# ---- the catalogue: `oomph gpus --catalog` -------------------------------------------------------

_TERA = 1e12
_GIGA = 1e9


def print_models(models: tuple[GpuModel, ...]) -> None:
    """Print one line per GPU."""
    console = new_console()
    rates = {
        rate: [_figure(model, f"{rate}_flops", _TERA) for model in models]
        for rate in ("fp32", "tf32", "fp16", "bf16")
    }
    bandwidths = [_figure(model, "memory_bandwidth_bytes_per_s", _GIGA) for model in models]
    columns = [
        Column("name", [model.name for model in models], align="<"),
        Column("GB", [_memory(model.memory_bytes) for model in models]),
        Column("GB/s", bandwidths, keep=6),
        Column("fp32", rates["fp32"], keep=3),
        Column("tf32", rates["tf32"], keep=2),
        Column("fp16", rates["fp16"], keep=4),
        Column("bf16", rates["bf16"], keep=7),
        Column("cc", [_capability(model.compute_capability) for model in models], keep=5),
        Column("architecture", [model.architecture for model in models], keep=1, align="<"),
    ]
    print_table(console, columns)
    print_prose(
        console,
        f"{len(models)} GPUs; peak rates in dense TFLOP/s; ? is not known, - is not there. The"
        " source of each figure: oomph gpus --catalog NAME",
        "dim",
    )


def print_model(found: Found, legend: Mapping[str, str]) -> None:
    """Print one GPU: each figure with its source, and what the sources are."""
    model = found.model
    console = new_console()
    print_prose(console, f"{model.name}: {model.title} ({model.architecture})", "bold")
    if found.assumed:
        print_prose(console, found.assumed, "yellow")
    labels, figures, fields = zip(*_model_figures(model), strict=True)
    columns = [
        Column("", labels, align="<"),
        Column("figure", figures),
        Column("source", [[(model.sources.get(f, ""), "dim")] for f in fields], align="<"),
    ]
    for line in lines(columns):
        print_line(console, line)
    if model.note:
        print_prose(console, f"note: {model.note}")
    for tag in sorted(_tags_of(model) & legend.keys()):
        print_prose(console, f"{tag}: {legend[tag]}", "dim")


def _model_figures(model: GpuModel) -> list[tuple[str, str, str]]:
    bandwidth = _figure(model, "memory_bandwidth_bytes_per_s", _GIGA)
    nvlink = _figure(model, "nvlink_bytes_per_s", _GIGA)
    rates = (("peak fp32", "fp32"), ("peak tf32", "tf32"), ("peak fp16", "fp16"))
    return [
        ("memory", f"{_memory(model.memory_bytes)} GB", "memory_bytes"),
        ("memory that CUDA sees", _visible(model), "measured_bytes"),
        ("memory bandwidth", f"{bandwidth} GB/s", "memory_bandwidth_bytes_per_s"),
        *(
            (label, f"{_figure(model, f'{rate}_flops', _TERA)} TFLOP/s", f"{rate}_flops")
            for label, rate in (*rates, ("peak bf16", "bf16"), ("best bf16 matmul", "matmul_bf16"))
        ),
        ("SMs", str(model.num_sms or "?"), "num_sms"),
        ("compute capability", _capability(model.compute_capability), "compute_capability"),
        ("NVLink, both ways", f"{nvlink} GB/s", "nvlink_bytes_per_s"),
        ("PCIe", model.pcie or "?", "pcie"),
    ]


def _tags_of(model: GpuModel) -> set[str]:
    words = " ".join(model.sources.values()).replace("+", " ").split()
    return {word.strip("(),;") for word in words}


def _visible(model: GpuModel) -> str:
    return "?" if model.measured_bytes is None else f"{format_gib(model.measured_bytes)} GiB"


def _memory(memory_bytes: int | None) -> str:
    return "?" if memory_bytes is None else format_gib(memory_bytes, decimals=0)


def _figure(model: GpuModel, field: str, scale: float) -> str:
    value = getattr(model, field)
    if value is None:
        return "-" if model.sources.get(field, "").startswith("none") else "?"
    return f"{value / scale:g}"


def _capability(capability: tuple[int, int] | None) -> str:
    return "?" if capability is None else f"{capability[0]}.{capability[1]}"
