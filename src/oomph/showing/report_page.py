"""Report and Run -> one HTML file that needs no network: findings first, then charts over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from oomph.records.report import GpuFigures, Report
from oomph.records.run import Run
from oomph.records.stored import SCHEMA, to_jsonable
from oomph.showing import report_words as words
from oomph.showing.html_page import write_page
from oomph.showing.series import (
    Point,
    busy_of,
    cpu_of,
    decimated,
    memory_of,
    power_of,
    spans_of,
    steps_of,
    waits_of,
)

_TIME_DIGITS = 2  # of seconds: spans are not shorter than a fifth of one
_MOST_DIGITS = 6  # significant: more than any screen has pixels


def write_report_page(report: Report, run: Run, path: Path | str) -> None:
    """Write the page, whole or not at all."""
    write_page("report", report_data(report, run), path, words="\n".join(_in_words(report)))


def report_data(report: Report, run: Run) -> dict[str, Any]:
    """What the page is given: the record, its sentences, and series to draw."""
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
    """The sentences that the terminal has as well."""
    return {
        "title": words.title(report),
        "circumstances": words.circumstances(report),
        "whose": [words.whose(finding, report) for finding in report.findings],
        "steps": [words.steps(one) for one in report.steps],
        "host": words.host(report.host_figures),
    }


def _gpu(run: Run, one: GpuFigures) -> dict[str, Any]:
    spans = spans_of(run, one.gpu)
    return {
        "peak": words.peak(one),
        "peak_note": words.peak_note(one),
        "busy": words.busy(one),
        "busy_note": words.busy_note(one),
        "power": words.power(one),
        "idle": words.idle(one),
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
    """Columns: a page of eight GPUs stays below a megabyte."""
    kept = decimated(points)
    return {
        "times": [round(point.at_s, _TIME_DIGITS) for point in kept],
        "low": [_short(point.low) for point in kept],
        "mean": [_short(point.mean) for point in kept],
        "high": [_short(point.high) for point in kept],
    }


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_MOST_DIGITS}g}")


def _in_words(report: Report) -> list[str]:
    """The whole without JavaScript."""
    lines = [words.title(report), words.circumstances(report), ""]
    for finding in report.findings:
        lines.append(f"{words.headline(finding, report)} [{finding.confidence}]")
        lines += [f"  {line}" for line in finding.evidence]
        lines += [f"  do: {line}" for line in finding.advice]
    lines.append("")
    for one in report.gpus:
        lines.append(f"GPU {one.index} {one.name or ''}: peak memory {words.peak(one)}")
        lines.append(f"  kernel-active time: {words.busy_note(one)}")
        lines.append(f"  stood still: {words.idle(one)}; power: {words.power(one)}")
    lines += [f"rank {one.rank}: {words.steps(one)}" for one in report.steps]
    return [*lines, f"host: {words.host(report.host_figures)}"]
