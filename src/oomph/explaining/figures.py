"""Run -> figures: of each GPU, of the steps, of the host.

What nobody could read stays None. A peak is exact where torch's allocator or the driver's
accounting tells it; what polling saw is said to be that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from oomph.explaining.gaps import Stretch, busy_figures, stretch_of
from oomph.explaining.weighing import Weighed, mean
from oomph.records.halts import Halt, halted_s, halts_of, outside, shortened
from oomph.records.report import (
    GpuFigures,
    HostFigures,
    MemoryFigures,
    Phase,
    PowerFigures,
    StepFigures,
)
from oomph.records.run import Event, GpuSpan, HostSpan, Peak, Run, StepSpan
from oomph.units import MIB

_SWAPPING_BYTES_PER_S = 4 * MIB  # less comes back when something is used again at last


def lasted_s(run: Run) -> float:
    """Until the command ended, or as long as something was seen of it."""
    return max(run.ending.at_s if run.ending else run.last_seen_s, 0.0)


def worked_s(run: Run) -> float:
    """Without the time in which the command was halted."""
    return max(lasted_s(run) - halted_s(halts_in(run)), 0.0)


def halts_in(run: Run) -> tuple[Halt, ...]:
    return halts_of(run.events, lasted_s(run))


def is_phase(event: Event) -> bool:
    """The end of an epoch is told as a phase, too, but nothing lasts from there on."""
    return event.kind == "phase" and not event.text.endswith(" ended")


def phases_of(run: Run) -> tuple[Phase, ...]:
    """Each lasts until the next one of the same rank."""
    ends_s: dict[int | None, float] = {}  # by rank, when the next phase begins
    found = []
    told = sorted((event for event in run.events if is_phase(event)), key=lambda event: event.at_s)
    for event in reversed(told):
        ended_s = max(ends_s.get(event.rank, lasted_s(run)), event.at_s)
        ends_s[event.rank] = event.at_s
        found.append(Phase(name=event.text, began_s=event.at_s, ended_s=ended_s, rank=event.rank))
    return tuple(reversed(found))


def gpu_figures(run: Run, gpu: int, until_s: float = math.inf) -> GpuFigures:
    """All of the GPU at that place in `Run.gpus`; it worked until then at most."""
    watched = run.gpus[gpu]
    seen = sorted((s for s in run.gpu_spans if s.gpu == gpu), key=lambda span: span.began_s)
    spans = outside(seen, halts_in(run))
    rank = _rank(run.peaks, gpu)
    phases = _phases_for(phases_of(run), rank)
    stretch = stretch_of(spans, phases, worked_s(run), until_s)
    shared = _weighed(spans, lambda span: None if span.num_others is None else span.num_others > 0)
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
        shared_ratio=mean(shared),
        most_others=_most(span.num_others for span in seen),
        others_bytes=_most(span.others_bytes for span in seen),
        sm_active_ratio=_while_working(stretch, lambda span: span.sm_active_ratio),
        memory_active_ratio=_while_working(stretch, lambda span: span.memory_active_ratio),
        received_bytes=_sum(span.received_bytes for span in spans),
        sent_bytes=_sum(span.sent_bytes for span in spans),
        link_ratio=_link_ratio(stretch.working, watched.link_bytes_per_s),
    )


def _phases_for(phases: Sequence[Phase], rank: int | None) -> list[Phase]:
    """Those of the rank that trains on a GPU; where nobody tells which, of the first."""
    if rank is None:
        rank = min((phase.rank for phase in phases if phase.rank is not None), default=None)
    return [phase for phase in phases if phase.rank in (None, rank)]


def _link_ratio(spans: Sequence[GpuSpan], link_bytes_per_s: float | None) -> float | None:
    """Of the busier direction. A counter can run a little ahead of the link."""
    if not link_bytes_per_s:
        return None
    ways = (
        [(s.received_bytes, s) for s in spans if s.received_bytes is not None],
        [(s.sent_bytes, s) for s in spans if s.sent_bytes is not None],
    )
    ratios = []
    for way in ways:
        took_s = sum(max(span.ended_s - span.began_s, 0.0) for _, span in way)
        if took_s > 0:
            ratios.append(sum(number for number, _ in way) / took_s / link_bytes_per_s)
    return min(max(ratios), 1.0) if ratios else None


def step_figures(run: Run) -> tuple[StepFigures, ...]:
    """Of each rank that told its steps."""
    halts = halts_in(run)
    spans = [shortened(span, halts) for span in run.step_spans if span.num_steps > 0]
    ranks = sorted({span.rank for span in spans})
    return tuple(_steps(rank, [s for s in spans if s.rank == rank]) for rank in ranks)


def host_figures(run: Run) -> HostFigures:
    spans = outside(run.host_spans, halts_in(run))
    return HostFigures(
        num_cpus=run.num_cpus,
        cpu_cores=mean(_weighed(spans, lambda span: span.cpu_cores)),
        busiest_cpu_cores=mean(_weighed(spans, lambda span: span.busiest_cpu_cores)),
        memory_bytes=_most(span.memory_bytes for span in spans),
        num_processes=_most(span.num_processes for span in spans),
        others_cpu_cores=mean(_weighed(spans, lambda span: span.others_cpu_cores)),
        stolen_cpu_cores=mean(_weighed(spans, lambda span: span.stolen_cpu_cores)),
        throttled_ratio=mean(_weighed(spans, lambda span: span.throttled_ratio)),
        swapped_in_bytes=_sum(span.swapped_in_bytes for span in spans),
        swapping_ratio=mean(_weighed(spans, _is_swapping)),
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
        seen_bytes=_most(span.most_used_bytes for span in spans),
    )


def _peak(
    peaks: Sequence[Peak], gpu: int, spans: Sequence[GpuSpan], looks_apart_s: float
) -> tuple[Peak | None, str | None]:
    """The best that is known, and what it cannot know."""
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
    """The most that this run was seen to hold; of a GPU without others, the most of the GPU."""
    is_alone = not any(span.num_others for span in spans)
    used = _most((s.most_used_bytes if is_alone else s.run_bytes) for s in spans)
    return None if used is None else Peak(source="polled", gpu=gpu, used_bytes=used)


def _rank(peaks: Sequence[Peak], gpu: int) -> int | None:
    ranks = {peak.rank for peak in peaks if peak.gpu == gpu and peak.rank is not None}
    return ranks.pop() if len(ranks) == 1 else None


# ---- the rest --------------------------------------------------------------------------------


def _power(spans: Sequence[GpuSpan], stretch: Stretch, limit_w: float | None) -> PowerFigures:
    drawn = _weighed(spans, lambda span: span.power_w)
    return PowerFigures(
        mean_w=mean(drawn),
        working_w=_while_working(stretch, lambda span: span.power_w),
        most_w=max((power_w for power_w, _ in drawn), default=None),
        limit_w=limit_w,
        energy_j=sum(power_w * seconds for power_w, seconds in drawn) if drawn else None,
        most_c=_most(span.temperature_c for span in spans),
        throttled_ratio=mean(_weighed(spans, lambda span: span.throttled_ratio)),
        throttled_by=tuple(sorted({why for span in spans for why in span.throttled_by})),
    )


def _steps(rank: int, spans: Sequence[StepSpan]) -> StepFigures:
    num_steps = sum(span.num_steps for span in spans)
    took_s = sum(span.num_steps * span.step_s for span in spans)
    known = [span for span in spans if span.data_wait_s is not None]
    known_s = sum(span.num_steps * span.step_s for span in known)
    waited_s = sum(span.data_wait_s or 0.0 for span in known)
    samples = None if any(s.num_samples is None for s in spans) else _sum_samples(spans)
    return StepFigures(
        rank=rank,
        num_steps=num_steps,
        step_s=took_s / num_steps,
        longest_step_s=max(span.longest_step_s for span in spans),
        samples_per_s=None if samples is None else _rate(samples, took_s),
        data_wait_ratio=min(waited_s / known_s, 1.0) if known_s > 0 else None,
    )


def _rate(number: int, took_s: float) -> float | None:
    """None where nothing was timed, or so little that the rate is no number."""
    rate = number / took_s if took_s > 0 else math.inf
    return rate if math.isfinite(rate) else None


def _sum_samples(spans: Sequence[StepSpan]) -> int:
    return sum(span.num_samples or 0 for span in spans)


def _while_working(stretch: Stretch, read: Callable[[GpuSpan], float | None]) -> float | None:
    return mean(_weighed(stretch.working, read))


def _weighed(
    spans: Sequence[GpuSpan] | Sequence[HostSpan], read: Callable[..., float | None]
) -> Weighed:
    """What could be read, with how long it was so."""
    found = ((read(span), max(span.ended_s - span.began_s, 0.0)) for span in spans)
    return [(float(value), seconds) for value, seconds in found if value is not None]


def _most(values: Iterable[int | None]) -> int | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
