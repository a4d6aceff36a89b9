"""Events -> when the command was halted, as by Ctrl-Z; what was seen then is no idleness of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from oomph.records.run import Event, GpuSpan, HostSpan, StepSpan

Halt = tuple[float, float]  # when it began and ended
Span = TypeVar("Span", GpuSpan, HostSpan)


def halts_of(events: Sequence[Event], end_s: float) -> tuple[Halt, ...]:
    """By time; one that nobody saw end lasts to the end of the run.

    >>> at = lambda at_s, kind: Event(at_s=at_s, kind=kind, text="")
    >>> halts_of([at(3, "halted"), at(5, "resumed"), at(8, "halted")], 9.0)
    ((3, 5), (8, 9.0))
    """
    found, began_s = list[Halt](), None
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "halted" and began_s is None:
            began_s = event.at_s
        elif event.kind == "resumed" and began_s is not None:
            found.append((began_s, event.at_s))
            began_s = None
    if began_s is not None and began_s < end_s:
        found.append((began_s, end_s))
    return tuple(found)


def outside(spans: Sequence[Span], halts: Sequence[Halt]) -> list[Span]:
    """The spans that do not lie in halts for most of their time."""
    return [span for span in spans if not _lies_in(span, halts)]


def shortened(span: StepSpan, halts: Sequence[Halt]) -> StepSpan:
    """Without the halts that lay in one of its steps: the script's own clock ran on.

    One that is longer than the longest step lay between steps, as in an evaluation.
    """
    halted_s = _common_s(span, halts)
    if not halted_s or span.longest_step_s < halted_s or span.num_steps < 1:
        return span
    step_s = max(span.step_s - halted_s / span.num_steps, 0.0)
    return replace(span, step_s=step_s, longest_step_s=max(span.longest_step_s - halted_s, step_s))


def _lies_in(span: GpuSpan | HostSpan, halts: Sequence[Halt]) -> bool:
    return _common_s(span, halts) > (span.ended_s - span.began_s) / 2


def _common_s(span: GpuSpan | HostSpan | StepSpan, halts: Sequence[Halt]) -> float:
    """For how much of the span it was halted."""
    common = (min(span.ended_s, end) - max(span.began_s, began) for began, end in halts)
    return sum(max(seconds, 0.0) for seconds in common)
