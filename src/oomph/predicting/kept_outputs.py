"""Trace -> the same where the loop keeps what the model returned until the next call has returned.

`outputs = model(batch)` in a loop holds the outputs of the last step through the whole of the next
forward, because the name is bound anew only when there is something new to bind it to. A loop that
passes them on without a name drops them at once. The rehearsal does as the workload's `loss` does;
this is the other way.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace

from oomph.records.trace import Allocation, Trace


def with_outputs_kept(trace: Trace) -> Trace:
    """The trace with the frees of outputs moved to where the next ones have been made."""
    waits_for = _last_births_of_next(trace)
    made: set[int] = set()
    waiting: dict[int, list[int]] = {}  # frees, by the event that they wait for
    events: list[int] = []
    places: list[int] = []  # of each old event among the new ones
    for event in trace.events:
        places.append(len(events))
        awaited = waits_for.get(-event)
        if awaited is not None and awaited not in made:
            waiting.setdefault(awaited, []).append(event)
            continue
        events.append(event)
        made.add(event)
        events += waiting.pop(event, ())
    places.append(len(events))  # what is left is never freed: after the last step nothing comes
    return replace(
        trace,
        events=events,
        step_starts=[places[start] for start in trace.step_starts],
        phase_starts=[(places[start], phase) for start, phase in trace.phase_starts],
        convolutions=tuple(
            replace(each, at_event=places[each.at_event]) for each in trace.convolutions
        ),
    )


def _last_births_of_next(trace: Trace) -> dict[int, int]:
    """Of each output, the request of the last output of the next forward: a name's new value.

    0, which is no request, where there is no next one.
    """
    forwards = [start for start, phase in trace.phase_starts if phase == "forward"]
    by_forward: dict[int, list[int]] = {}
    for place, event in enumerate(trace.events):
        if event > 0 and _is_made_in_forward(trace.allocations[event - 1]):
            by_forward.setdefault(bisect_right(forwards, place), []).append(event)
    groups = [by_forward[forward] for forward in sorted(by_forward)]
    nexts = [*(group[-1] for group in groups[1:]), 0]
    return {event: last for group, last in zip(groups, nexts, strict=False) for event in group}


def _is_made_in_forward(allocation: Allocation) -> bool:
    """A model may also return what it was given, or a parameter."""
    return allocation.is_output and allocation.phase == "forward"
