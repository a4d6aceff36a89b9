"""Trace -> live bytes over the steps: the peak, its moment, its holders, and a drawing."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from oomph.records.plan import Timeline
from oomph.records.prediction import Moment
from oomph.records.trace import Allocation, Category, Trace

# From bottom to top of the drawing: what stays through the step lies below what comes and goes, so
# that both are easy to follow.
_LAYERS: tuple[Category, ...] = (
    "parameters",
    "optimizer",
    "workspace",
    "inputs",
    "gradients",
    "activations",
    "temporaries",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The moment with the most live bytes."""

    live_bytes: int
    at_event: int
    holders: tuple[Allocation, ...]


def find_peak(trace: Trace) -> Peak:
    """Return the first event at which live bytes are highest."""
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
    """Return the allocations that are alive after an event, oldest first."""
    live: dict[int, None] = {}
    for event in events[: at_event + 1]:
        if event > 0:
            live[event - 1] = None
        else:
            live.pop(-event - 1, None)
    return list(live)


def moment_of(trace: Trace, at_event: int) -> Moment:
    """Return the step, phase, op and module of an event."""
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
    """Return the bytes of each category, largest first."""
    sums: dict[Category, int] = {}
    for holder in holders:
        sums[holder.category] = sums.get(holder.category, 0) + holder.size_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def by_module(holders: Sequence[Allocation], most: int = 20) -> dict[str, int]:
    """Return the bytes of each module's activations and temporaries, largest first."""
    sums: dict[str, int] = {}
    for holder in holders:
        if holder.category in ("activations", "temporaries"):
            sums[holder.module] = sums.get(holder.module, 0) + holder.size_bytes
    return dict(sorted(sums.items(), key=lambda item: -item[1])[:most])


def timeline_of(trace: Trace, most_points: int = 600) -> Timeline:
    """Return the last step of a trace, thinned out for drawing; highest and lowest points stay.

    A position is the number of events before it, scaled to 0..1: order, not time. The first point
    is the state at the start of the step. `most_points` is at least 4.
    """
    start = trace.step_starts[-1] if trace.step_starts else 0
    chosen = _thinned(_live_totals(trace, start), most_points)
    num_events = max(len(trace.events) - start, 1)
    layers, ops = _layers_at(trace, [start + place for place in chosen])
    shown = [category for category in _LAYERS if any(layers[category])]
    return Timeline(
        positions=tuple(place / num_events for place in chosen),
        categories=tuple(shown),
        live_bytes=tuple(tuple(layers[category]) for category in shown),
        phases=tuple(
            ((begin - start) / num_events, phase)
            for begin, phase in trace.phase_starts
            if begin >= start
        ),
        ops=tuple(ops),
    )


def _live_totals(trace: Trace, start: int) -> list[int]:
    """Return the live bytes before the step's first event and after each of its events."""
    sizes = [allocation.size_bytes for allocation in trace.allocations]
    changes = (sizes[event - 1] if event > 0 else -sizes[-event - 1] for event in trace.events)
    return list(accumulate(changes, initial=0))[start:]


def _thinned(totals: Sequence[int], most_points: int) -> list[int]:
    """Return the places to keep: both ends, and the extremes of each of many stretches."""
    if len(totals) <= most_points:
        return list(range(len(totals)))
    num_stretches = max((most_points - 2) // 2, 1)
    edges = [len(totals) * i // num_stretches for i in range(num_stretches + 1)]
    kept = {0, len(totals) - 1}
    for begin, end in pairwise(edges):
        stretch = range(begin, end)
        kept |= {max(stretch, key=totals.__getitem__), min(stretch, key=totals.__getitem__)}
    return sorted(kept)


def _layers_at(trace: Trace, places: Sequence[int]) -> tuple[dict[Category, list[int]], list[str]]:
    """Return each category's bytes before the events at these places, and the op before each."""
    live: dict[Category, int] = dict.fromkeys(_LAYERS, 0)
    layers: dict[Category, list[int]] = {category: [] for category in _LAYERS}
    ops: list[str] = []
    last: Allocation | None = None
    done = 0
    for place in places:
        for event in trace.events[done:place]:
            allocation = trace.allocations[abs(event) - 1]
            live[allocation.category] += (1 if event > 0 else -1) * allocation.size_bytes
            if event > 0:
                last = allocation
        done = place
        for category in _LAYERS:
            layers[category].append(live[category])
        ops.append(_place_of(last) if last else "")
    return layers, ops


def _place_of(allocation: Allocation) -> str:
    return f"{allocation.op} in {allocation.module}" if allocation.module else allocation.op
