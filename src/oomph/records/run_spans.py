"""Consecutive spans -> one longer span, so that a run of weeks stays small.

Means are weighted by time and skip unknown values; extremes stay extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from oomph.records.run import Event, GpuSpan, HostSpan, Run, StepSpan

Span = TypeVar("Span", GpuSpan, HostSpan, StepSpan)


def merge_gpu_spans(spans: Sequence[GpuSpan]) -> GpuSpan:
    """Merge consecutive spans of one GPU."""

    def mean(value: Callable[[GpuSpan], float | None]) -> float | None:
        return _mean(spans, value)

    last = spans[-1]
    used_bytes = mean(lambda span: span.used_bytes)
    return GpuSpan(
        gpu=last.gpu,
        began_s=spans[0].began_s,
        ended_s=last.ended_s,
        used_bytes=None if used_bytes is None else round(used_bytes),
        most_used_bytes=most(span.most_used_bytes for span in spans),
        run_bytes=last.run_bytes,
        others_bytes=last.others_bytes,
        num_others=most(span.num_others for span in spans),
        busy_ratio=mean(lambda span: span.busy_ratio),
        least_busy_ratio=least(span.least_busy_ratio for span in spans),
        most_busy_ratio=most(span.most_busy_ratio for span in spans),
        power_w=mean(lambda span: span.power_w),
        temperature_c=most(span.temperature_c for span in spans),
        throttled_ratio=mean(lambda span: span.throttled_ratio),
        throttled_by=tuple(sorted({cause for span in spans for cause in span.throttled_by})),
        sm_active_ratio=mean(lambda span: span.sm_active_ratio),
        memory_active_ratio=mean(lambda span: span.memory_active_ratio),
        received_bytes=total(span.received_bytes for span in spans),
        sent_bytes=total(span.sent_bytes for span in spans),
    )


def merge_host_spans(spans: Sequence[HostSpan]) -> HostSpan:
    """Merge consecutive spans of the run's process tree."""
    return HostSpan(
        began_s=spans[0].began_s,
        ended_s=spans[-1].ended_s,
        cpu_cores=_mean(spans, lambda span: span.cpu_cores),
        # The busiest process may differ per span; the mean still shows a thread that limits the
        # run.
        busiest_cpu_cores=_mean(spans, lambda span: span.busiest_cpu_cores),
        memory_bytes=most(span.memory_bytes for span in spans),
        num_processes=most(span.num_processes for span in spans),
        others_cpu_cores=_mean(spans, lambda span: span.others_cpu_cores),
        stolen_cpu_cores=_mean(spans, lambda span: span.stolen_cpu_cores),
        throttled_ratio=_mean(spans, lambda span: span.throttled_ratio),
        swapped_in_bytes=total(span.swapped_in_bytes for span in spans),
    )


def merge_step_spans(spans: Sequence[StepSpan]) -> StepSpan:
    """Merge the steps that one rank reported, in order."""
    num_steps = sum(span.num_steps for span in spans)
    num_samples = [span.num_samples for span in spans if span.num_samples is not None]
    waits_s = [span.data_wait_s for span in spans if span.data_wait_s is not None]
    return StepSpan(
        rank=spans[-1].rank,
        began_s=spans[0].began_s,
        ended_s=spans[-1].ended_s,
        num_steps=num_steps,
        # A sum with an unknown part would be too small.
        num_samples=sum(num_samples) if len(num_samples) == len(spans) else None,
        step_s=sum(span.step_s * span.num_steps for span in spans) / max(num_steps, 1),
        longest_step_s=max(span.longest_step_s for span in spans),
        data_wait_s=sum(waits_s) if len(waits_s) == len(spans) else None,
    )


def _mean(spans: Sequence[Span], value: Callable[[Span], float | None]) -> float | None:
    weight_s = weighted = 0.0
    for span in spans:
        figure = value(span)
        if figure is not None:
            # A span without length gets a small weight, to avoid a division by zero.
            duration_s = max(span.ended_s - span.began_s, 1e-9)
            weight_s += duration_s
            weighted += figure * duration_s
    return weighted / weight_s if weight_s else None


Figure = TypeVar("Figure", int, float)


def most(figures: Iterable[Figure | None]) -> Figure | None:
    """Return the largest known figure."""
    return max((figure for figure in figures if figure is not None), default=None)


def least(figures: Iterable[Figure | None]) -> Figure | None:
    """Return the smallest known figure."""
    return min((figure for figure in figures if figure is not None), default=None)


def total(figures: Iterable[int | None]) -> int | None:
    """Return the sum of the known figures; None if none is known."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


# ---- the runs recorded by each rank -> one Run ---------------------------------------------------

RankSpan = TypeVar("RankSpan", GpuSpan, StepSpan)


def join_ranks(first: Run, others: Sequence[Run]) -> Run:
    """Return the first rank's run with the GPUs, steps, peaks and events of the others."""
    run = first
    for other in others:
        run = _join(run, other)
    return replace(
        run,
        gpu_spans=tuple(sorted(run.gpu_spans, key=lambda span: span.began_s)),
        step_spans=tuple(sorted(run.step_spans, key=lambda span: span.began_s)),
        events=tuple(sorted(run.events, key=lambda event: event.at_s)),
    )


def _join(run: Run, other: Run) -> Run:
    later_s = other.started_at - run.started_at
    known = {gpu.uuid or gpu: place for place, gpu in enumerate(run.gpus)}
    gpus, places = list(run.gpus), dict[int | None, int | None]({None: None})
    for place, gpu in enumerate(other.gpus):
        places[place] = known.get(gpu.uuid or gpu, len(gpus))
        if places[place] == len(gpus):
            gpus.append(gpu)
    return replace(
        run,
        gpus=tuple(gpus),
        gpu_spans=(*run.gpu_spans, *_new_spans(run, other, places, later_s)),
        step_spans=(*run.step_spans, *(_moved(span, later_s) for span in other.step_spans)),
        peaks=(*run.peaks, *(replace(peak, gpu=places.get(peak.gpu)) for peak in other.peaks)),
        events=(*run.events, *_new_events(run, other, places, later_s)),
        last_seen_s=max(run.last_seen_s, other.last_seen_s + later_s),
    )


def _new_spans(
    run: Run, other: Run, places: dict[int | None, int | None], later_s: float
) -> list[GpuSpan]:
    """Return the spans of GPUs that the run lacks, so that none is counted twice."""
    found = []
    for span in other.gpu_spans:
        place = places.get(span.gpu)
        if place is not None and place >= len(run.gpus):
            found.append(_moved(replace(span, gpu=place), later_s))
    return found


def _new_events(
    run: Run, other: Run, places: dict[int | None, int | None], later_s: float
) -> list[Event]:
    """Return the new events; warnings that every rank repeats are included once."""
    warnings = {event.text for event in run.events if event.kind == "warning"}
    return [
        replace(event, gpu=places.get(event.gpu), at_s=max(event.at_s + later_s, 0.0))
        for event in other.events
        if event.kind != "warning" or event.text not in warnings
    ]


def _moved(span: RankSpan, later_s: float) -> RankSpan:
    return replace(
        span,
        began_s=max(span.began_s + later_s, 0.0),
        ended_s=max(span.ended_s + later_s, 0.0),
    )
