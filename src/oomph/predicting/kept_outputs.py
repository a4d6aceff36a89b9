"""Trace -> the same where the loop keeps what the model returned until the next call has returned.

`outputs = model(batch)` in a loop holds the outputs of the last step through the whole of the next
forward, because the name is bound anew only when there is something new to bind it to. A loop that
passes them on without a name drops them at once. The rehearsal does as the workload's `loss` does;
this is the other way.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from oomph.records.trace import Allocation, Trace


def with_outputs_kept(trace: Trace) -> Trace:
    """The trace with the frees of outputs moved to where the next ones have been made."""
    outputs = [
        number
        for number, allocation in enumerate(trace.allocations, 1)
        if _is_made_in_forward(allocation)
    ]
    forwards = [start for start, phase in trace.phase_starts if phase == "forward"]
    moves = Moves.of(trace.events, outputs, forwards)
    return replace(
        trace,
        events=moves.moved(trace.events),
        step_starts=[moves.place(start) for start in trace.step_starts],
        phase_starts=[(moves.place(start), phase) for start, phase in trace.phase_starts],
        convolutions=tuple(
            replace(each, at_event=moves.place(each.at_event)) for each in trace.convolutions
        ),
    )


def _is_made_in_forward(allocation: Allocation) -> bool:
    """A model may also return what it was given, or a parameter."""
    return allocation.is_output and allocation.phase == "forward"


@dataclass(frozen=True, slots=True)
class Moves:
    """Which frees are moved: places among the events as they were, in their order."""

    removed: Sequence[int]
    # The requests that they wait for, of each; what waits for nothing that comes is never freed.
    awaited: Sequence[int | None]

    @classmethod
    def of(cls, events: Sequence[int], outputs: Iterable[int], forwards: Sequence[int]) -> Moves:
        """For the outputs as they are requested among the events, and where forwards begin."""
        places = {event: place for place, event in enumerate(events)}
        births = sorted(places[event] for event in outputs if event in places)
        groups = [list(g) for _, g in groupby(births, lambda at: bisect_right(forwards, at))]
        # A name has its new value when the last of the next outputs is there.
        lasts = [*(group[-1] for group in groups[1:]), None]
        found: list[tuple[int, int | None]] = []
        for group, last in zip(groups, lasts, strict=False):
            frees = [places[-events[birth]] for birth in group if -events[birth] in places]
            found += [(free, last) for free in frees if last is None or free < last]
        found.sort(key=lambda move: move[0])
        return cls([free for free, _ in found], [last for _, last in found])

    def moved(self, events: Sequence[int]) -> list[int]:
        """The events in their new order."""
        waiting: dict[int, list[int]] = {}
        for free, last in zip(self.removed, self.awaited, strict=True):
            if last is not None:
                waiting.setdefault(last, []).append(events[free])
        moved: list[int] = []
        done = 0
        for place in sorted((*self.removed, *waiting)):
            moved += events[done:place]
            if place in waiting:  # else it is the place of a free that went away
                moved += (events[place], *waiting[place])
            done = place + 1
        moved += events[done:]
        return moved

    def place(self, before: int) -> int:
        """Where a place among the events has gone."""
        inserted = sorted(last for last in self.awaited if last is not None)
        return before - bisect_left(self.removed, before) + bisect_left(inserted, before)
