"""Run -> figures of each GPU, of the steps and of the host.

What could not be read stays None. A peak is exact if it comes from torch's allocator or the
driver's accounting; a polled peak is marked as polled.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Protocol, TypeVar

from oomph.records.report import (
    BusyFigures,
    Gap,
    GpuFigures,
    HostFigures,
    MemoryFigures,
    Phase,
    PowerFigures,
    Spread,
    StepFigures,
)
from oomph.records.run import (
    BusySource,
    Event,
    GpuSpan,
    Halt,
    HostSpan,
    Peak,
    Run,
    StepSpan,
    halted_s,
    halts_of,
    outside,
    shortened,
)
from oomph.records.run_spans import most, total
from oomph.units import MIB

# ---- means and quantiles, weighted by time -------------------------------------------------------

Weighted = Sequence[tuple[float, float]]  # (value, seconds)


def mean(weighted: Weighted) -> float | None:
    """
    >>> mean([(1.0, 3.0), (0.0, 1.0)])
    0.75
    """
    if not weighted:
        return None
    weighted = _with_weights(weighted)
    total_s = sum(seconds for _, seconds in weighted)
    values = [value for value, _ in weighted]
    found = sum(value * seconds for value, seconds in weighted) / total_s
    return min(max(found, min(values)), max(values))  # rounding must not leave the range


def spread(weighted: Weighted) -> Spread | None:
    """Return mean and quantiles; None if empty."""
    middle = mean(weighted)
    if middle is None:
        return None
    p10, p50, p90 = (quantile(weighted, share) for share in (0.1, 0.5, 0.9))
    return Spread(mean=middle, p10=p10, p50=p50, p90=p90)


def quantile(weighted: Weighted, share: float) -> float:
    """Return the value that was not exceeded for that share of the time."""
    by_value = sorted(_with_weights(weighted))
    wanted_s, passed_s = share * sum(seconds for _, seconds in by_value), 0.0
    for value, seconds in by_value:
        passed_s += seconds
        if passed_s >= wanted_s:
            return value
    return by_value[-1][0]


def _with_weights(weighted: Weighted) -> Weighted:
    """Return equal weights if nothing has a duration."""
    if any(seconds > 0 for _, seconds in weighted):
        return weighted
    return [(value, 1.0) for value, _ in weighted]


def mean_of(
    spans: Sequence[GpuSpan] | Sequence[HostSpan], read: Callable[..., float | None]
) -> float | None:
    """Return the mean of a figure of the spans, over the time for which it is known."""
    return mean(_with_durations(spans, read))


def _with_durations(
    spans: Sequence[GpuSpan] | Sequence[HostSpan], read: Callable[..., float | None]
) -> Weighted:
    """Return the values that could be read, each with its duration."""
    found = ((read(span), lasted(span)) for span in spans)
    return [(float(value), seconds) for value, seconds in found if value is not None]


# ---- the stretches listed in a report: a run of weeks has thousands ------------------------------

MOST_LISTED = 200


class Lasting(Protocol):
    @property
    def began_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...


Listed = TypeVar("Listed", bound=Lasting)


def longest(stretches: Sequence[Listed]) -> tuple[Listed, ...]:
    """Return the longest stretches, in order of time."""
    return longest_of_each(stretches, lambda _: "")


def longest_of_each(
    stretches: Sequence[Listed], name: Callable[[Listed], str]
) -> tuple[Listed, ...]:
    """Return the longest stretches of each name, so that one name does not crowd out the others."""
    places: dict[str, count[int]] = {}
    ranked = [
        (next(places.setdefault(name(one), count())), one)
        for one in sorted(stretches, key=lambda one: one.began_s - one.ended_s)
    ]
    kept = [one for _, one in sorted(ranked, key=lambda pair: pair[0])[:MOST_LISTED]]
    return tuple(sorted(kept, key=lambda one: one.began_s))


# ---- when a GPU worked, and when it was idle -----------------------------------------------------
# A gap is kernel-active time below 5 % for at least two seconds. In an old run, spans are longer
# than that and hide shorter gaps. These bounds are judgement.

IDLE_RATIO = 0.05
SHORTEST_GAP_S = 2.0
# Gaps at least this far apart are phases of the run (checkpoints, evaluation); closer ones are a
# regular part of training.
RARE_S = 30.0
_TOGETHER_S = 1.0  # between spans further apart than this, something is unknown
_SHORT_SPAN_S = 2.0  # in a longer span, a single pause says little about the whole


@dataclass(frozen=True, slots=True)
class Stretch:
    """The spans of one GPU with known busy ratio, and which of them are work."""

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
    """Divide the `spans` of one GPU, in order of time. From `until_s` on it hangs, so no work."""
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
    """Return the busy figures; None if the busy ratio could not be read."""
    whole = spread([(span.busy_ratio or 0.0, lasted(span)) for span in stretch.known])
    if whole is None:
        return None
    return BusyFigures(
        source=source,
        whole=whole,
        working=spread([(span.busy_ratio or 0.0, lasted(span)) for span in stretch.working]),
        known_s=sum(map(lasted, stretch.known)),
        # The driver's samples are fetched every second, so a span holds at least one per second.
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


def lasted(span: GpuSpan | HostSpan) -> float:
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
    """Name the gap by the phase in its middle; `phases` are in order of time."""
    middle_s = (gap.began_s + gap.ended_s) / 2
    place = bisect_right(phases, middle_s, key=lambda phase: phase.began_s) - 1
    is_inside = place >= 0 and middle_s <= phases[place].ended_s
    name = phases[place].name if is_inside else None
    return Gap(began_s=gap.began_s, ended_s=gap.ended_s, phase=name)


def _lies_in(span: GpuSpan, gaps: Sequence[Gap]) -> bool:
    """Return whether a span lies in a gap. Bisects: a run of weeks has thousands of gaps."""
    place = bisect_right(gaps, span.began_s, key=lambda gap: gap.began_s) - 1
    return place >= 0 and span.ended_s <= gaps[place].ended_s


def _pausing(working: Sequence[GpuSpan]) -> float | None:
    """Return the share, by time, of short working spans that have a moment without a kernel."""
    return mean_of(
        [span for span in working if lasted(span) <= _SHORT_SPAN_S],
        lambda span: None if span.least_busy_ratio is None else span.least_busy_ratio < IDLE_RATIO,
    )


_SWAPPING_BYTES_PER_S = 4 * MIB  # less can be normal: pages used again after a long time


def lasted_s(run: Run) -> float:
    """Return the duration until the command ended, or until it was last seen."""
    return max(run.ending.at_s if run.ending else run.last_seen_s, 0.0)


def worked_s(run: Run) -> float:
    """Return the duration without the time in which the command was halted."""
    return max(lasted_s(run) - halted_s(halts_in(run)), 0.0)


def halts_in(run: Run) -> tuple[Halt, ...]:
    return halts_of(run.events, lasted_s(run))


def is_phase(event: Event) -> bool:
    """Return whether a phase begins. The end of an epoch is a phase event that begins none."""
    return event.kind == "phase" and not event.text.endswith(" ended")


def phases_of(run: Run) -> tuple[Phase, ...]:
    """Return all phases; each lasts until the next one of the same rank."""
    ends_s: dict[int | None, float] = {}  # by rank, when the next phase begins
    found = []
    events = sorted(
        (event for event in run.events if is_phase(event)), key=lambda event: event.at_s
    )
    for event in reversed(events):
        ended_s = max(ends_s.get(event.rank, lasted_s(run)), event.at_s)
        ends_s[event.rank] = event.at_s
        found.append(Phase(name=event.text, began_s=event.at_s, ended_s=ended_s, rank=event.rank))
    return tuple(reversed(found))


def gpu_figures(run: Run, gpu: int, until_s: float = math.inf) -> GpuFigures:
    """Return all figures of the GPU at that position in `Run.gpus`; work ends at `until_s`."""
    watched = run.gpus[gpu]
    seen = sorted((s for s in run.gpu_spans if s.gpu == gpu), key=lambda span: span.began_s)
    spans = outside(seen, halts_in(run))
    rank = _rank(run.peaks, gpu)
    phases = _phases_for(phases_of(run), rank)
    stretch = stretch_of(spans, phases, worked_s(run), until_s)
    return GpuFigures(
        gpu=gpu,
        index=watched.index,
        cuda_index=watched.cuda_index,
        rank=rank,
        name=watched.name,
        is_used=watched.is_used,
        memory=_memory(run, gpu, seen),
        busy=busy_figures(stretch, watched.busy_source),
        power=_power(seen, stretch, watched.power_limit_w),
        shared_ratio=mean_of(
            spans, lambda span: None if span.num_others is None else span.num_others > 0
        ),
        most_others=most(span.num_others for span in seen),
        others_bytes=most(span.others_bytes for span in seen),
        sm_active_ratio=mean_of(stretch.working, lambda span: span.sm_active_ratio),
        memory_active_ratio=mean_of(stretch.working, lambda span: span.memory_active_ratio),
        received_bytes=total(span.received_bytes for span in spans),
        sent_bytes=total(span.sent_bytes for span in spans),
        link_ratio=_link_ratio(stretch.working, watched.link_bytes_per_s),
    )


def _phases_for(phases: Sequence[Phase], rank: int | None) -> list[Phase]:
    """Return the phases of the rank that trains on a GPU; if unknown, those of the first rank."""
    if rank is None:
        rank = min((phase.rank for phase in phases if phase.rank is not None), default=None)
    return [phase for phase in phases if phase.rank in (None, rank)]


def _link_ratio(spans: Sequence[GpuSpan], link_bytes_per_s: float | None) -> float | None:
    """Return the use of the busier direction. A counter can run slightly ahead of the link."""
    if not link_bytes_per_s:
        return None
    directions = (
        [(s.received_bytes, s) for s in spans if s.received_bytes is not None],
        [(s.sent_bytes, s) for s in spans if s.sent_bytes is not None],
    )
    ratios = []
    for direction in directions:
        took_s = sum(lasted(span) for _, span in direction)
        if took_s > 0:
            ratios.append(sum(number for number, _ in direction) / took_s / link_bytes_per_s)
    return min(max(ratios), 1.0) if ratios else None


def step_figures(run: Run) -> tuple[StepFigures, ...]:
    """Return the figures of each rank that recorded steps."""
    halts = halts_in(run)
    spans = [shortened(span, halts) for span in run.step_spans if span.num_steps > 0]
    ranks = sorted({span.rank for span in spans})
    return tuple(_steps(rank, [s for s in spans if s.rank == rank]) for rank in ranks)


def host_figures(run: Run) -> HostFigures:
    spans = outside(run.host_spans, halts_in(run))
    return HostFigures(
        num_cpus=run.num_cpus,
        cpu_cores=mean_of(spans, lambda span: span.cpu_cores),
        busiest_cpu_cores=mean_of(spans, lambda span: span.busiest_cpu_cores),
        memory_bytes=most(span.memory_bytes for span in spans),
        num_processes=most(span.num_processes for span in spans),
        others_cpu_cores=mean_of(spans, lambda span: span.others_cpu_cores),
        stolen_cpu_cores=mean_of(spans, lambda span: span.stolen_cpu_cores),
        throttled_ratio=mean_of(spans, lambda span: span.throttled_ratio),
        swapped_in_bytes=total(span.swapped_in_bytes for span in spans),
        swapping_ratio=mean_of(spans, _is_swapping),
    )


def _is_swapping(span: HostSpan) -> bool | None:
    if span.swapped_in_bytes is None:
        return None
    return span.swapped_in_bytes >= _SWAPPING_BYTES_PER_S * max(span.ended_s - span.began_s, 1.0)


# ---- memory ----------------------------------------------------------------------------------


def _memory(run: Run, gpu: int, spans: Sequence[GpuSpan]) -> MemoryFigures:
    peak, misses = _peak(run.peaks, gpu, spans, run.gpus[gpu].looks_apart_s)
    return MemoryFigures(
        total_bytes=run.gpus[gpu].total_bytes,
        peak_bytes=peak.used_bytes if peak else None,
        peak_source=peak.source if peak else None,
        peak_misses=misses,
        allocated_bytes=peak.allocated_bytes if peak else None,
        before_steps_bytes=peak.before_steps_bytes if peak else None,
        seen_bytes=most(span.most_used_bytes for span in spans),
    )


def _peak(
    peaks: Sequence[Peak], gpu: int, spans: Sequence[GpuSpan], looks_apart_s: float
) -> tuple[Peak | None, str | None]:
    """Return the best known peak, and what it may miss."""
    for source in ("torch", "accounting"):
        exact = [peak for peak in peaks if peak.gpu == gpu and peak.source == source]
        if exact:
            others = len({(peak.pid, peak.rank) for peak in exact}) - 1
            misses = f"it is of one process; {others} more used this GPU" if others else None
            return max(exact, key=lambda peak: peak.used_bytes), misses
    polled = [peak for peak in peaks if peak.gpu == gpu and peak.source == "polled"]
    seen = max(polled, key=lambda peak: peak.used_bytes, default=None) or _seen(gpu, spans)
    if seen is None:
        return None, None
    return seen, f"a peak shorter than {looks_apart_s * 1000:.0f} ms can have been missed"


def _seen(gpu: int, spans: Sequence[GpuSpan]) -> Peak | None:
    """Return the run's highest polled memory; the GPU's, if the run was alone on it."""
    is_alone = not any(span.num_others for span in spans)
    used = most((s.most_used_bytes if is_alone else s.run_bytes) for s in spans)
    return None if used is None else Peak(source="polled", gpu=gpu, used_bytes=used)


def _rank(peaks: Sequence[Peak], gpu: int) -> int | None:
    ranks = {peak.rank for peak in peaks if peak.gpu == gpu and peak.rank is not None}
    return ranks.pop() if len(ranks) == 1 else None


# ---- the rest --------------------------------------------------------------------------------


def _power(spans: Sequence[GpuSpan], stretch: Stretch, limit_w: float | None) -> PowerFigures:
    drawn = _with_durations(spans, lambda span: span.power_w)
    return PowerFigures(
        mean_w=mean(drawn),
        working_w=mean_of(stretch.working, lambda span: span.power_w),
        most_w=max((power_w for power_w, _ in drawn), default=None),
        limit_w=limit_w,
        energy_j=sum(power_w * seconds for power_w, seconds in drawn) if drawn else None,
        most_c=most(span.temperature_c for span in spans),
        throttled_ratio=mean_of(spans, lambda span: span.throttled_ratio),
        throttled_by=tuple(sorted({why for span in spans for why in span.throttled_by})),
    )


def _steps(rank: int, spans: Sequence[StepSpan]) -> StepFigures:
    num_steps = sum(span.num_steps for span in spans)
    took_s = sum(span.num_steps * span.step_s for span in spans)
    samples = [span.num_samples for span in spans if span.num_samples is not None]
    return StepFigures(
        rank=rank,
        num_steps=num_steps,
        step_s=took_s / num_steps,
        longest_step_s=max(span.longest_step_s for span in spans),
        samples_per_s=_rate(sum(samples), took_s) if len(samples) == len(spans) else None,
        data_wait_ratio=wait_ratio(spans),
    )


def wait_ratio(spans: Sequence[StepSpan]) -> float | None:
    """Return the share of their time that steps waited for data; None if it was not measured."""
    known = [(s.data_wait_s, s.num_steps * s.step_s) for s in spans if s.data_wait_s is not None]
    took_s = sum(seconds for _, seconds in known)
    return min(sum(waited_s for waited_s, _ in known) / took_s, 1.0) if took_s > 0 else None


def _rate(number: int, took_s: float) -> float | None:
    """Return the rate; None if nothing was timed, or too little for a finite number."""
    rate = number / took_s if took_s > 0 else math.inf
    return rate if math.isfinite(rate) else None
