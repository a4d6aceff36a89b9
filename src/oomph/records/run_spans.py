"""Spans that follow each other -> one longer span: how a run of weeks stays small.

Means are weighted by time and leave out what nobody could read; extremes stay extremes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from oomph.records.run import GpuSpan, HostSpan, StepSpan

Span = TypeVar("Span", GpuSpan, HostSpan, StepSpan)


def merge_gpu_spans(spans: Sequence[GpuSpan]) -> GpuSpan:
    """Spans of one GPU, in order, as one."""

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
    """Spans of the run's process tree, in order, as one."""
    return HostSpan(
        began_s=spans[0].began_s,
        ended_s=spans[-1].ended_s,
        cpu_cores=_mean(spans, lambda span: span.cpu_cores),
        # Another process may be the busiest in each: their mean is what one thread can hold up.
        busiest_cpu_cores=_mean(spans, lambda span: span.busiest_cpu_cores),
        memory_bytes=most(span.memory_bytes for span in spans),
        num_processes=most(span.num_processes for span in spans),
        others_cpu_cores=_mean(spans, lambda span: span.others_cpu_cores),
        stolen_cpu_cores=_mean(spans, lambda span: span.stolen_cpu_cores),
        throttled_ratio=_mean(spans, lambda span: span.throttled_ratio),
        swapped_in_bytes=total(span.swapped_in_bytes for span in spans),
    )


def merge_step_spans(spans: Sequence[StepSpan]) -> StepSpan:
    """What one rank told of its steps, in order, as one."""
    num_steps = sum(span.num_steps for span in spans)
    num_samples = [span.num_samples for span in spans if span.num_samples is not None]
    waits_s = [span.data_wait_s for span in spans if span.data_wait_s is not None]
    return StepSpan(
        rank=spans[-1].rank,
        began_s=spans[0].began_s,
        ended_s=spans[-1].ended_s,
        num_steps=num_steps,
        # A sum of which a part is unknown would be too small.
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
            # An instant counts a little: a span of no length must not divide by zero.
            duration_s = max(span.ended_s - span.began_s, 1e-9)
            weight_s += duration_s
            weighted += figure * duration_s
    return weighted / weight_s if weight_s else None


Figure = TypeVar("Figure", int, float)


def most(figures: Iterable[Figure | None]) -> Figure | None:
    """The largest of those that are known."""
    return max((figure for figure in figures if figure is not None), default=None)


def least(figures: Iterable[Figure | None]) -> Figure | None:
    """The smallest of those that are known."""
    return min((figure for figure in figures if figure is not None), default=None)


def total(figures: Iterable[int | None]) -> int | None:
    """The sum of those that are known; None if none is."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None
