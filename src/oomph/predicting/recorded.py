"""A recorded trace of torch's allocator -> its settings, its blocks and its requests.

The input is the loaded result of `torch.cuda.memory._snapshot()`: lists and dicts of one device.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

from oomph.errors import UsageError
from oomph.predicting.allocator import BlockState, HeldSegment, PlacedBlock
from oomph.predicting.allocator_settings import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    parse_settings,
    round_size,
)
from oomph.predicting.replay import EMPTY_CACHE, Requests
from oomph.predicting.segments import PAGE_BYTES, Reservation

Record = Mapping[str, Any]  # a segment, a block or an event, as torch writes it

# The sign with which each event's size changes the reserved bytes.
RESERVES = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
_STATES: dict[str, BlockState] = {
    "active_allocated": "live",
    "active_pending_free": "pending",
    "active_awaiting_free": "pending",  # as in the documentation of torch 2.13
    "inactive": "free",
}


def recorded_settings(written: Record | None, segments: Iterable[Record]) -> AllocatorSettings:
    """Return the settings of a recording; torch before 2.3 did not record them."""
    if written is None:
        is_expandable = any(segment.get("is_expandable") for segment in segments)
        return AllocatorSettings(expandable_segments=is_expandable)
    try:
        settings = parse_settings(written.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    except UsageError:  # a key of another torch; most settings are also recorded separately
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
    """Yield a segment's blocks by address; torch before 2.1 did not record block addresses."""
    address = segment["address"]
    for block in segment["blocks"]:
        state = _STATES[block["state"]]
        # A free block still has its last requested size.
        requested = 0 if state == "free" else block.get("requested_size", block["size"])
        yield PlacedBlock(address, block["size"], requested, state)
        address += block["size"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One call in which the allocator released free memory: its events from `begin` to `end`.

    Before it releases, the allocator waits until all pending frees have completed.
    """

    begin: int
    end: int
    is_retry: bool  # CUDA had no room for a request; if False, torch.cuda.empty_cache()


def releases(trace: Sequence[Record]) -> Iterator[Release]:
    """Yield where segments were released, and why.

    A release for a request is followed at once by that request, from the same place in the program.
    If places are not recorded (torch 2.1), the request must at least exceed what was ever reserved.
    """
    changes = [RESERVES.get(event["action"], 0) * event.get("size", 0) for event in trace]
    reserved = list(accumulate(changes, initial=0))  # before each event; 0 at the first
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
        # A call whose start was lost may have completed frees; the outcome is the same.
        is_whole = begin > 0 and end < len(trace)
        is_retry = is_whole and _is_refused(trace[end], frames, most - reserved[at])
        yield Release(begin=begin, end=end, is_retry=is_retry)


def _is_part(event: Record, frames: object) -> bool:
    is_release = RESERVES.get(event["action"]) == -1
    return (is_release or event["action"] == "free_completed") and event.get("frames") == frames


def _is_refused(request: Record, frames: object, room_bytes: int) -> bool:
    """Return whether CUDA first had no room for this request, so that the cache was released."""
    action = request["action"]
    if frames:  # completed frees may be enough, so that nothing new is mapped
        is_request = action in ("alloc", "oom") or RESERVES.get(action) == 1
        return is_request and bool(request.get("frames") == frames)
    return action == "oom" or (RESERVES.get(action) == 1 and bool(request["size"] > room_bytes))


def synchronized_at(trace: Sequence[Record]) -> set[int]:
    """Return the frees that completed because the allocator waited for them.

    Some may have completed just before. That makes no difference: if they had been enough for the
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


def recorded_requests(before: Iterable[HeldSegment], trace: Sequence[Record]) -> Requests:
    """Return a trace's requests, after those for earlier live blocks in order of address.

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
    _, sizes, streams = zip(*asked, strict=True) if asked else ((), (), ())
    return Requests(sizes, tuple(events), streams)


# ---- a recorded trace and the segments after it -> the segments before it ------------------------
# A trace is rarely complete: it begins when recording was switched on, and the oldest events are
# dropped. The state before the first event follows from the state after the last one, which the
# snapshot shows, by walking backwards. One thing is not recorded: a large block is up to 1 MiB
# longer than requested if the rest was too short to be used. If a block existed before the trace
# and is gone after it, only its successor shows how long it was.

_BEYOND = 1 << 60  # above every address


class Contradiction(Exception):
    """The trace and the segments cannot both be true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingState:
    """The allocator's segments before the first event, by address."""

    segments: tuple[HeldSegment, ...]
    # An upper bound for the GPU: each expandable segment reserves 9/8 of it in addresses.
    total_bytes: int | None


def state_before(
    segments: Sequence[Record], trace: Sequence[Record], settings: AllocatorSettings
) -> StartingState:
    """Walk back from the segments after the last event. Raises Contradiction."""
    walk = _Walk(settings)
    for segment in segments:
        walk.start_with(segment)
    for event in reversed(trace):
        walk.undo(event)
    firsts = walk.first_pages()
    length = min((end - begin for begin, end in pairwise(firsts)), default=None)
    return StartingState(
        segments=tuple(walk.segments(firsts, length or _BEYOND)),
        total_bytes=length * 8 // 9 if length else None,
    )


class _Walk:
    """The allocator's state at one moment, which moves backwards through the trace."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.divisions = settings.divisions_by_interval()
        self.blocks: dict[int, PlacedBlock] = {}  # live or pending
        self.unsure: list[int] = []  # addresses of blocks whose length is a guess
        self.native: dict[int, tuple[int, int]] = {}  # address: size, stream
        self.pages: set[int] = set()  # mapped pages of expandable segments
        self.owners: dict[int, tuple[int, bool]] = {}  # for every page ever seen: stream, is small

    def start_with(self, segment: Record) -> None:
        address, size, stream = segment["address"], segment["total_size"], segment["stream"]
        if segment.get("is_expandable"):
            self._map(address, size, stream, is_small=segment["segment_type"] == "small")
        else:
            self.native[address] = size, stream
        for block in blocks_of(segment):
            if block.state != "free":
                self.blocks[block.address] = block

    def undo(self, event: Record) -> None:
        action, size = event["action"], event.get("size", 0)
        address, stream = event.get("addr", 0), event.get("stream", 0)
        if action == "alloc":
            self._undo_alloc(address, round_size(size, self.divisions))
        elif action == "free_requested" and address in self.blocks:
            self.blocks[address] = self.blocks[address]._replace(state="live")
        elif action == "free_completed":
            rounded = round_size(size, self.divisions)
            self.blocks[address] = PlacedBlock(address, rounded, size, "pending")
            insort(self.unsure, address)
        elif action == "segment_alloc":
            self.native.pop(address, None)
        elif action == "segment_free":
            self.native[address] = size, stream
        elif action == "segment_map":
            self.pages.difference_update(range(address, address + size, PAGE_BYTES))
        elif action == "segment_unmap":
            # Only the large pool has pages of this size.
            is_small = size % self.settings.large_segment_bytes != 0
            self._map(address, size, stream, is_small=is_small)

    def _map(self, address: int, size: int, stream: int, *, is_small: bool) -> None:
        for page in range(address, address + size, PAGE_BYTES):
            self.pages.add(page)
            self.owners.setdefault(page, (stream, is_small))

    def _undo_alloc(self, address: int, size: int) -> None:
        self.blocks.pop(address, None)
        at = bisect_left(self.unsure, address)
        if at < len(self.unsure) and self.unsure[at] == address:
            del self.unsure[at]
        if at > 0 and size > SMALL_BYTES:
            # A free block is longer than 1 MiB and is used from its start. If this block starts
            # within 1 MiB after another, the other one reached up to here.
            self._lengthen(self.unsure[at - 1], address, SMALL_BYTES)

    def _lengthen(self, address: int, end: int, most_slack: int) -> None:
        block = self.blocks.get(address)
        if block is None or block.size_bytes <= SMALL_BYTES:
            return  # blocks of the small pool and of expandable segments have no slack
        is_expandable = address // PAGE_BYTES * PAGE_BYTES in self.pages
        if not is_expandable and 0 < end - address - block.size_bytes <= most_slack:
            self.blocks[address] = block._replace(size_bytes=end - address)

    def first_pages(self) -> list[int]:
        """Return where expandable segments begin: they grow from there, and pages are recorded."""
        groups = groupby(sorted(self.owners), key=self.owners.__getitem__)
        return [next(pages) for _, pages in groups]

    def segments(self, first_pages: list[int], length: int) -> list[HeldSegment]:
        """Return the resulting segments by address; each block must lie in one of them."""
        self._lengthen_all()
        placed = sorted(self.blocks.values())
        found = [
            HeldSegment(
                stream=stream,
                is_small=size == SMALL_SEGMENT_BYTES,
                reservation=None,
                blocks=tuple(_filled(placed, address, address + size)),
            )
            for address, (size, stream) in self.native.items()
        ]
        for begin, end in pairwise([*first_pages, first_pages[-1] + length] if first_pages else []):
            found += self._expandable(placed, begin, end)
        if sum(len(segment.live) for segment in found) != len(placed):
            raise Contradiction("a live block lies outside of all segments")
        return sorted(found, key=lambda segment: segment.blocks[0].address)

    def _lengthen_all(self) -> None:
        """Extend each block to the next one or to the end of the segment, if that is near."""
        ends = [address + size for address, (size, _) in self.native.items()]
        limits = sorted([*self.blocks, *ends, _BEYOND])
        unsplit_bytes = self.settings.max_split_bytes or _BEYOND
        for address in self.unsure:
            is_split = address in self.blocks and self.blocks[address].size_bytes < unsplit_bytes
            most_slack = SMALL_BYTES if is_split else self.settings.max_non_split_rounding_bytes
            self._lengthen(address, limits[bisect_right(limits, address)], most_slack)

    def _expandable(self, placed: list[PlacedBlock], begin: int, end: int) -> Iterator[HeldSegment]:
        mapped = sorted(page for page in self.pages if begin <= page < end)
        if not mapped:
            return  # the segment was reserved later
        stream, is_small = self.owners[begin]
        page_bytes = SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes
        yield HeldSegment(
            stream=stream,
            is_small=is_small,
            reservation=Reservation(begin, end - begin, page_bytes),
            blocks=tuple(_with_unmapped(placed, mapped, begin, end)),
        )


def _filled(placed: list[PlacedBlock], begin: int, end: int) -> Iterator[PlacedBlock]:
    """Yield all blocks from one address to another, with the free ones between them."""
    at = bisect_left(placed, (begin,))
    while at < len(placed) and placed[at].address < end:
        block = placed[at]
        if block.address > begin:
            yield PlacedBlock(begin, block.address - begin, 0, "free")
        elif block.address < begin:
            raise Contradiction("two live blocks overlap")
        yield block
        begin = block.address + block.size_bytes
        at += 1
    if begin > end:
        raise Contradiction("a live block reaches beyond its segment")
    if begin < end:
        yield PlacedBlock(begin, end - begin, 0, "free")


def _with_unmapped(
    placed: list[PlacedBlock], pages: list[int], begin: int, end: int
) -> Iterator[PlacedBlock]:
    """Yield the blocks of an expandable segment, with unmapped ones where pages are missing."""
    for first, last in _runs(pages):
        if first > begin:
            yield PlacedBlock(begin, first - begin, 0, "unmapped")
        yield from _filled(placed, first, last)
        begin = last
    if begin < end:
        yield PlacedBlock(begin, end - begin, 0, "unmapped")


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the start and end of each run of consecutive pages."""
    first = last = pages[0]
    for page in pages:
        if page > last:
            yield first, last
            first = page
        last = page + PAGE_BYTES
    yield first, last
