"""A list of requests and frees -> the peaks, when they occur, and where memory ran out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from oomph.predicting.allocator import CachingAllocator, OutOfMemory
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.quick_replay import replay_quickly
from oomph.predicting.segments import UNLIMITED_BYTES, SimulatedDevice
from oomph.records.trace import Trace

_NOWHERE = -1  # the address of a skipped request
EMPTY_CACHE = 0  # the event for torch.cuda.empty_cache()


class Requests(NamedTuple):
    """A program's requests to the allocator: the arguments of `replay`."""

    sizes: Sequence[int]
    events: Sequence[int]
    streams: Sequence[int] | None = None  # None: all on one stream
    dispensable: Container[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """The outcome of a sequence of requests and frees: the allocator's counters after it."""

    peak_allocated_bytes: int
    peak_reserved_bytes: int
    num_retries: int
    ran_out_at: int | None = None  # the event, from 0, at which memory ran out; None: it passed


def replay(
    allocator: CachingAllocator,
    sizes: Sequence[int],
    events: Iterable[int],
    streams: Sequence[int] | None = None,
    dispensable: Container[int] = (),
) -> Replayed:
    """Send requests and frees to an allocator, up to the first one that does not fit.

    Event i+1 requests sizes[i] bytes (on streams[i], or all on one stream), -(i+1) frees them, and
    EMPTY_CACHE empties the cache. A request in `dispensable` (i+1) is skipped if there is no room.
    """
    addresses = [_NOWHERE] * len(sizes)
    ran_out_at = None
    for at, event in enumerate(events):
        if event == EMPTY_CACHE:
            allocator.empty_cache()
        elif event < 0:
            address = addresses[-event - 1]
            if address != _NOWHERE or -event not in dispensable:
                allocator.free(address)
        else:
            stream = streams[event - 1] if streams else 0
            try:
                addresses[event - 1] = allocator.malloc(sizes[event - 1], stream)
            except OutOfMemory:
                if event not in dispensable:
                    ran_out_at = at
                    break
    return Replayed(
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        num_retries=allocator.num_retries,
        ran_out_at=ran_out_at,
    )


def replay_requests(
    requests: Requests, settings: AllocatorSettings, limit_bytes: int | None
) -> Replayed:
    """Replay on a device of `limit_bytes`; None: without a limit."""
    room_bytes = UNLIMITED_BYTES if limit_bytes is None else max(limit_bytes, 0)
    if settings == AllocatorSettings(expandable_segments=settings.expandable_segments):
        is_expandable = settings.expandable_segments
        quick = replay_quickly(*requests, room_bytes, is_expandable=is_expandable)
        if quick is not None:
            allocated_bytes, reserved_bytes, num_retries, ran_out_at = quick
            return Replayed(
                peak_allocated_bytes=allocated_bytes,
                peak_reserved_bytes=reserved_bytes,
                num_retries=num_retries,
                ran_out_at=ran_out_at,
            )
    return replay(CachingAllocator(settings, SimulatedDevice(room_bytes)), *requests)


# ---- outputs that the loop keeps
# `outputs = model(batch)` in a loop holds the last step's outputs through the whole next forward,
# because the name is rebound only when the new outputs exist. A loop that passes them on without a
# name drops them at once. The rehearsal follows the workload's `loss`; `with_outputs_kept` derives
# the other trace from it.


def with_outputs_kept(trace: Trace) -> Trace:
    """Return the trace with each free of outputs moved to after the next outputs are made."""
    outputs = [
        number
        for number, allocation in enumerate(trace.allocations, 1)
        # a model may also return its input or a parameter
        if allocation.is_output and allocation.phase == "forward"
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
        emptied_at=[moves.place(place) for place in trace.emptied_at],
    )


@dataclass(frozen=True, slots=True)
class Moves:
    """Frees that are moved, as places in the original events, in order."""

    removed: Sequence[int]
    # The request that each waits for; without one it is never freed.
    awaited: Sequence[int | None]

    @classmethod
    def of(cls, events: Sequence[int], outputs: Iterable[int], forwards: Sequence[int]) -> Moves:
        """Find the moves from the outputs' requests and the starts of forwards."""
        places = {event: place for place, event in enumerate(events)}
        births = sorted(places[event] for event in outputs if event in places)
        groups = [list(g) for _, g in groupby(births, lambda at: bisect_right(forwards, at))]
        # The name is rebound when the last of the next outputs exists.
        lasts = [*(group[-1] for group in groups[1:]), None]
        found: list[tuple[int, int | None]] = []
        for group, last in zip(groups, lasts, strict=False):
            frees = [places[-events[birth]] for birth in group if -events[birth] in places]
            found += [(free, last) for free in frees if last is None or free < last]
        found.sort(key=lambda move: move[0])
        return cls([free for free, _ in found], [last for _, last in found])

    def moved(self, events: Sequence[int]) -> list[int]:
        """Return the events in their new order."""
        waiting: dict[int, list[int]] = {}
        for free, last in zip(self.removed, self.awaited, strict=True):
            if last is not None:
                waiting.setdefault(last, []).append(events[free])
        moved: list[int] = []
        done = 0
        for place in sorted((*self.removed, *waiting)):
            moved += events[done:place]
            if place in waiting:  # otherwise this free was moved away
                moved += (events[place], *waiting[place])
            done = place + 1
        moved += events[done:]
        return moved

    def place(self, before: int) -> int:
        """Return the new place of an event."""
        inserted = sorted(last for last in self.awaited if last is not None)
        return before - bisect_left(self.removed, before) + bisect_left(inserted, before)
