"""Trace -> live bytes over the steps: the peak, its moment, and who holds it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from oomph.records.prediction import Moment
from oomph.records.trace import Allocation, Category, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment of the most live bytes."""

    live_bytes: int
    at_event: int
    holders: tuple[Allocation, ...]


def find_peak(trace: Trace) -> Peak:
    """The first event at which the live tensors are at their most."""
    sizes = [allocation.size_bytes for allocation in trace.allocations]
    live_bytes = most_bytes = 0
    at_event = 0
    for index, event in enumerate(trace.events):
        if event > 0:
            live_bytes += sizes[event - 1]
            if live_bytes > most_bytes:
                most_bytes, at_event = live_bytes, index
        else:
            live_bytes -= sizes[-event - 1]
    return Peak(
        live_bytes=most_bytes,
        at_event=at_event,
        holders=tuple(trace.allocations[number] for number in live_at(trace.events, at_event)),
    )


def live_at(events: Sequence[int], at_event: int) -> list[int]:
    """The allocations that are alive after an event, oldest first."""
    live: dict[int, None] = {}
    for event in events[: at_event + 1]:
        if event > 0:
            live[event - 1] = None
        else:
            live.pop(-event - 1, None)
    return list(live)


def moment_of(trace: Trace, at_event: int) -> Moment:
    """The step, the phase, the op and the module of an event."""
    allocation = trace.allocations[abs(trace.events[at_event]) - 1]
    starts = [start for start, _ in trace.phase_starts]
    place = bisect_right(starts, at_event) - 1
    return Moment(
        step=max(1, bisect_right(trace.step_starts, at_event)),
        phase=trace.phase_starts[place][1] if place >= 0 else "build",
        op=allocation.op,
        module=allocation.module,
    )


def by_category(holders: Sequence[Allocation]) -> dict[Category, int]:
    """What each category holds, the largest first."""
    sums: dict[Category, int] = {}
    for holder in holders:
        sums[holder.category] = sums.get(holder.category, 0) + holder.size_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def by_module(holders: Sequence[Allocation], most: int = 20) -> dict[str, int]:
    """What the activations and temporaries of each module hold, the largest first."""
    sums: dict[str, int] = {}
    for holder in holders:
        if holder.category in ("activations", "temporaries"):
            sums[holder.module] = sums.get(holder.module, 0) + holder.size_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:most])
