"""What each rank of a training kept by itself -> one Run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from oomph.records.run import Event, GpuSpan, Run, StepSpan

Span = TypeVar("Span", GpuSpan, StepSpan)


def join_ranks(first: Run, others: Sequence[Run]) -> Run:
    """The run of the first rank, with the GPUs, steps, peaks and events of the others in it."""
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
    """Of GPUs that the run does not know yet: two that look at one would count it twice."""
    found = []
    for span in other.gpu_spans:
        place = places.get(span.gpu)
        if place is not None and place >= len(run.gpus):
            found.append(_moved(replace(span, gpu=place), later_s))
    return found


def _new_events(
    run: Run, other: Run, places: dict[int | None, int | None], later_s: float
) -> list[Event]:
    """What every rank would say of the machine is said once."""
    said = {event.text for event in run.events if event.kind == "warning"}
    return [
        replace(event, gpu=places.get(event.gpu), at_s=max(event.at_s + later_s, 0.0))
        for event in other.events
        if event.kind != "warning" or event.text not in said
    ]


def _moved(span: Span, later_s: float) -> Span:
    return replace(
        span,
        began_s=max(span.began_s + later_s, 0.0),
        ended_s=max(span.ended_s + later_s, 0.0),
    )
