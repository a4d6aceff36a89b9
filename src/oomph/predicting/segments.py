"""The structures of torch's allocator: blocks, their pools, and expandable segments.

A segment is memory from CUDA. It is cut into blocks, which know their neighbours. A free block is
in its pool's list, ordered by size and then by address, so the first one that is large enough is
the best fit. An expandable segment is a long range of addresses in which only some pages have
memory behind them; the rest are unmapped blocks.
"""

# Docstrings name the functions of c10/cuda/CUDACachingAllocator.cpp that they port.

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from typing import Final, Protocol

from oomph.predicting.allocator_settings import MIN_BLOCK_BYTES, SMALL_BYTES, AllocatorSettings
from oomph.predicting.allocator_settings import SMALL_SEGMENT_BYTES as SMALL_PAGE_BYTES
from oomph.units import MIB, TIB

# ---- the CUDA calls of torch's allocator, and a simulated GPU ------------------------------------

# More than any GPU has, but finite, because expandable segments reserve address space in
# proportion.
UNLIMITED_BYTES = 1024 * TIB
# cudaMalloc and the virtual memory calls both hand out memory in pages of this size.
PAGE_BYTES = 2 * MIB


class Device(Protocol):
    """The CUDA calls that the allocator makes."""

    @property
    def total_bytes(self) -> int:
        """Return the memory of the whole GPU: memory fractions and address space depend on it."""

    @property
    def free_bytes(self) -> int:
        """Return the free memory as cudaMemGetInfo reports it."""

    def malloc(self, size_bytes: int) -> int | None:
        """cudaMalloc: return an address, or None if there is no room."""

    def free(self, address: int, size_bytes: int) -> None:
        """cudaFree: release a segment."""

    def reserve(self, size_bytes: int) -> int:
        """cuMemAddressReserve: return addresses for an expandable segment, without memory."""

    def map(self, address: int, size_bytes: int) -> bool:
        """cuMemCreate and cuMemMap: put memory behind a part; False if there is no room."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """cuMemUnmap and cuMemRelease: release the memory behind a part."""


class SimulatedDevice:
    """A GPU with this many free bytes. Addresses go upwards and are never reused."""

    # Called on every change: the action as in a snapshot, the address, the bytes.
    note: Callable[[str, int, int], None] | None = None

    def __init__(
        self, free_bytes: int = UNLIMITED_BYTES, *, total_bytes: int | None = None
    ) -> None:
        self.free_bytes = free_bytes
        self.total_bytes = max(free_bytes, total_bytes or 0)
        self._next_address = PAGE_BYTES

    def malloc(self, size_bytes: int) -> int | None:
        if size_bytes > self.free_bytes:
            return None
        address = self.reserve(size_bytes)
        self._change("segment_alloc", address, -size_bytes)
        return address

    def free(self, address: int, size_bytes: int) -> None:
        self._change("segment_free", address, size_bytes)

    def reserve(self, size_bytes: int) -> int:
        address = self._next_address
        self._next_address += -(-size_bytes // PAGE_BYTES) * PAGE_BYTES
        return address

    def map(self, address: int, size_bytes: int) -> bool:
        if size_bytes > self.free_bytes:
            return False
        self._change("segment_map", address, -size_bytes)
        return True

    def unmap(self, address: int, size_bytes: int) -> None:
        self._change("segment_unmap", address, size_bytes)

    def _change(self, action: str, address: int, more_free_bytes: int) -> None:
        self.free_bytes += more_free_bytes
        if self.note is not None:
            self.note(action, address, abs(more_free_bytes))


class Reservation:
    """The addresses of one expandable segment (ExpandableSegment)."""

    __slots__ = ("address", "page", "size")

    def __init__(self, address: int, size: int, page: int) -> None:
        self.address: Final = address
        self.size: Final = size
        self.page: Final = page


class Block:
    """A piece of a segment. Sizes and addresses are in bytes.

    Names in Block and Pool have no unit suffix, because they are inside the hot loop.
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
        self.reservation = reservation  # None: a cudaMalloc segment
        self.requested = 0
        self.is_free = True
        self.is_mapped = True
        self.prev: Block | None = None  # None: the first of its segment
        self.next: Block | None = None
        self.idle_since = 0  # the allocator's number of searches when it became free

    def __lt__(self, other: Block) -> bool:
        """Break ties: only used if a recording gives two blocks the same address."""
        return False

    @property
    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None

    @property
    def reach(self) -> int:
        """Return the size that it could grow to (expandable_size)."""
        after = self.next
        return self.size if after is None or after.is_mapped else self.size + after.size

    def splice(self, before: Block | None, after: Block | None) -> None:
        """Insert it between two neighbours."""
        self.prev, self.next = before, after
        if before is not None:
            before.next = self
        if after is not None:
            after.prev = self


class Pool:
    """The free blocks of one stream, for small or for large requests."""

    __slots__ = ("free", "is_small", "page", "smallest_rest", "stream", "unmapped", "whole_from")

    def __init__(self, stream: int, *, is_small: bool, settings: AllocatorSettings) -> None:
        self.stream = stream
        self.is_small = is_small
        self.free: list[tuple[int, int, Block]] = []  # size, address: the search order
        self.unmapped: list[tuple[int, Block]] = []  # by address
        self.page = SMALL_PAGE_BYTES if is_small else settings.large_segment_bytes
        # A block is split if at least `smallest_rest` remains and the request is smaller than
        # `whole_from` (should_split).
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
    """Split off the front of a block that is not in its pool; the rest goes into the pool."""
    front = Block(block.pool, block.address, size, block.reservation)
    front.splice(block.prev, block)
    block.address += size
    block.size -= size
    block.pool.add(block)
    return front


def merge_neighbours(block: Block) -> None:
    """Merge with the neighbours in the same state (try_merge_blocks, both sides).

    The block itself must not be in its pool, because its address and size change.
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


# ---- expandable segments


def find_room(pool: Pool, size: int, device: Device) -> Block:
    """Return the lowest block with enough free and unmapped space (find_expandable_block).

    If there is none, a new segment is reserved.
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
    # Address space is free: torch reserves 9/8 of the GPU, so that some is left after pages in the
    # middle were unmapped.
    size = max(-(-(device.total_bytes * 9 // 8) // pool.page), 1) * pool.page
    reservation = Reservation(device.reserve(size), size, pool.page)
    block = Block(pool, reservation.address, size, reservation)
    block.is_mapped = False
    pool.add_unmapped(block)
    return block


def map_pages(block: Block, size: int, device: Device) -> int:
    """Map memory for the start of an unmapped block; 0 if there is none (map_block)."""
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
    """Release the whole pages of a free block and return their bytes (unmap_block)."""
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
        pool.add_unmapped(block)  # otherwise the whole segment and its addresses are gone
    return end - begin


def _keep(block: Block, begin: int, end: int) -> None:
    """Keep free what remains at one end of a block whose pages are released."""
    if begin == end:
        return
    kept = Block(block.pool, begin, end - begin, block.reservation)
    if begin == block.address:
        kept.splice(block.prev, block)
    else:
        kept.splice(block, block.next)
    block.pool.add(kept)
