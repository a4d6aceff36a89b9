"""Report -> what `oomph report` prints: the findings first, then the figures they rest on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.records.report import Finding, GpuFigures, Report
from oomph.records.run import Run
from oomph.showing import report_words as words
from oomph.showing.columns import Column, fitting, lines
from oomph.showing.safe import printable
from oomph.showing.series import busy_of, highest_columns, mean_columns, memory_of, spans_of
from oomph.showing.terminal import draws_blocks, new_console, print_line, print_prose, text_of
from oomph.units import format_duration, format_ratio

if TYPE_CHECKING:
    from rich.console import Console

_STYLES = {
    "out-of-memory": "bold red",
    "maybe-out-of-memory": "bold red",
    "hang": "bold red",
    "leak": "bold red",
    "spill": "bold red",
    "recovered": "bold yellow",
    "no-out-of-memory": "bold green",
    "busy": "bold green",
    "not-ended": "bold",
    "too-short": "bold",
    "head-room": "bold cyan",
}
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-:=+*#"
_WIDEST = 60  # cells of a sparkline
_MOST_GPUS = 8  # that get sparklines
_MOST_EVENTS = 12
_BRANDS = ("NVIDIA ", "GeForce ")


def print_report(report: Report, run: Run | None = None, *, to_stderr: bool = False) -> None:
    """The whole report on the terminal; with the run, memory and kernel-active time are drawn."""
    console = new_console(to_stderr=to_stderr)
    print_prose(console, words.title(report), "bold")
    print_prose(console, words.circumstances(report), "dim")
    console.print()
    for finding in report.findings:
        _print_finding(console, finding, report)
    console.print()
    _print_gpus(console, report.gpus)
    if run is not None and any(one.is_used for one in report.gpus):
        _print_sparklines(console, report, run)
    _print_rest(console, report)


def _print_finding(console: Console, finding: Finding, report: Report) -> None:
    style = _STYLES.get(finding.kind, "bold yellow")
    print_prose(console, f"{words.headline(finding, report)} [{finding.confidence}]", style)
    for line in finding.evidence:
        print_prose(console, line, indent=2)
    for line in finding.advice:
        print_prose(console, f"do: {line}", "cyan", indent=2)


def _print_gpus(console: Console, gpus: Sequence[GpuFigures]) -> None:
    if not gpus:
        return
    table = [
        Column(heading="GPU", cells=[str(one.index) for one in gpus]),
        Column(heading="name", cells=[_name(one) for one in gpus], align="<", keep=2),
        Column(heading="peak memory", cells=[words.peak(one) for one in gpus]),
        Column(heading="by", cells=[_source(one) for one in gpus], align="<", keep=6),
        Column(heading="kernel-active", cells=[words.busy(one) for one in gpus], keep=7),
        Column(heading="stood still", cells=[words.idle(one) for one in gpus], align="<", keep=4),
        Column(heading="power", cells=[words.power(one) for one in gpus], keep=3),
        Column(heading="held down", cells=[_throttled(one) for one in gpus], keep=1),
        Column(heading="shared", cells=[_shared(one) for one in gpus], keep=5),
    ]
    for pieces in lines(fitting(table, console.width)):
        print_line(console, text_of(pieces))
    for one in gpus[:1] if len(gpus) > 1 else gpus:
        label = f"GPU {one.index}: " if len(gpus) > 1 else ""
        print_prose(console, f"{label}kernel-active time: {words.busy_note(one)}", "dim")
        if note := words.peak_note(one):
            print_prose(console, f"{label}peak memory: {note}", "dim")


def _name(gpu: GpuFigures) -> str:
    name = printable(gpu.name or "?")
    for brand in _BRANDS:
        name = name.removeprefix(brand)
    return name


def _source(gpu: GpuFigures) -> str:
    return words.SOURCES[gpu.memory.peak_source] if gpu.memory.peak_source else ""


def _throttled(gpu: GpuFigures) -> str:
    ratio = gpu.power.throttled_ratio
    return format_ratio(ratio) if ratio else ""


def _shared(gpu: GpuFigures) -> str:
    return format_ratio(gpu.shared_ratio) if gpu.shared_ratio else ""


# ---- drawn -----------------------------------------------------------------------------------


def _print_sparklines(console: Console, report: Report, run: Run) -> None:
    """Memory against the GPU's, kernel-active time against all the time, from start to end."""
    label_width = max((len(f"GPU {one.index} ") for one in report.gpus), default=0)
    width = min(_WIDEST, console.width - label_width - len("kernel-active "))
    if width < 8:
        return
    for one in report.gpus[:_MOST_GPUS]:
        label = f"GPU {one.index} ".ljust(label_width)
        total = float(one.memory.total_bytes or one.memory.seen_bytes or 1)
        spans = spans_of(run, one.gpu)
        memory = highest_columns(memory_of(spans), report.lasted_s, width)
        busy = mean_columns(busy_of(spans), report.lasted_s, width)
        _print_sparkline(console, f"{label}memory        ", memory, total, "green")
        _print_sparkline(console, f"{label}kernel-active ", busy, 1.0, "magenta")
    if len(report.gpus) > _MOST_GPUS:
        print_prose(console, f"and {len(report.gpus) - _MOST_GPUS} more GPUs", "dim")
    start, end = "0", format_duration(report.lasted_s)
    axis = f"{start}{end:>{max(width - len(start), 0)}}"
    print_line(console, text_of([(" " * (label_width + len("kernel-active ")) + axis, "dim")]))


def _print_sparkline(
    console: Console, label: str, values: Sequence[float | None], most: float, style: str
) -> None:
    if not any(value is not None for value in values):
        return
    glyphs = _BLOCKS if draws_blocks(console) else _ASCII
    drawn = "".join(" " if value is None else glyphs[_level(value / most)] for value in values)
    print_line(console, text_of([(label, ""), (drawn, style)]))


def _level(ratio: float) -> int:
    """Of eight.

    >>> _level(0.0), _level(0.5), _level(1.0)
    (0, 4, 7)
    """
    return min(max(int(ratio * 8), 0), 7)


# ---- the rest --------------------------------------------------------------------------------


def _print_rest(console: Console, report: Report) -> None:
    for one in report.steps:
        rank = f"rank {one.rank}: " if len(report.steps) > 1 else ""
        print_prose(console, f"steps: {rank}{words.steps(one)}")
    if told := words.host(report.host_figures):
        print_prose(console, f"host: {told}")
    for mark in report.marks[:_MOST_EVENTS]:
        print_prose(console, f"{format_duration(mark.at_s)}: {mark.kind}: {mark.text}", "dim")
    left = report.num_marks - min(len(report.marks), _MOST_EVENTS)
    if left > 0:
        print_prose(console, f"and {left} more events", "dim")
