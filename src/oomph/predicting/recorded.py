"""A recorded trace of torch's allocator -> its settings, its blocks and its requests.

Takes what `torch.cuda.memory._snapshot()` returns, already loaded: lists and dicts, of one device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from oomph.errors import UsageError
from oomph.predicting.allocator import BlockState, HeldSegment, PlacedBlock
from oomph.predicting.allocator_settings import AllocatorSettings, parse_settings
from oomph.predicting.replay import EMPTY_CACHE

Record = Mapping[str, Any]  # a segment, a block or an event, as torch writes it

# By how much each event changes what is reserved, in its sizes.
RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_STATES: dict[str, BlockState] = {
    "active_allocated": "live",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",  # so the documentation of torch 2.13
    "inactive": "free",
}


def recorded_settings(written: Record | None, segments: Iterable[Record]) -> AllocatorSettings:
    """The settings of a recording; before torch 2.3 they were not written down."""
    if written is None:
        is_expandable = any(segment.get("is_expandable") for segment in segments)
        return AllocatorSettings(expandable_segments=is_expandable)
    try:
        settings = parse_settings(written.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    except UsageError:  # a key of another torch; most of what matters is written apart, too
        settings = AllocatorSettings()
    max_split_bytes = written.get("max_split_size", -1)
    divisions = tuple((written.get("roundup_power2_divisions") or {}).values())
    return replace(
        settings,
        expandable_segments=bool(written.get("expandable_segments")),
        max_split_bytes=max_split_bytes if max_split_bytes >= 0 else None,
        gc_threshold_ratio=written.get("garbage_collection_threshold", 0.0),
        roundup_power2_divisions=divisions or 0,
    )


def blocks_of(segment: Record) -> Iterator[PlacedBlock]:
    """The blocks of a segment, by address; before torch 2.1 theirs were not written down."""
    address = segment["address"]
    for block in segment["blocks"]:
        state = _STATES[block["state"]]
        # A free block still has what was last requested of it.
        requested = 0 if state == "free" else block.get("requested_size", block["size"])
        yield PlacedBlock(address, block["size"], requested, state)
        address += block["size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The events of one call in which the allocator gave back what was free: from .. up to ..

    Before it does, it waits until all pending frees have completed.
    """

    begin: int
    end: int
    is_retry: bool  # CUDA had no room for a request; otherwise it was torch.cuda.empty_cache()


def releases(trace: Sequence[Record]) -> Iterator[Release]:
    """Where segments went back, and why.

    If it was for a request, then that follows at once, from the same place in the program. Where
    the places are not recorded (torch 2.1), it must at least be more than was ever reserved.
    """
    changes = [RESERVES.get(event["action"], 0) * event.get("size", 0) for event in trace]
    reserved = list(accumulate(changes, initial=0))  # before each event, from 0 at the first
    most = max(reserved)
    end = 0
    for at, event in enumerate(trace):
        if at < end or changes[at] >= 0:
            continue
        frames, begin, end = event.get("frames"), at, at
        while begin > 0 and _is_part(trace[begin - 1], frames):
            begin -= 1
        while end < len(trace) and _is_part(trace[end], frames):
            end += 1
        # A call whose beginning is lost may have completed frees; what it came to is the same.
        is_whole = begin > 0 and end < len(trace)
        is_retry = is_whole and _is_refused(trace[end], frames, most - reserved[at])
        yield Release(begin=begin, end=end, is_retry=is_retry)


def _is_part(event: Record, frames: object) -> bool:
    is_release = RESERVES.get(event["action"]) == -1
    return (is_release or event["action"] == "free_completed") and event.get("frames") == frames


def _is_refused(request: Record, frames: object, room_bytes: int) -> bool:
    """Did CUDA first have no room for this, so that the cache was given back?"""
    action = request["action"]
    if frames:  # what completed may suffice, so that nothing new is mapped
        is_request = action in ("alloc", "oom") or RESERVES.get(action) == 1
        return is_request and bool(request.get("frames") == frames)
    return action == "oom" or (RESERVES.get(action) == 1 and bool(request["size"] > room_bytes))


def synchronized_at(trace: Sequence[Record]) -> set[int]:
    """The frees that completed because the allocator waited for them.

    Some may have completed just before, which makes no difference: if they had sufficed for the
    request, it would not have been refused.
    """
    calls = [range(release.begin, release.end) for release in releases(trace)]
    for at, event in enumerate(trace):
        if event["action"] == "oom":
            begin = at
            while begin > 0 and _is_part(trace[begin - 1], event.get("frames")):
                begin -= 1
            calls.append(range(begin, at))
    return {at for call in calls for at in call if trace[at]["action"] == "free_completed"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What a program asked for, apart from where it was put: what `replay` takes."""

    sizes: tuple[int, ...]
    events: tuple[int, ...]
    streams: tuple[int, ...]


def recorded_requests(before: Iterable[HeldSegment], trace: Sequence[Record]) -> Requests:
    """The requests of a trace, after those for what was live before it, in order of address.

    A block counts as freed when it can be used again.
    """
    asked = [
        (block.address, block.requested_bytes, held.stream)
        for held in before
        for block in held.live
    ]
    events: list[int] = []
    numbers = {address: number for number, (address, _, _) in enumerate(asked, 1)}
    events += numbers.values()
    emptied = {release.begin for release in releases(trace) if not release.is_retry}
    for at, event in enumerate(trace):
        if at in emptied:
            events.append(EMPTY_CACHE)
        elif event["action"] == "alloc":
            asked.append((event["addr"], event["size"], event["stream"]))
            numbers[event["addr"]] = len(asked)
            events.append(len(asked))
        elif event["action"] == "free_completed" and event["addr"] in numbers:
            events.append(-numbers.pop(event["addr"]))
    return Requests(
        sizes=tuple(size for _, size, _ in asked),
        events=tuple(events),
        streams=tuple(stream for _, _, stream in asked),
    )
