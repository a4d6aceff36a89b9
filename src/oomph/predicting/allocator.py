"""PyTorch's caching allocator, replayed: requests and frees -> addresses, segments, peaks.

A port of `DeviceCachingAllocator` (c10/cuda/CUDACachingAllocator.cpp, the same from torch 2.1 to
2.13 but where it is said): rounding, a small and a large pool, best fit per stream, splitting and
merging, expandable segments, max_split_size, garbage collection, roundup, and what happens when
cudaMalloc fails. The same code predicts (the device is a number of bytes) and replays recorded
traces address by address (`recorded.py`: the device is the recording).

Not modelled: the private pools of CUDA graphs and of torch.cuda.MemPool; memory that others take
or give back meanwhile. Several GPUs are several allocators.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from oomph.errors import UsageError
from oomph.predicting.allocator_settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    AllocatorSettings,
    round_size,
)
from oomph.predicting.device import Device, SimulatedDevice
from oomph.predicting.reserve import Reserve
from oomph.predicting.segments import Block, Pool, Reservation, cut_front, merge_neighbours

BlockState = Literal["live", "pending", "free", "unmapped"]


class PlacedBlock(NamedTuple):
    """Where a block lies, and in which state."""

    address: int
    size_bytes: int
    requested_bytes: int
    state: BlockState


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSegment:
    """A segment of cudaMalloc, or an expandable one, with all of its blocks by address."""

    stream: int
    is_small: bool
    reservation: Reservation | None
    blocks: tuple[PlacedBlock, ...]

    @property
    def live(self) -> tuple[PlacedBlock, ...]:
        """Those that are in use, or pending."""
        return tuple(block for block in self.blocks if block.state in ("live", "pending"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """The moment at which the memory did not suffice, the cache being released already."""

    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int
    largest_free_block_bytes: int
    device_free_bytes: int


class OutOfMemory(Exception):
    """torch.OutOfMemoryError. The allocator remains usable, as torch's does."""

    def __init__(self, shortage: Shortage) -> None:
        self.shortage = shortage
        super().__init__(shortage)


class CachingAllocator:
    """One GPU's caching allocator, which counts what torch.cuda.memory_stats counts."""

    def __init__(
        self, settings: AllocatorSettings | None = None, device: Device | None = None
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.device = device or SimulatedDevice()
        self.allocated_bytes = self.peak_allocated_bytes = 0  # of live blocks, as rounded
        self.active_bytes = self.peak_active_bytes = 0  # and of those whose free is pending
        self.requested_bytes = self.peak_requested_bytes = 0  # the same, as asked for
        self._live: dict[int, Block] = {}
        self._pending: dict[int, Block] = {}
        self._reserve = Reserve(self.settings, self.device, self._synchronize)
        self._pools = self._reserve.pools
        self._divisions = self.settings.divisions_by_interval()
        self._ages = self._reserve.collects_garbage
        self._is_plain = not (
            self.settings.expandable_segments or self.settings.max_split_bytes or self._ages
        )

    @property
    def reserved_bytes(self) -> int:
        """What CUDA gave: segments and pages, whether their blocks are live or free."""
        return self._reserve.bytes

    @property
    def peak_reserved_bytes(self) -> int:
        return self._reserve.peak_bytes

    @property
    def num_retries(self) -> int:
        """How often CUDA had no room and all of the cache was given back before a second try."""
        return self._reserve.num_retries

    @property
    def num_cuda_mallocs(self) -> int:
        """How often CUDA gave memory, by cudaMalloc or by mapping pages."""
        return self._reserve.num_cuda_mallocs

    @property
    def num_cuda_frees(self) -> int:
        return self._reserve.num_cuda_frees

    @property
    def allowed_bytes(self) -> int | None:
        """What this process may reserve; None where it may have all of the GPU."""
        return self._reserve.allowed_bytes

    def limit(self, fraction_ratio: float) -> None:
        """torch.cuda.set_per_process_memory_fraction: reserve no more than this share, from now."""
        self._reserve.limit(fraction_ratio)
        self._ages = self._reserve.collects_garbage
        self._is_plain = self._is_plain and not self._ages

    # ---- requests and frees: the hot path --------------------------------------------------------

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        """The address of a new block; OutOfMemory where there is no room for it."""
        if self._divisions or size_bytes < MIN_BLOCK_BYTES:
            size = round_size(size_bytes, self._divisions)
        else:
            size = (size_bytes + 511) & -512
        pools = self._pools.get(stream) or self._reserve.add_stream(stream)
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
        """Free a block that no other stream uses: it can be handed out again at once."""
        block = self._live.pop(address, None)
        if block is None:
            raise _not_there(address, "live")
        self.allocated_bytes -= block.size
        self._complete(block)

    def free_requested(self, address: int) -> None:
        """Free a block that other streams may still use (record_stream): it remains active."""
        block = self._live.pop(address, None)
        if block is None:
            raise _not_there(address, "live")
        self.allocated_bytes -= block.size
        self._pending[address] = block

    def free_completed(self, address: int) -> None:
        """The other streams are done with it: now it can be handed out again."""
        block = self._pending.pop(address, None)
        if block is None:
            raise _not_there(address, "waiting to be freed")
        self._complete(block)

    def _complete(self, block: Block) -> None:
        """Merge with the free neighbours and wait in the pool (free_block)."""
        self.active_bytes -= block.size
        self.requested_bytes -= block.requested
        merge_neighbours(block)
        block.is_free = True
        block.pool.add(block)
        if self._ages:
            block.idle_since = self._reserve.num_searches

    # ---- beside the hot path ---------------------------------------------------------------------

    def _choose(self, pool: Pool, size: int, at: int) -> int:
        """The index in the pool's list of the block to take, or its length (get_free_block)."""
        free = pool.free
        nothing = len(free)
        if self._ages and not pool.is_small:
            self._reserve.num_searches += 1
        if at < nothing and free[at][2].reservation is not None:
            at = self._choose_expandable(free, at)
        if at == nothing:
            return nothing
        # Blocks from max_split_size on are for requests of nearly their size.
        found, max_split = free[at][0], self.settings.max_split_bytes
        if max_split is None:
            return at
        if size < max_split:
            return nothing if found >= max_split else at
        is_near = found < size + self.settings.max_non_split_rounding_bytes
        return at if is_near else nothing

    def _choose_expandable(self, free: list[tuple[int, int, Block]], at: int) -> int:
        if self.settings.expandable_segments:
            # A block that can grow counts as what it can grow to: better fill the others first.
            while (
                at + 1 < len(free)
                and free[at][2].reservation is not None
                and free[at + 1][2].reach < free[at][2].reach
            ):
                at += 1
            return at
        # The setting was switched off in mid-run: what is expandable is not used any more.
        while at < len(free) and free[at][2].reservation is not None:
            at += 1
        return at

    def _obtain(self, pool: Pool, size: int, requested: int) -> Block:
        block = self._reserve.obtain(pool, size)
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

    def _synchronize(self) -> None:
        for address in tuple(self._pending):
            self.free_completed(address)

    def empty_cache(self) -> None:
        """torch.cuda.empty_cache(): give CUDA what is wholly free."""
        self._reserve.release_all()

    def largest_free_block_bytes(self) -> int:
        """Of any stream; 0 if there is none."""
        pools = (pool for pair in self._pools.values() for pool in pair)
        return max((pool.free[-1][0] for pool in pools if pool.free), default=0)

    def blocks(self) -> list[PlacedBlock]:
        """Every block that has memory behind it, by address."""
        live = [_placed(block, "live") for block in self._live.values()]
        pending = [_placed(block, "pending") for block in self._pending.values()]
        pools = (pool for pair in self._pools.values() for pool in pair)
        free = [_placed(block, "free") for pool in pools for _, _, block in pool.free]
        return sorted(live + pending + free)

    def held_segments(self) -> list[HeldSegment]:
        """What is reserved, by address: one for each range of an expandable segment with memory."""
        pools = (pool for pair in self._pools.values() for pool in pair)
        free = [block for pool in pools for _, _, block in pool.free]
        every = [*self._live.values(), *self._pending.values(), *free]
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
        """How a live block changes what is free beside others: blocks and bytes, more or fewer.

        Torch counts free blocks of segments that are in use (inactive_split), but for expandable
        ones. Were this block free, it and its free neighbours would be one.
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
        # Without others in use, the segment would be wholly free.
        return (num - 1, -block.size) if is_in_use else (num, beside_bytes)

    def adopt(
        self,
        blocks: Iterable[PlacedBlock],
        *,
        stream: int,
        is_small: bool,
        reservation: Reservation | None = None,
    ) -> None:
        """Begin with a segment that is there already, given as all of its blocks by address."""
        pools = self._pools.get(stream) or self._reserve.add_stream(stream)
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
        self._reserve.holds(block.size)
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
