"""Spans -> series to draw: few enough points, and nothing that stood out is lost.

Each point has the lowest, the mean and the highest of its bucket of time. Where nothing was seen
for a while stands a point without values, so that no line is drawn across.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from oomph.records.halts import halts_of, pieces, shortened
from oomph.records.run import GpuSpan, HostSpan, Run, StepSpan

MOST_POINTS = 2000
_INSTANT = 1e-9  # what lasts no time still counts where nothing else does
_APART_S = 1.5  # spans further apart than this have something unseen between them


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
    """At most `most` points, by buckets of equal time; `points` are by time."""
    if not points:
        return []
    most_buckets = max(most // 2, 1)  # each may have a break behind it
    if len(points) <= most_buckets:
        return list(_with_breaks(points))
    first_s, last_s = points[0].at_s, points[-1].at_s
    width_s = (last_s - first_s) / most_buckets or 1.0
    buckets = groupby(points, lambda p: min(int((p.at_s - first_s) / width_s), most_buckets - 1))
    return list(_with_breaks([_joined(list(inside)) for _, inside in buckets]))


def spans_of(run: Run, gpu: int) -> list[GpuSpan]:
    """Those of one GPU, by time."""
    return sorted((s for s in run.gpu_spans if s.gpu == gpu), key=lambda span: span.began_s)


def memory_of(spans: Sequence[GpuSpan]) -> list[Point]:
    """Bytes in use on a GPU, by everybody."""
    return [
        _point(span, span.used_bytes, span.used_bytes, span.most_used_bytes)
        for span in spans
        if span.used_bytes is not None
    ]


def busy_of(spans: Sequence[GpuSpan]) -> list[Point]:
    """Kernel-active time of a GPU."""
    return [
        _point(span, span.least_busy_ratio, span.busy_ratio, span.most_busy_ratio)
        for span in spans
        if span.busy_ratio is not None
    ]


def power_of(spans: Sequence[GpuSpan]) -> list[Point]:
    """Watts of a GPU."""
    known = (span for span in spans if span.power_w is not None)
    return [_point(span, span.power_w, span.power_w, span.power_w) for span in known]


def cpu_of(run: Run) -> list[Point]:
    """Cores that the run's processes keep busy."""
    spans = sorted((s for s in run.host_spans if s.cpu_cores is not None), key=lambda s: s.began_s)
    return [_point(span, span.cpu_cores, span.cpu_cores, span.cpu_cores) for span in spans]


def steps_of(run: Run, rank: int) -> list[Point]:
    """Seconds of a step, without those in which it was halted."""
    return [_point(s, s.step_s, s.step_s, s.longest_step_s) for s in _steps(run, rank)]


def waits_of(run: Run, rank: int) -> list[Point]:
    """Seconds of a step that went by waiting for data."""
    known = (span for span in _steps(run, rank) if span.data_wait_s is not None)
    waits = ((span, (span.data_wait_s or 0.0) / span.num_steps) for span in known)
    return [_point(span, wait, wait, wait) for span, wait in waits]


def highest_columns(points: Sequence[Point], end_s: float, width: int) -> list[float | None]:
    """The highest in each of `width` equal parts of the run; None where nothing was seen."""
    return [
        max((point.high for point, _ in inside if point.high is not None), default=None)
        for inside in _in_columns(points, end_s, width)
    ]


def mean_columns(points: Sequence[Point], end_s: float, width: int) -> list[float | None]:
    """The mean over each of `width` equal parts of the run; None where nothing was seen."""
    found: list[float | None] = []
    for inside in _in_columns(points, end_s, width):
        known = [(point.mean, weight) for point, weight in inside if point.mean is not None]
        total = sum(weight for _, weight in known)
        found.append(sum(mean * weight for mean, weight in known) / total if total else None)
    return found


def _in_columns(
    points: Sequence[Point], end_s: float, width: int
) -> list[list[tuple[Point, float]]]:
    """For each part of the run the points in it, and how much of each: of it or of the part."""
    parts: list[list[tuple[Point, float]]] = [[] for _ in range(width)]
    for point in points if end_s > 0 else ():
        first, last = (min(at_s / end_s, 1.0) * width for at_s in (point.began_s, point.ended_s))
        for place in range(min(int(first), width - 1), max(math.ceil(last), int(first) + 1)):
            if place < width:
                share = min(last, place + 1) - max(first, place)
                parts[place].append((point, max(share, _INSTANT)))
    return parts


def _steps(run: Run, rank: int) -> list[StepSpan]:
    halts = halts_of(run.events, run.last_seen_s)
    own = (span for span in run.step_spans if span.rank == rank and span.num_steps > 0)
    worked = (piece for span in own for piece in pieces(shortened(span, halts), halts))
    return sorted(worked, key=lambda span: span.began_s)


def _point(
    span: GpuSpan | HostSpan | StepSpan | Point,
    low: float | None,
    mean: float | None,
    high: float | None,
) -> Point:
    """With ends that hold the mean between them, also where one of them is not known."""
    if mean is not None:
        low = mean if low is None or low > mean else low
        high = mean if high is None or high < mean else high
    return Point(began_s=span.began_s, ended_s=span.ended_s, low=low, mean=mean, high=high)


def _joined(points: Sequence[Point]) -> Point:
    """One point for all of a bucket."""
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
            yield Point(
                began_s=before.ended_s, ended_s=point.began_s, low=None, mean=None, high=None
            )
        yield point
        before = point
