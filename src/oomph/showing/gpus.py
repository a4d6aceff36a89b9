"""Machine -> the table of `oomph gpus`: one line per GPU, drawn to scale, and who is on it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.records.machine import Device, Machine, Owner, Process
from oomph.showing.terminal import draws_blocks, new_console, printable
from oomph.units import GIB, format_bytes, format_duration, format_gib, format_ratio

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
_BAR_STYLES = {"mine": "green", "others": "yellow", "rest": "magenta", "free": "dim"}


@dataclass(frozen=True, slots=True)
class _Layout:
    """What fits. A narrow terminal loses the sensors first, then half of the bar."""

    glyphs: dict[str, str]
    name_width: int
    bar_width: int
    shows_sensors: bool
    width: int


def print_machine(machine: Machine, now: float) -> None:
    """All GPUs of a machine on the terminal."""
    console = new_console()
    layout = _layout(machine, console)
    if machine.gpus:  # else the problem says all; "0 GPUs" would claim to know
        console.print(_headline(machine), style="bold")
    for gpu in machine.gpus:
        for line in _gpu_lines(gpu, layout, now):
            line.truncate(layout.width, overflow="ellipsis")
            console.print(line)
    if machine.gpus:
        console.print(_legend(layout))
    if machine.problem:
        console.print(machine.problem, style="red")


def _layout(machine: Machine, console: Console) -> _Layout:
    longest = max((len(gpu.name or "") for gpu in machine.gpus), default=0)
    is_wide = console.width >= 100
    return _Layout(
        glyphs=_BLOCKS if draws_blocks(console) else _ASCII,
        name_width=min(longest, 28 if is_wide else 18),
        bar_width=24 if is_wide else 10,
        shows_sensors=is_wide,
        width=console.width,
    )


def _headline(machine: Machine) -> str:
    count = len(machine.gpus)
    driver = f", driver {machine.driver_version}" if machine.driver_version else ""
    emulated = ", emulated: neither the GPUs nor the processes exist" if machine.emulated else ""
    return f"{count} GPU{'s' * (count != 1)}{driver}{emulated}"


def _gpu_lines(gpu: Device, layout: _Layout, now: float) -> list[Text]:
    lines = [_gpu_line(gpu, layout)]
    if gpu.slices:
        for part in gpu.slices:
            lines.append(_gpu_line(part, layout, is_slice=True))
            lines.extend(_process_lines(part, now))
    else:
        lines.extend(_process_lines(gpu, now))
    if gpu.problem:
        lines.append(_text(f"       {gpu.problem}", "red"))
    return lines


def _gpu_line(gpu: Device, layout: _Layout, *, is_slice: bool = False) -> Text:
    line = _text(f"  slice {gpu.index} " if is_slice else f"{gpu.index:>3} ", "bold")
    if gpu.cuda_index is not None:
        line.append(f"cuda:{gpu.cuda_index} ", "bold cyan")
    name = printable(gpu.name or "unknown model")[: layout.name_width]
    line.append(f" {name:<{layout.name_width}}  ")
    line.append_text(_bar(gpu, layout))
    line.append(f"  {_memory(gpu):<24} {_busy(gpu)}")
    if layout.shows_sensors and not is_slice:
        line.append(f"  {_sensors(gpu)}")
    return line


def _memory(gpu: Device) -> str:
    used, total = gpu.used_bytes, gpu.total_bytes
    if used is None or total is None:
        return "memory unknown"
    return f"{format_gib(used):>5} of {format_gib(total)} GiB {format_ratio(used / total):>4}"


def _busy(gpu: Device) -> str:
    if gpu.busy_ratio is None:
        return "kernel-active    ?"
    return f"kernel-active {format_ratio(gpu.busy_ratio):>4}"


def _sensors(gpu: Device) -> str:
    temperature = "  ? C" if gpu.temperature_c is None else f"{gpu.temperature_c:>3} C"
    power = "   ? W" if gpu.power_w is None else f"{gpu.power_w:>4.0f} W"
    return f"{temperature}  {power}"


def _bar(gpu: Device, layout: _Layout) -> Text:
    """The memory to scale: mine, others', taken but nobody knows by whom, free."""
    if gpu.used_bytes is None or not gpu.total_bytes:
        return _text(f"{'?' * layout.bar_width}", "red")
    cells = _cells(gpu, layout.bar_width)
    bar = _text("")
    for part, count in cells.items():
        bar.append(layout.glyphs[part] * count, _BAR_STYLES[part])
    return bar


def _cells(gpu: Device, width: int) -> dict[str, int]:
    """How many cells each part gets: rounded where the parts end, so that they add up."""
    total, used = gpu.total_bytes or 1, gpu.used_bytes or 0
    mine = _held(gpu, "this-run", "mine")
    others = _held(gpu, "others")
    ends = [min(end, total) for end in (mine, mine + others, max(used, mine + others), total)]
    edges = [0, *(round(width * end / total) for end in ends)]
    counts = [after - before for before, after in itertools.pairwise(edges)]
    return dict(zip(("mine", "others", "rest", "free"), counts, strict=True))


def _held(gpu: Device, *owners: Owner) -> int:
    return sum(p.used_bytes or 0 for p in gpu.processes or () if p.owner in owners)


def _process_lines(gpu: Device, now: float) -> list[Text]:
    indent = " " * 7
    if gpu.processes is None:
        return [_text(f"{indent}who is on it could not be read", "red")]
    if not gpu.processes:
        is_odd = gpu.used_bytes is not None and gpu.used_bytes > GIB
        hidden = "no process to be seen, yet memory is taken: another container?"
        return [_text(f"{indent}{hidden if is_odd else 'nobody'}", "magenta" if is_odd else "dim")]
    return [_process_line(process, indent, now) for process in gpu.processes]


def _process_line(process: Process, indent: str, now: float) -> Text:
    line = _text(f"{indent}{process.owner:<8} ", _STYLES[process.owner])
    used = "?" if process.used_bytes is None else format_bytes(process.used_bytes)
    line.append(f"{printable(process.user or '?'):<10} {process.pid:>7} {used:>9}  ")
    if process.started_at is not None:
        line.append(f"{'for ' + format_duration(now - process.started_at):<14}  ", "dim")
    kind = " (graphics)" if process.kind == "graphics" else ""
    line.append(printable(process.command or process.note or "?") + kind)
    return line


def _legend(layout: _Layout) -> Text:
    glyphs = layout.glyphs
    legend = _text(f"memory: {glyphs['mine']} mine  {glyphs['others']} others'  ", "dim")
    legend.append(f"{glyphs['rest']} taken, not known by whom  {glyphs['free']} free", "dim")
    legend.append(".  kernel-active: share of time, not of the GPU", "dim")
    return legend


def _text(content: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(content, style=style, no_wrap=True, end="")
