"""Report -> what `oomph report` prints and draws: findings first, then the figures behind them."""

from __future__ import annotations

import io
import math
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oomph.records.report import Finding, GpuFigures, HostFigures, Report, Spread, StepFigures
from oomph.records.run import GpuSpan, HostSpan, Run, StepSpan, halts_of, pieces, shortened
from oomph.records.stored import SCHEMA, to_jsonable
from oomph.showing.gpus import short_name
from oomph.showing.html_page import filled_page
from oomph.showing.terminal import (
    Column,
    glyphs_for,
    new_console,
    print_command,
    print_line,
    print_prose,
    print_table,
    printable,
    sparkline,
)
from oomph.store import write_whole
from oomph.units import format_bytes, format_duration, format_rate, format_ratio, format_time

if TYPE_CHECKING:
    from rich.console import Console


# ---- sentences shared by terminal and page -------------------------------------------------------


def title(report: Report) -> str:
    """Return what ran."""
    return f"{report.run}: {shlex.join(report.command)}"


def circumstances(report: Report) -> str:
    """Return where, when, how long, and how it ended."""
    by = f" by {report.user}" if report.user else ""
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(report.started_at))
    lasted = format_duration(report.lasted_s)
    if report.halted_s:
        lasted += f" (halted for {format_duration(report.halted_s)})"
    return f"on {report.host}{by}, {when}, for {lasted}, {_end(report)}"


def _end(report: Report) -> str:
    if not report.has_ended:
        return "not seen to end"
    if report.signal:
        return f"ended by {report.signal}"
    return "exit unknown" if report.exit_code is None else f"exit {report.exit_code}"


def whose(finding: Finding, report: Report) -> str:
    """Return the GPUs a finding is about; empty if there is only one."""
    labels = {one.gpu: one.index for one in report.gpus}
    if not finding.gpus or len(labels) < 2:
        return ""
    if set(finding.gpus) == set(labels):
        return "both GPUs" if len(labels) == 2 else f"all {len(labels)} GPUs"
    listed = ", ".join(str(labels.get(gpu, gpu)) for gpu in finding.gpus)
    return f"GPU {listed}" if len(finding.gpus) == 1 else f"GPUs {listed}"


def headline(finding: Finding, report: Report) -> str:
    """Return the finding's sentence, with the GPUs in front where needed."""
    of = whose(finding, report)
    return f"{of}: {finding.sentence}" if of else finding.sentence


def peak(gpu: GpuFigures) -> str:
    memory = gpu.memory
    if memory.peak_bytes is None:
        return "unknown"
    if not memory.total_bytes:
        return format_bytes(memory.peak_bytes)
    share = format_ratio(memory.peak_bytes / memory.total_bytes)
    return f"{format_bytes(memory.peak_bytes)} of {format_bytes(memory.total_bytes)} ({share})"


def peak_note(gpu: GpuFigures) -> str:
    """Return the source of the peak, and what it can miss."""
    memory = gpu.memory
    if memory.peak_source is None:
        return ""
    source = {
        "torch": "reserved by torch's allocator, exact",
        "accounting": "by the driver's accounting, exact",
        "polled": "as polled",
    }[memory.peak_source]
    parts = [source]
    if memory.allocated_bytes is not None:
        parts.append(f"{format_bytes(memory.allocated_bytes)} of it in tensors")
    if memory.peak_misses:
        parts.append(memory.peak_misses)
    if memory.peak_source != "polled" and memory.seen_bytes is not None:
        parts.append(f"the GPU as a whole was seen at {format_bytes(memory.seen_bytes)}")
    return "; ".join(parts)


def busy(gpu: GpuFigures) -> str:
    """Return the mean busy ratio while the run worked; if it never did, of the whole run."""
    if gpu.busy is None:
        return "unknown"
    return format_ratio((gpu.busy.working or gpu.busy.whole).mean)


def busy_note(gpu: GpuFigures) -> str:
    """Return mean and quantiles, of the training and of the whole run."""
    if gpu.busy is None:
        return "could not be read"
    parts = []
    if gpu.busy.working:
        parts.append(f"while it worked {_spread(gpu.busy.working)}")
    parts.append(f"over the whole run {_spread(gpu.busy.whole)}")
    if gpu.busy.source == "polled":
        parts.append("polled: short bursts can be missed")
    return "; ".join(parts)


def _spread(one: Spread) -> str:
    p10, p50, p90 = map(format_ratio, (one.p10, one.p50, one.p90))
    return f"{format_ratio(one.mean)} (p10 {p10}, median {p50}, p90 {p90})"


def power(gpu: GpuFigures) -> str:
    one = gpu.power
    if one.mean_w is None:
        return "unknown"
    limit = f" of {one.limit_w:.0f}" if one.limit_w else ""
    return f"{one.mean_w:.0f}{limit} W"


def idle(gpu: GpuFigures) -> str:
    """Return how often and how long it was idle."""
    if gpu.busy is None:
        return "unknown"
    count, total = gpu.busy.num_gaps, format_duration(gpu.busy.gaps_s)
    return "none" if not count else f"{count} gap{'s' * (count > 1)}, {total}"


def steps(one: StepFigures) -> str:
    longest = format_time(one.longest_step_s)
    parts = [f"{one.num_steps} steps of {format_time(one.step_s)} (longest {longest})"]
    if one.samples_per_s is not None:
        parts.append(f"{format_rate(one.samples_per_s)} samples a second")
    if one.data_wait_ratio is not None:
        parts.append(f"waits for data {format_ratio(one.data_wait_ratio)} of the time")
    return ", ".join(parts)


def host(one: HostFigures) -> str:
    parts = []
    if one.cpu_cores is not None:
        of = f" of {one.num_cpus}" if one.num_cpus else ""
        parts.append(f"{one.cpu_cores:.1f}{of} CPUs busy")
    if one.busiest_cpu_cores is not None:
        parts.append(f"its busiest process {one.busiest_cpu_cores:.1f}")
    if one.memory_bytes is not None:
        parts.append(f"up to {format_bytes(one.memory_bytes)}")
    if one.num_processes is not None:
        parts.append(f"up to {one.num_processes} process{'es' * (one.num_processes != 1)}")
    if one.others_cpu_cores is not None and one.others_cpu_cores >= 0.1:
        parts.append(f"other processes used {one.others_cpu_cores:.1f} CPUs")
    if one.throttled_ratio:
        parts.append(f"held back by its CPU limit {format_ratio(one.throttled_ratio)} of the time")
    if one.swapping_ratio:
        parts.append(f"swapping {format_ratio(one.swapping_ratio)} of the time")
    return ", ".join(parts)


# ---- spans -> series to draw ---------------------------------------------------------------------
# Each point has the lowest, mean and highest value of its bucket of time. A time without readings
# becomes a point without values, so that no line is drawn across it.

MOST_POINTS = 2000
_INSTANT = 1e-9  # weight of a point without duration, if there is nothing else
_APART_S = 1.5  # between spans further apart than this, something was not seen


class Point(NamedTuple):
    """A stretch of time with its values, or a bucket of several. A long run has a million."""

    began_s: float
    ended_s: float
    low: float | None
    mean: float | None
    high: float | None

    @property
    def at_s(self) -> float:
        return (self.began_s + self.ended_s) / 2


def decimated(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points, in buckets of equal time; `points` are in order of time."""
    if not points:
        return []
    most_buckets = max(most // 2, 1)  # each may be followed by a break
    if len(points) <= most_buckets:
        return list(_with_breaks(points))
    first_s, last_s = points[0].at_s, points[-1].at_s
    width_s = (last_s - first_s) / most_buckets or 1.0
    buckets = groupby(points, lambda p: min(int((p.at_s - first_s) / width_s), most_buckets - 1))
    return list(_with_breaks([_joined(list(inside)) for _, inside in buckets]))


def spans_of(run: Run, gpu: int) -> list[GpuSpan]:
    """Return the spans of one GPU, in order of time."""
    return sorted((s for s in run.gpu_spans if s.gpu == gpu), key=lambda span: span.began_s)


def memory_of(spans: Sequence[GpuSpan]) -> list[Point]:
    """Return the bytes in use on a GPU, by all processes."""
    return [
        _point(span, span.used_bytes, high=span.most_used_bytes)
        for span in spans
        if span.used_bytes is not None
    ]


def busy_of(spans: Sequence[GpuSpan]) -> list[Point]:
    """Return the kernel-active time of a GPU."""
    return [
        _point(span, span.busy_ratio, span.least_busy_ratio, span.most_busy_ratio)
        for span in spans
        if span.busy_ratio is not None
    ]


def power_of(spans: Sequence[GpuSpan]) -> list[Point]:
    """Return the power of a GPU in watts."""
    return [_point(span, span.power_w) for span in spans if span.power_w is not None]


def cpu_of(run: Run) -> list[Point]:
    """Return how many cores the run's processes keep busy."""
    spans = sorted(run.host_spans, key=lambda span: span.began_s)
    return [_point(span, span.cpu_cores) for span in spans if span.cpu_cores is not None]


def steps_of(run: Run, rank: int) -> list[Point]:
    """Return the seconds per step, without those in which the run was halted."""
    return [_point(s, s.step_s, high=s.longest_step_s) for s in _step_spans(run, rank)]


def waits_of(run: Run, rank: int) -> list[Point]:
    """Return the seconds per step spent waiting for data."""
    return [
        _point(span, span.data_wait_s / span.num_steps)
        for span in _step_spans(run, rank)
        if span.data_wait_s is not None
    ]


def highest_columns(points: Sequence[Point], end_s: float, width: int) -> list[float | None]:
    """Return the maximum in each of `width` equal parts of the run; None without readings."""
    return [
        max((point.high for point, _ in inside if point.high is not None), default=None)
        for inside in _in_columns(points, end_s, width)
    ]


def mean_columns(points: Sequence[Point], end_s: float, width: int) -> list[float | None]:
    """Return the mean over each of `width` equal parts of the run; None without readings."""
    found: list[float | None] = []
    for inside in _in_columns(points, end_s, width):
        known = [(point.mean, weight) for point, weight in inside if point.mean is not None]
        total = sum(weight for _, weight in known)
        found.append(sum(mean * weight for mean, weight in known) / total if total else None)
    return found


def _in_columns(
    points: Sequence[Point], end_s: float, width: int
) -> list[list[tuple[Point, float]]]:
    """Return the points in each part of the run, each with its share of that part."""
    parts: list[list[tuple[Point, float]]] = [[] for _ in range(width)]
    for point in points if end_s > 0 else ():
        first, last = (min(at_s / end_s, 1.0) * width for at_s in (point.began_s, point.ended_s))
        for place in range(min(int(first), width - 1), max(math.ceil(last), int(first) + 1)):
            if place < width:
                share = min(last, place + 1) - max(first, place)
                parts[place].append((point, max(share, _INSTANT)))
    return parts


def _step_spans(run: Run, rank: int) -> list[StepSpan]:
    halts = halts_of(run.events, run.last_seen_s)
    own = (span for span in run.step_spans if span.rank == rank and span.num_steps > 0)
    worked = (piece for span in own for piece in pieces(shortened(span, halts), halts))
    return sorted(worked, key=lambda span: span.began_s)


def _point(
    span: GpuSpan | HostSpan | StepSpan,
    mean: float,
    low: float | None = None,
    high: float | None = None,
) -> Point:
    """Return a point; low and high are widened or filled in to include the mean."""
    low = mean if low is None else min(low, mean)
    high = mean if high is None else max(high, mean)
    return Point(span.began_s, span.ended_s, low, mean, high)


def _joined(points: Sequence[Point]) -> Point:
    """Merge a bucket into one point."""
    lasted_s = sum(point.ended_s - point.began_s for point in points)
    weights = [(point.ended_s - point.began_s) if lasted_s > 0 else 1.0 for point in points]
    total = sum((point.mean or 0.0) * weight for point, weight in zip(points, weights, strict=True))
    return Point(
        began_s=points[0].began_s,
        ended_s=points[-1].ended_s,
        low=min((point.low for point in points if point.low is not None), default=None),
        mean=total / sum(weights),
        high=max((point.high for point in points if point.high is not None), default=None),
    )


def _with_breaks(points: Sequence[Point]) -> Iterator[Point]:
    before: Point | None = None
    for point in points:
        if before and point.began_s - before.ended_s > _APART_S:
            yield Point(before.ended_s, point.began_s, None, None, None)
        yield point
        before = point


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
_WIDEST = 60  # cells of a sparkline
_MOST_GPUS = 8  # that get sparklines
_MOST_EVENTS = 12
_SOURCES = {None: "", "torch": "torch, exact", "accounting": "driver, exact", "polled": "polled"}


def print_report(report: Report, run: Run | None = None, *, to_stderr: bool = False) -> None:
    """Print the whole report; with the run, also draw memory and kernel-active time."""
    print_report_on(new_console(sys.stderr if to_stderr else None), report, run)


def print_report_on(console: Console, report: Report, run: Run | None) -> None:
    print_prose(console, title(report), "bold")
    print_prose(console, circumstances(report), "dim")
    console.print()
    for finding in report.findings:
        _print_finding(console, finding, report)
    console.print()
    _print_gpus(console, report.gpus)
    if run is not None and any(one.is_used for one in report.gpus):
        _print_sparklines(console, report, run)
    _print_rest(console, report)
    print_command(console, next_command(report))


_OF_MEMORY = ("out-of-memory", "maybe-out-of-memory", "recovered")


def next_command(report: Report) -> str:
    """Return what to do about a run: what makes it fit, again after a change, or look closer."""
    trained = script_in(report.command)
    if report.verdict.kind in _OF_MEMORY and trained is not None:
        return f"oomph plan {trained}  # what makes it fit?"
    if not report.has_ended:
        return f"oomph report {report.run}  # again, when more of it is recorded"
    if any(finding.advice for finding in report.findings):
        again = f"oomph watch -- {shlex.join(report.command)}"
        return f"{again} && oomph compare {report.run} last  # after a change"
    return f"oomph report {report.run} --html report.html  # with charts"


def script_in(command: Sequence[str]) -> str | None:
    """Return the script that a command runs and its arguments, as oomph takes them.

    >>> script_in(["python3", "-u", "train.py", "--epochs", "3"])
    'train.py -- --epochs 3'
    >>> script_in(["/usr/bin/python", "-m", "package.train"]), script_in(["make", "train"])
    ('-m package.train', None)
    """
    words = list(command)
    if not words or not Path(words.pop(0)).name.startswith("python"):
        return None
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words.pop(0)
    num = 2 if words[:1] == ["-m"] else 1
    if len(words) < num or (num == 1 and not words[0].endswith(".py")):
        return None
    given = ["--", *words[num:]] if words[num:] else []
    return shlex.join([*words[:num], *given])


def _print_finding(console: Console, finding: Finding, report: Report) -> None:
    style = _STYLES.get(finding.kind, "bold yellow")
    print_prose(console, f"{headline(finding, report)} [{finding.confidence}]", style)
    for line in finding.evidence:
        print_prose(console, line, indent=2)
    for line in finding.advice:
        print_prose(console, f"do: {line}", "cyan", indent=2)


def _print_gpus(console: Console, gpus: Sequence[GpuFigures]) -> None:
    if not gpus:
        return
    table = [
        Column("GPU", [str(one.index) for one in gpus]),
        Column("name", [short_name(printable(one.name or "?")) for one in gpus], 2, "<"),
        Column("peak memory", [peak(one) for one in gpus]),
        Column("by", [_SOURCES[one.memory.peak_source] for one in gpus], 6, "<"),
        Column("kernel-active", [busy(one) for one in gpus], keep=7),
        Column("stood still", [idle(one) for one in gpus], keep=4, align="<"),
        Column("power", [power(one) for one in gpus], keep=3),
        Column("held down", [_share(one.power.throttled_ratio) for one in gpus], keep=1),
        Column("shared", [_share(one.shared_ratio) for one in gpus], keep=5),
    ]
    print_table(console, table)
    for one in gpus[:1] if len(gpus) > 1 else gpus:
        label = f"GPU {one.index}: " if len(gpus) > 1 else ""
        print_prose(console, f"{label}kernel-active time: {busy_note(one)}", "dim")
        if note := peak_note(one):
            print_prose(console, f"{label}peak memory: {note}", "dim")


def _share(ratio: float | None) -> str:
    return format_ratio(ratio) if ratio else ""


# ---- drawings --------------------------------------------------------------------------------


def _print_sparklines(console: Console, report: Report, run: Run) -> None:
    """Draw memory (of the GPU's total) and kernel-active time (of all time) from start to end."""
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
    print_line(console, [(" " * (label_width + len("kernel-active ")) + axis, "dim")])


def _print_sparkline(
    console: Console, label: str, values: Sequence[float | None], most: float, style: str
) -> None:
    if not any(value is not None for value in values):
        return
    ratios = [None if value is None else value / most for value in values]
    drawn = sparkline(ratios, len(ratios), glyphs_for(console.encoding).levels)
    print_line(console, [(label, ""), (drawn, style)])


# ---- the rest --------------------------------------------------------------------------------


def _print_rest(console: Console, report: Report) -> None:
    for one in report.steps:
        rank = f"rank {one.rank}: " if len(report.steps) > 1 else ""
        print_prose(console, f"steps: {rank}{steps(one)}")
    if line := host(report.host_figures):
        print_prose(console, f"host: {line}")
    for mark in report.marks[:_MOST_EVENTS]:
        print_prose(console, f"{format_duration(mark.at_s)}: {mark.kind}: {mark.text}", "dim")
    left = report.num_marks - min(len(report.marks), _MOST_EVENTS)
    if left > 0:
        print_prose(console, f"and {left} more events", "dim")


# ---- the page of `oomph report --html` -----------------------------------------------------------

_TIME_DIGITS = 2  # of seconds: spans are at least a fifth of a second long
_MOST_DIGITS = 6  # significant: more than any screen has pixels


def write_report_page(report: Report, run: Run, path: Path | str) -> None:
    """Write the page, completely or not at all."""
    write_whole(path, report_page(report, run))


def report_page(report: Report, run: Run) -> str:
    """Return the page. Without JavaScript it shows the terminal's text."""
    words = io.StringIO()
    print_report_on(new_console(words), report, run)
    return filled_page("report", report_data(report, run), words=words.getvalue())


def report_data(report: Report, run: Run) -> dict[str, Any]:
    """Return the page's data: the record, its sentences, and series to draw."""
    from oomph import __version__

    return {
        "schema": SCHEMA,
        "version": __version__,
        "report": to_jsonable(report),
        "words": _words(report),
        "gpus": [_gpu(run, one) for one in report.gpus],
        "steps": [_steps(run, one.rank) for one in report.steps],
        "cpu": _drawable(cpu_of(run)),
    }


def _words(report: Report) -> dict[str, Any]:
    """Return the sentences that the terminal shows as well."""
    return {
        "title": title(report),
        "circumstances": circumstances(report),
        "whose": [whose(finding, report) for finding in report.findings],
        "steps": [steps(one) for one in report.steps],
        "host": host(report.host_figures),
    }


def _gpu(run: Run, one: GpuFigures) -> dict[str, Any]:
    spans = spans_of(run, one.gpu)
    return {
        "peak": peak(one),
        "peak_note": peak_note(one),
        "busy": busy(one),
        "busy_note": busy_note(one),
        "power": power(one),
        "idle": idle(one),
        "memory_series": _drawable(memory_of(spans)),
        "busy_series": _drawable(busy_of(spans)),
        "power_series": _drawable(power_of(spans)),
    }


def _steps(run: Run, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "step_series": _drawable(steps_of(run, rank)),
        "wait_series": _drawable(waits_of(run, rank)),
    }


def _drawable(points: Sequence[Point]) -> dict[str, list[float | None]]:
    """Return the points as columns: a page of eight GPUs stays below a megabyte."""
    kept = decimated(points)
    return {
        "times": [round(point.at_s, _TIME_DIGITS) for point in kept],
        "low": [_rounded(point.low) for point in kept],
        "mean": [_rounded(point.mean) for point in kept],
        "high": [_rounded(point.high) for point in kept],
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_MOST_DIGITS}g}")
