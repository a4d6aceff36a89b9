"""Spans of a GPU -> when it stood still, and when it worked.

A gap is kernel-active time below 5 % for at least two seconds. Where spans are longer than that,
because the run is old, shorter gaps are hidden in them.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from oomph.explaining.listing import longest
from oomph.explaining.weighing import mean, spread
from oomph.records.report import BusyFigures, Gap, Phase
from oomph.records.run import BusySource, GpuSpan

IDLE_RATIO = 0.05
SHORTEST_GAP_S = 2.0
# Gaps that are at least so far apart are phases of the run (checkpoints, evaluation); closer
# ones belong to the way it trains.
RARE_S = 30.0
_TOGETHER_S = 1.0  # spans further apart than this have something unknown between them
_SHORT_SPAN_S = 2.0  # in a longer one, one pause says little about its whole time


@dataclass(frozen=True, slots=True)
class Stretch:
    """The spans of one GPU in which it is known how busy it was, and which of them are work."""

    known: tuple[GpuSpan, ...]
    working: tuple[GpuSpan, ...]
    gaps: tuple[Gap, ...]
    gaps_are_rare: bool
    start_up_s: float


def stretch_of(
    spans: Sequence[GpuSpan],
    phases: Sequence[Phase],
    lasted_s: float,
    until_s: float = math.inf,
) -> Stretch:
    """`spans` are those of one GPU, by time. From `until_s` on it hangs, which is no work."""
    known = tuple(span for span in spans if span.busy_ratio is not None)
    busy = [n for n, span in enumerate(known) if not is_idle(span) and span.began_s < until_s]
    if not busy:
        return Stretch(known, (), (), True, lasted_s)
    first, last = busy[0], busy[-1]
    gaps = tuple(_named(gap, phases) for gap in _gaps(known[first:]))
    between = known[first : last + 1]
    rare = are_rare(gaps, known[last].ended_s - known[first].began_s)
    working = tuple(span for span in between if not (rare and _lies_in(span, gaps)))
    return Stretch(known, working, gaps, rare, known[first].began_s)


def busy_figures(stretch: Stretch, source: BusySource | None) -> BusyFigures | None:
    """None: nobody could read how busy the GPU was."""
    whole = spread([(span.busy_ratio or 0.0, lasted(span)) for span in stretch.known])
    if whole is None:
        return None
    return BusyFigures(
        source=source,
        whole=whole,
        working=spread([(span.busy_ratio or 0.0, lasted(span)) for span in stretch.working]),
        known_s=sum(map(lasted, stretch.known)),
        # The driver is asked for its samples each second: a span holds at least one for each.
        num_samples=sum(max(1, int(lasted(span))) for span in stretch.known),
        pausing_ratio=_pausing(stretch.working),
        start_up_s=stretch.start_up_s,
        gaps=longest(stretch.gaps),
        num_gaps=len(stretch.gaps),
        gaps_s=sum(gap.lasted_s for gap in stretch.gaps),
        gaps_are_rare=stretch.gaps_are_rare,
        coarsest_s=max(map(lasted, stretch.known)),
    )


def are_rare(gaps: Sequence[Gap], over_s: float) -> bool:
    """
    >>> often = [Gap(began_s=t, ended_s=t + 3, phase=None) for t in range(0, 100, 10)]
    >>> are_rare(often, 100), are_rare(often, 600)
    (False, True)
    """
    return len(gaps) < 3 or over_s / len(gaps) >= RARE_S


def is_idle(span: GpuSpan) -> bool:
    return span.busy_ratio is not None and span.busy_ratio < IDLE_RATIO


def lasted(span: GpuSpan) -> float:
    return max(span.ended_s - span.began_s, 0.0)


def _gaps(known: Sequence[GpuSpan]) -> list[Gap]:
    stretches: list[list[GpuSpan]] = [[]]
    for span in known:
        before = stretches[-1]
        is_apart = before and span.began_s - before[-1].ended_s > _TOGETHER_S
        if before and (is_apart or not is_idle(span)):
            stretches.append([])
        if is_idle(span):
            stretches[-1].append(span)
    found = [Gap(began_s=s[0].began_s, ended_s=s[-1].ended_s, phase=None) for s in stretches if s]
    return [gap for gap in found if gap.lasted_s >= SHORTEST_GAP_S]


def _named(gap: Gap, phases: Sequence[Phase]) -> Gap:
    """With the phase that its middle lies in; `phases` are by time."""
    middle_s = (gap.began_s + gap.ended_s) / 2
    place = bisect_right(phases, middle_s, key=lambda phase: phase.began_s) - 1
    is_inside = place >= 0 and middle_s <= phases[place].ended_s
    name = phases[place].name if is_inside else None
    return Gap(began_s=gap.began_s, ended_s=gap.ended_s, phase=name)


def _lies_in(span: GpuSpan, gaps: Sequence[Gap]) -> bool:
    """In one of the gaps, which are by time: a run of weeks has thousands."""
    place = bisect_right(gaps, span.began_s, key=lambda gap: gap.began_s) - 1
    return place >= 0 and span.ended_s <= gaps[place].ended_s


def _pausing(working: Sequence[GpuSpan]) -> float | None:
    """Share of the time in short spans that hold a moment without a kernel, and work as well."""
    weighed = [
        (float(span.least_busy_ratio < IDLE_RATIO), lasted(span))
        for span in working
        if span.least_busy_ratio is not None and lasted(span) <= _SHORT_SPAN_S
    ]
    return mean(weighed)
