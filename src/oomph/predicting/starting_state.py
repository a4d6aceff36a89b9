"""A recorded trace, and the segments after it -> the segments before it.

A trace is rarely complete: it begins when recording was switched on, and the oldest events are
dropped. What the allocator held before the first event follows from what it holds after the last
one, which the snapshot shows, by walking backwards.

One thing is not recorded: a large block is up to 1 MiB longer than was asked for, where the rest
of what it was cut from was too short to be used. Of a block that was there before the trace and is
gone after it, only what lay behind it tells how long it was.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from oomph.predicting.allocator import HeldSegment, PlacedBlock
from oomph.predicting.allocator_settings import (
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
    round_size,
)
from oomph.predicting.device import PAGE_BYTES
from oomph.predicting.recorded import Record, blocks_of
from oomph.predicting.segments import Reservation

_BEYOND = 1 << 60  # above every address


class Contradiction(Exception):
    """The trace and the segments cannot both be true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StartingState:
    """What the allocator held before the first event, by address."""

    segments: tuple[HeldSegment, ...]
    # Of the GPU, at most: expandable segments reserve 9/8 of it in addresses, one behind another.
    total_bytes: int | None


def state_before(
    segments: Sequence[Record], trace: Sequence[Record], settings: AllocatorSettings
) -> StartingState:
    """Walk back from the segments after the last event; Contradiction if that leads nowhere."""
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
    """What is held at one moment of the trace, which moves backwards."""

    def __init__(self, settings: AllocatorSettings) -> None:
        self.settings = settings
        self.divisions = settings.divisions_by_interval()
        self.blocks: dict[int, PlacedBlock] = {}  # those that are live or pending
        self.unsure: list[int] = []  # the addresses of those whose length is a guess
        self.native: dict[int, tuple[int, int]] = {}  # address: size, stream
        self.pages: set[int] = set()  # of expandable segments: those with memory
        self.owners: dict[int, tuple[int, bool]] = {}  # of every page ever seen: stream, is small

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
            # The pages of the large pool are larger.
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
            # Free memory is longer than 1 MiB and is used from its beginning: if this block lies
            # nearer behind another, then the other one reached up to here.
            self._lengthen(self.unsure[at - 1], address, SMALL_BYTES)

    def _lengthen(self, address: int, end: int, most_slack: int) -> None:
        block = self.blocks.get(address)
        if block is None or block.size_bytes <= SMALL_BYTES:
            return  # blocks of the small pool and of expandable segments have no slack
        is_expandable = address // PAGE_BYTES * PAGE_BYTES in self.pages
        if not is_expandable and 0 < end - address - block.size_bytes <= most_slack:
            self.blocks[address] = block._replace(size_bytes=end - address)

    def first_pages(self) -> list[int]:
        """Where expandable segments begin: they grow from there, and their pages are recorded."""
        groups = groupby(sorted(self.owners), key=self.owners.__getitem__)
        return [next(pages) for _, pages in groups]

    def segments(self, first_pages: list[int], length: int) -> list[HeldSegment]:
        """What it has come to, by address; each block must lie in one segment."""
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
        """Up to the next block or the end of the segment, where that is near."""
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
            return  # it was reserved later
        stream, is_small = self.owners[begin]
        page_bytes = SMALL_SEGMENT_BYTES if is_small else self.settings.large_segment_bytes
        yield HeldSegment(
            stream=stream,
            is_small=is_small,
            reservation=Reservation(begin, end - begin, page_bytes),
            blocks=tuple(_with_unmapped(placed, mapped, begin, end)),
        )


def _filled(placed: list[PlacedBlock], begin: int, end: int) -> Iterator[PlacedBlock]:
    """All blocks from one address to another, the free ones between the others included."""
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
    """The same for an expandable segment: where there are no pages, it is unmapped."""
    for first, last in _runs(pages):
        if first > begin:
            yield PlacedBlock(begin, first - begin, 0, "unmapped")
        yield from _filled(placed, first, last)
        begin = last
    if begin < end:
        yield PlacedBlock(begin, end - begin, 0, "unmapped")


def _runs(pages: list[int]) -> Iterator[tuple[int, int]]:
    """Pages that follow each other, together: from where to where."""
    first = last = pages[0]
    for page in pages:
        if page > last:
            yield first, last
            first = page
        last = page + PAGE_BYTES
    yield first, last
