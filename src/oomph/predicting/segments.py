"""Blocks and the pools they wait in, and expandable segments: the structures of torch's allocator.

A segment is what CUDA gave; it is cut into blocks, which know their neighbours. A free block is
in its pool's list, ordered by size and then by address, so that the first one that is large
enough is the best fit. An expandable segment is a long range of addresses of which only some
pages have memory behind them: the rest of it is blocks, too, unmapped ones.

The names of c10/cuda/CUDACachingAllocator.cpp stand beside the functions that port them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Final

from oomph.predicting.allocator_settings import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorSettings
from oomph.predicting.allocator_settings import SMALL_SEGMENT_BYTES as SMALL_PAGE_BYTES
from oomph.predicting.device import UNLIMITED_BYTES, Device


class Reservation:
    """The addresses of one expandable segment (ExpandableSegment)."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address: Final = address
        self.size: Final = size
        self.page: Final = page


class Block:
    """A piece of a segment. Sizes and addresses are in bytes.

    Here and in Pool the names go without their units: they are the inside of the hot loop.
    """

    __slots__ = (
        "address",
        "idle_since",
        "is_free",
        "is_mapped",
        "next",
        "pool",
        "prev",
        "requested",
        "reservation",
        "size",
    )

    def __init__(
        self, pool: Pool, address: int, size: int, reservation: Reservation | None = None
    ) -> None:
        self.pool = pool
        self.address = address
        self.size = size
        self.reservation = reservation  # None: a segment of cudaMalloc
        self.requested = 0
        self.is_free = True
        self.is_mapped = True
        self.prev: Block | None = None  # None: the first of its segment
        self.next: Block | None = None
        self.idle_since = 0  # the allocator's count of searches when it became free

    def __lt__(self, other: Block) -> bool:
        """Only asked where a recording contradicts itself and two blocks have one address."""
        return False

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def reach(self) -> int:
        """What it could grow to, if it may grow (expandable_size)."""
        after = self.next
        return self.size if after is None or after.is_mapped else self.size + after.size

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Put it between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """The free blocks of one stream, of small or of large requests."""

    __slots__ = ("free", "is_small", "page", "smallest_rest", "stream", "unmapped", "whole_from")

    def __init__(self, stream: int, *, is_small: bool, settings: AllocatorSettings) -> None:
        self.stream = stream
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []  # size, address: the order of the search
        self.unmapped: list[tuple[int, Block]] = []  # by address
        self.page = SMALL_PAGE_BYTES if is_small else settings.large_segment_bytes
        # A block is split if at least this much remains and the request is smaller than that
        # (should_split).
        splits_finely = is_small or settings.expandable_segments
        self.smallest_rest = MIN_BLOCK_BYTES if splits_finely else SMALL_BYTES + 1
        max_split = settings.max_split_bytes
        self.whole_from = UNLIMITED_BYTES if splits_finely or max_split is None else max_split

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def add_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


def cut_front(block: Block, size: int) -> Block:
    """Split off the first bytes of a block that is not in its pool; the rest of it goes there."""
    front = Block(block.pool, block.address, size, block.reservation)
    front.splice(block.prev, block)
    block.address += size
    block.size -= size
    block.pool.add(block)
    return front


def merge_neighbours(block: Block) -> None:
    """Take in the neighbours that are in the same state (try_merge_blocks, both sides).

    The block itself must not be in its pool: its address and its size change.
    """
    pool = block.pool
    for other in (block.prev, block.next):
        if other is None or not other.is_free or other.is_mapped != block.is_mapped:
            continue
        if other.is_mapped:
            pool.remove(other)
        else:
            pool.remove_unmapped(other)
        if other is block.prev:
            block.address = other.address
            block.splice(other.prev, block.next)
        else:
            block.splice(block.prev, other.next)
        block.size += other.size


# ---- expandable segments -------------------------------------------------------------------------


def find_room(pool: Pool, size: int, device: Device) -> Block:
    """The lowest block from which free and unmapped ones add up to a size (find_expandable_block).

    A new segment where there is none.
    """
    for _, block in pool.unmapped:
        before = block.prev
        first = before if before is not None and before.is_free else block
        if _has_room(first, size):
            return first
    return _reserve(pool, device)


def _has_room(block: Block | None, size: int) -> bool:
    while size > 0 and block is not None and block.is_free:
        size -= block.size
        block = block.next
    return size <= 0


def _reserve(pool: Pool, device: Device) -> Block:
    # Address space costs nothing: 9/8 of the GPU, so that there is some left when pages in
    # the middle have been unmapped.
    size = max(-(-(device.total_bytes * 9 // 8) // pool.page), 1) * pool.page
    reservation = Reservation(device.reserve(size), size, pool.page)
    block = Block(pool, reservation.address, size, reservation)
    block.is_mapped = False
    pool.add_unmapped(block)
    return block


def map_pages(block: Block, size: int, device: Device) -> int:
    """Put memory behind the first bytes of an unmapped block; 0 if there is none (map_block)."""
    pool = block.pool
    mapped = -(-size // pool.page) * pool.page
    if not device.map(block.address, mapped):
        return 0
    pool.remove_unmapped(block)
    block.is_mapped = True
    if mapped < block.size:
        rest = Block(pool, block.address + mapped, block.size - mapped, block.reservation)
        rest.is_mapped = False
        rest.splice(block, block.next)
        pool.add_unmapped(rest)
        block.size = mapped
    merge_neighbours(block)
    pool.add(block)
    return mapped


def unmap_pages(block: Block, device: Device) -> int:
    """Give back the whole pages of a free block; how many bytes that was (unmap_block)."""
    pool, reservation = block.pool, block.reservation
    if reservation is None:
        return 0
    start, page = reservation.address, reservation.page
    begin = start + -(-(block.address - start) // page) * page
    end = start + (block.address + block.size - start) // page * page
    if begin >= end:
        return 0
    device.unmap(begin, end - begin)
    pool.remove(block)
    _keep(block, block.address, begin)
    _keep(block, end, block.address + block.size)
    block.address, block.size, block.is_mapped = begin, end - begin, False
    merge_neighbours(block)
    if block.is_split:
        pool.add_unmapped(block)  # else nothing is left of the segment, and its addresses go, too
    return end - begin


def _keep(block: Block, begin: int, end: int) -> None:
    """What remains free at one end of a block whose pages go."""
    if begin == end:
        return
    kept = Block(block.pool, begin, end - begin, block.reservation)
    if begin == block.address:
        kept.splice(block.prev, block)
    else:
        kept.splice(block, block.next)
    block.pool.add(kept)
