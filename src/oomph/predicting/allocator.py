"""PyTorch's caching allocator, replayed: requests and frees -> addresses, segments, peaks.

A port of `DeviceCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp; torch 2.1 to 2.13 agree
unless noted): rounding, a small and a large pool, best fit per stream, splitting and merging,
expandable segments, max_split_size, garbage collection, roundup, and failures of cudaMalloc. The
same code predicts (the device is a number of bytes) and replays recorded traces address by address
(`recorded.py`: the device is the recording).
"""

# Not modelled: the private pools of CUDA graphs and of torch.cuda.MemPool, and memory that other
# processes take or release meanwhile. Each GPU has its own allocator.

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from oomph.errors import UsageError
from oomph.predicting.allocator_settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
    round_size,
    segment_bytes,
)
from oomph.predicting.segments import (
    Block,
    Device,
    Pool,
    Reservation,
    SimulatedDevice,
    cut_front,
    find_room,
    map_pages,
    merge_neighbours,
    unmap_pages,
)

BlockState = Literal["live", "pending", "free", "unmapped"]


class PlacedBlock(NamedTuple):
    """A block's address, size and state."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: BlockState


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSegment:
    """A cudaMalloc or expandable segment, with all of its blocks by address."""

    stream: int
    is_small: bool
    reservation: Reservation | None
    blocks: tuple[PlacedBlock, ...]

    @property
    def live(self) -> tuple[PlacedBlock, ...]:
        """Return the blocks that are in use or pending."""
        return tuple(block for block in self.blocks if block.state in ("live", "pending"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The moment at which memory ran out, after the cache was released."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_block_bytes: int
    device_free_bytes: int


class OutOfMemory(Exception):
    """Stands for torch.OutOfMemoryError. The allocator stays usable, as torch's does."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        super().__init__(shortage)


class CachingAllocator:
    """One GPU's caching allocator, with the counters of torch.cuda.memory_stats.

    Docstrings name the functions of c10/cuda/CUDACachingAllocator.cpp that they port.
    """

    def __init__(
        self, settings: AllocatorSettings | None = None, device: Device | None = None
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = device or SimulatedDevice()
        self.allocated_bytes = self.peak_allocated_bytes = 0  # live blocks, rounded sizes
        self.active_bytes = self.peak_active_bytes = 0  # also blocks with a pending free
        self.requested_bytes = self.peak_requested_bytes = 0  # active blocks, requested sizes
        self.reserved_bytes = self.peak_reserved_bytes = 0  # segments and pages from CUDA
        self.num_retries = 0  # how often the whole cache was released because CUDA had no room
        self.num_cuda_mallocs = self.num_cuda_frees = 0  # also mapped and unmapped pages
        self.allowed_bytes: int | None = None  # to reserve at most; None: the whole GPU
        self._pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: small, large
        self._live: dict[int, Block] = {}
        self._pending: dict[int, Block] = {}
        self._divisions = self.settings.divisions_by_interval()
        self._collects_garbage = False
        self._num_searches = 0  # of large pools, the age of blocks for garbage collection
        self._is_plain = not (self.settings.expandable_segments or self.settings.max_split_bytes)
        if self.settings.memory_fraction_ratio is not None:
            self.limit(self.settings.memory_fraction_ratio)

    def limit(self, fraction_ratio: float) -> None:
        """Reserve at most this share of the GPU; 1 means no limit (setMemoryFraction)."""
        is_limited = fraction_ratio < 1
        self.allowed_bytes = int(fraction_ratio * self.device.total_bytes) if is_limited else None
        self._collects_garbage = is_limited and self.settings.gc_threshold_ratio > 0
        self._is_plain = self._is_plain and not self._collects_garbage

    # ---- requests and frees: the hot path

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        """Return the address of a new block. Raises OutOfMemory if there is no room."""
        if self._divisions or size_bytes < MIN_BLOCK_BYTES:
            size = round_size(size_bytes, self._divisions)
        else:
            size = (size_bytes + 511) & -512
        pools = self._pools.get(stream) or self._add_stream(stream)
        pool = pools[size > SMALL_BYTES]
        free = pool.free
        at = bisect_left(free, (size,))
        if not self._is_plain:
            at = self._choose(pool, size, at)
        block = free.pop(at)[2] if at < len(free) else self._obtain(pool, size, size_bytes)
        if block.size - size >= pool.smallest_rest and size < pool.whole_from:
            block = cut_front(block, size)
        block.is_free = False
        block.requested = size_bytes
        self._live[block.address] = block
        self._count(block.size, size_bytes)
        return block.address

    def _count(self, size: int, requested: int) -> None:
        self.allocated_bytes = allocated = self.allocated_bytes + size
        if allocated > self.peak_allocated_bytes:
            self.peak_allocated_bytes = allocated
        self.active_bytes = active = self.active_bytes + size
        if active > self.peak_active_bytes:
            self.peak_active_bytes = active
        self.requested_bytes = total = self.requested_bytes + requested
        if total > self.peak_requested_bytes:
            self.peak_requested_bytes = total

    def free(self, address: int) -> None:
        """Free a block that no other stream uses; it can be reused at once."""
        block = self._live.pop(address, None)
        if block is None:
            raise _not_there(address, "live")
        self.allocated_bytes -= block.size
        self._complete(block)

    def free_requested(self, address: int) -> None:
        """Free a block that other streams may still use (record_stream); it stays active."""
        block = self._live.pop(address, None)
        if block is None:
            raise _not_there(address, "live")
        self.allocated_bytes -= block.size
        self._pending[address] = block

    def free_completed(self, address: int) -> None:
        """Make a block reusable once the other streams are done with it."""
        block = self._pending.pop(address, None)
        if block is None:
            raise _not_there(address, "waiting to be freed")
        self._complete(block)

    def _complete(self, block: Block) -> None:
        """Merge a block with its free neighbours and return it to its pool (free_block)."""
        self.active_bytes -= block.size
        self.requested_bytes -= block.requested
        merge_neighbours(block)
        block.is_free = True
        block.pool.add(block)
        if self._collects_garbage:
            block.idle_since = self._num_searches

    # ---- outside the hot path --------------------------------------------------------------------

    def _add_stream(self, stream: int) -> tuple[Pool, Pool]:
        small = Pool(stream, is_small=True, settings=self.settings)
        large = Pool(stream, is_small=False, settings=self.settings)
        self._pools[stream] = small, large
        return small, large

    def _choose(self, pool: Pool, size: int, at: int) -> int:
        """Return the index of the free block to take, or the list's length (get_free_block)."""
        free = pool.free
        nothing = len(free)
        if self._collects_garbage and not pool.is_small:
            self._num_searches += 1
        if at < nothing and free[at][2].reservation is not None:
            at = self._choose_expandable(free, at)
        if at == nothing:
            return nothing
        # Blocks of max_split_size or more serve only requests of nearly their size.
        found, max_split = free[at][0], self.settings.max_split_bytes
        if max_split is None:
            return at
        if size < max_split:
            return nothing if found >= max_split else at
        is_near = found < size + self.settings.max_non_split_rounding_bytes
        return at if is_near else nothing

    def _choose_expandable(self, free: list[tuple[int, int, Block]], at: int) -> int:
        if self.settings.expandable_segments:
            # A block that can grow counts with the size it can grow to, so others are filled first.
            while (
                at + 1 < len(free)
                and free[at][2].reservation is not None
                and free[at + 1][2].reach < free[at][2].reach
            ):
                at += 1
            return at
        # The setting was switched off during the run: expandable blocks are no longer used.
        while at < len(free) and free[at][2].reservation is not None:
            at += 1
        return at

    # ---- memory from CUDA, if no cached block can serve a request -------------------------------

    def _obtain(self, pool: Pool, size: int, requested: int) -> Block:
        """Get a block from CUDA, as a last resort after releasing the whole cache."""
        if self._collects_garbage:
            self._collect_garbage()
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self._release_all()
            self.num_retries += 1
            block = self._grow(pool, size)
        if block is None:
            raise OutOfMemory(
                Shortage(
                    requested_bytes=requested,
                    allocated_bytes=self.allocated_bytes,
                    reserved_bytes=self.reserved_bytes,
                    largest_free_block_bytes=self.largest_free_block_bytes(),
                    device_free_bytes=self.device.free_bytes,
                )
            )
        return block

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Take a new segment from CUDA (alloc_block)."""
        wanted = segment_bytes(size, self.settings.large_segment_bytes)
        if self.allowed_bytes is not None and self.reserved_bytes + wanted > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grow_segment(pool, size)
        address = self.device.malloc(wanted)
        if address is None:
            return None
        self.num_cuda_mallocs += 1
        self._hold(wanted)
        return Block(pool, address, wanted)

    def _grow_segment(self, pool: Pool, size: int) -> Block | None:
        """Map pages for a block (try_allocate_expandable_block).

        Pages that were mapped before a failure stay, and are free.
        """
        block = find_room(pool, size, self.device)
        if not block.is_mapped and not self._map(block, min(size, block.size)):
            if not block.is_split:
                # Torch keeps a new segment without pages. Dropping it has the same effect, and the
                # next address is then requested once it is known.
                pool.remove_unmapped(block)
            return None
        while block.size < size:
            after = block.next
            if after is None or not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # it has merged with the free block before it
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        mapped = map_pages(block, size, self.device)
        self.num_cuda_mallocs += mapped > 0
        self._hold(mapped)
        return mapped > 0

    def _hold(self, size: int) -> None:
        """Count this many more bytes as reserved."""
        self.reserved_bytes += size
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)

    def empty_cache(self) -> None:
        """Give CUDA back everything that is entirely free (torch.cuda.empty_cache)."""
        self._release_all()

    def _release_all(self) -> None:
        """Release every segment and every page that is entirely free (release_cached_blocks)."""
        for address in tuple(self._pending):  # torch waits for the other streams first
            self.free_completed(address)
        for is_large in (True, False):
            self._release_pools(is_large=is_large)

    def _release_pools(self, *, is_large: bool) -> None:
        """Release cudaMalloc segments first, then pages of expandable ones (release_blocks)."""
        expandable: list[Block] = []
        for pool in self._pools_in_order(is_large=is_large):
            kept = []
            for entry in pool.free:
                block = entry[2]
                if block.reservation is not None:
                    expandable.append(block)
                if block.reservation is not None or block.is_split:
                    kept.append(entry)
                else:
                    self._cuda_free(block)
            pool.free[:] = kept
        for block in expandable:
            unmapped = unmap_pages(block, self.device)
            self.num_cuda_frees += unmapped > 0
            self.reserved_bytes -= unmapped

    def _pools_in_order(self, *, is_large: bool) -> Iterator[Pool]:
        return (self._pools[stream][is_large] for stream in sorted(self._pools))

    def _cuda_free(self, block: Block) -> None:
        """Release a block that is already out of its pool (release_block)."""
        self.device.free(block.address, block.size)
        self.num_cuda_frees += 1
        self.reserved_bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Release just enough unsplittable blocks, if max_split_size is set.

        That is one block as large as the request, or several from the largest down
        (release_available_cached_blocks).
        """
        max_split = self.settings.max_split_bytes
        if max_split is None:
            return False
        wanted, released = max(size, max_split), 0
        free = pool.free
        at = bisect_left(free, (wanted,))
        if at < len(free) and free[at][2].reservation is None:
            self._cuda_free(free.pop(at)[2])
            return True
        while at > 0 and released < wanted and free[at - 1][0] >= max_split:
            at -= 1
            block = free[at][2]
            if block.reservation is None:
                del free[at]
                released += block.size
                self._cuda_free(block)
        return released >= wanted

    def _collect_garbage(self) -> None:
        """Release the segments that were idle longest (garbage_collect_cached_blocks).

        Each round frees all that are older than the mean, even beyond the target.
        """
        allowed_bytes = self.allowed_bytes or 0
        excess = self.reserved_bytes - int(self.settings.gc_threshold_ratio * allowed_bytes)
        if excess <= 0:
            return
        pools = list(self._pools_in_order(is_large=True))
        whole = [entry[2] for pool in pools for entry in pool.free if not entry[2].is_split]
        num_left = len(whole)
        total_age = sum(self._num_searches - block.idle_since for block in whole)
        has_freed = True
        while excess > 0 and has_freed and num_left > 0:
            threshold = total_age / num_left
            has_freed = False
            for block in whole:
                age = self._num_searches - block.idle_since
                if block.is_free and block.reservation is None and age >= threshold:
                    has_freed = True
                    block.is_free = False  # released
                    excess -= block.size
                    total_age -= age
                    num_left -= 1
                    block.pool.remove(block)
                    self._cuda_free(block)

    # ---- what it holds ---------------------------------------------------------------------------

    def largest_free_block_bytes(self) -> int:
        """Return the largest free block of any stream; 0 if there is none."""
        return max((block.size for block in self._cached_blocks()), default=0)

    def _cached_blocks(self) -> Iterator[Block]:
        pools = (pool for pair in self._pools.values() for pool in pair)
        return (block for pool in pools for _, _, block in pool.free)

    def blocks(self) -> list[PlacedBlock]:
        """Return every block that has memory behind it, by address."""
        live = [_placed(block, "live") for block in self._live.values()]
        pending = [_placed(block, "pending") for block in self._pending.values()]
        free = [_placed(block, "free") for block in self._cached_blocks()]
        return sorted(live + pending + free)

    def held_segments(self) -> list[HeldSegment]:
        """Return the reserved segments by address, expandable ones as one per mapped range."""
        every = [*self._live.values(), *self._pending.values(), *self._cached_blocks()]
        heads = [block for block in every if block.prev is None or not block.prev.is_mapped]
        return [self._held(head) for head in sorted(heads, key=lambda head: head.address)]

    def _held(self, head: Block) -> HeldSegment:
        placed: list[PlacedBlock] = []
        block: Block | None = head
        while block is not None and block.is_mapped:
            placed.append(_placed(block, self._state_of(block)))
            block = block.next
        return HeldSegment(
            stream=head.pool.stream,
            is_small=head.pool.is_small,
            reservation=head.reservation,
            blocks=tuple(placed),
        )

    def _state_of(self, block: Block) -> BlockState:
        if block.is_free:
            return "free"
        return "pending" if block.address in self._pending else "live"

    def splits_by(self, address: int) -> tuple[int, int]:
        """Return by how many blocks and bytes a live block changes the inactive splits.

        Torch counts the free blocks of segments in use (inactive_split), except expandable ones. If
        this block were free, it would merge with its free neighbours.
        """
        block = self._live[address]
        if block.reservation is not None:
            return 0, 0
        before, after = block.prev, block.next
        num, beside_bytes, is_in_use = 0, 0, False
        for other in (before, after):
            if other is None:
                continue
            if other.is_free:
                num += 1
                beside_bytes += other.size
                other = other.prev if other is before else other.next
            is_in_use = is_in_use or other is not None
        # If nothing else is in use, the segment would be entirely free.
        return (num - 1, -block.size) if is_in_use else (num, beside_bytes)

    def adopt(
        self,
        blocks: Iterable[PlacedBlock],
        *,
        stream: int,
        is_small: bool,
        reservation: Reservation | None = None,
    ) -> None:
        """Start with an existing segment, given as all of its blocks by address."""
        pools = self._pools.get(stream) or self._add_stream(stream)
        pool = pools[not is_small]
        last: Block | None = None
        for placed in blocks:
            block = Block(pool, placed.address, placed.size_bytes, reservation)
            block.splice(last, None)
            self._register(block, placed)
            last = block
        self._is_plain = self._is_plain and reservation is None

    def _register(self, block: Block, placed: PlacedBlock) -> None:
        if placed.state == "unmapped":
            block.is_mapped = False
            block.pool.add_unmapped(block)
            return
        self._hold(block.size)
        if placed.state == "free":
            block.pool.add(block)
            return
        block.is_free = False
        block.requested = placed.requested_bytes
        self._live[block.address] = block
        self._count(block.size, block.requested)
        if placed.state == "pending":
            self.free_requested(block.address)


def _placed(block: Block, state: BlockState) -> PlacedBlock:
    return PlacedBlock(block.address, block.size, block.requested, state)


def _not_there(address: int, state: str) -> UsageError:
    return UsageError(
        f"no block at {address:#x} is {state}",
        because="an address is freed once, as malloc returned it",
    )
