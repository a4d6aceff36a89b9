"""Events -> when the command was halted, as by Ctrl-Z: that time is neither its work nor idle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from oomph.records.run import Event, GpuSpan, HostSpan, StepSpan

Span = TypeVar("Span", GpuSpan, HostSpan)


@dataclass(frozen=True, slots=True)
class Halt:
    """The command stood still, and went on."""

    began_s: float
    ended_s: float


def halts_of(events: Sequence[Event], end_s: float) -> tuple[Halt, ...]:
    """By time; one that nobody saw end lasts to the end of the run.

    >>> at = lambda at_s, kind: Event(at_s=at_s, kind=kind, text="")
    >>> halts_of([at(3, "halted"), at(5, "resumed"), at(8, "halted")], 9.0)
    (Halt(began_s=3, ended_s=5), Halt(began_s=8, ended_s=9.0))
    """
    found, began_s = list[Halt](), None
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "halted" and began_s is None:
            began_s = event.at_s
        elif event.kind == "resumed" and began_s is not None:
            found.append(Halt(began_s, event.at_s))
            began_s = None
    if began_s is not None and began_s < end_s:
        found.append(Halt(began_s, end_s))
    return tuple(found)


def halted_s(halts: Sequence[Halt]) -> float:
    return sum(halt.ended_s - halt.began_s for halt in halts)


def outside(spans: Sequence[Span], halts: Sequence[Halt]) -> list[Span]:
    """The spans that do not lie in halts for most of their time."""
    return [span for span in spans if not _lies_in(span, halts)]


def shortened(span: StepSpan, halts: Sequence[Halt]) -> StepSpan:
    """Without the halts that lay in one of its steps: the script's own clock ran on.

    One that is longer than the longest step lay between steps, as in an evaluation.
    """
    stood_s = _common_s(span, halts)
    if not stood_s or span.longest_step_s < stood_s or span.num_steps < 1:
        return span
    step_s = max(span.step_s - stood_s / span.num_steps, 0.0)
    wait_s = span.data_wait_s
    if wait_s is not None and wait_s > step_s * span.num_steps:  # it was halted as it waited
        wait_s = max(wait_s - stood_s, 0.0)
    longest_s = max(span.longest_step_s - stood_s, step_s)
    return replace(span, step_s=step_s, longest_step_s=longest_s, data_wait_s=wait_s)


def pieces(span: StepSpan, halts: Sequence[Halt]) -> list[StepSpan]:
    """The span before, between and after the halts in it, with the same figures each."""
    inside = [one for one in halts if span.began_s < one.ended_s and one.began_s < span.ended_s]
    starts = [span.began_s, *(max(one.ended_s, span.began_s) for one in inside)]
    ends = [*(min(one.began_s, span.ended_s) for one in inside), span.ended_s]
    cut = [
        replace(span, began_s=began_s, ended_s=ended_s)
        for began_s, ended_s in zip(starts, ends, strict=True)
        if began_s < ended_s
    ]
    return cut or [span]


def _lies_in(span: GpuSpan | HostSpan, halts: Sequence[Halt]) -> bool:
    return _common_s(span, halts) > (span.ended_s - span.began_s) / 2


def _common_s(span: GpuSpan | HostSpan | StepSpan, halts: Sequence[Halt]) -> float:
    """For how much of the span it was halted."""
    common = (min(span.ended_s, one.ended_s) - max(span.began_s, one.began_s) for one in halts)
    return sum(max(seconds, 0.0) for seconds in common)
