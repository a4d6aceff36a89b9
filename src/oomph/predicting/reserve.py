"""What torch's allocator has taken from CUDA: new segments, and what goes back, when, and why.

The part of `DeviceCachingAllocator` that runs when no cached block can serve a request. The names
of c10/cuda/CUDACachingAllocator.cpp stand beside the functions that port them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator

from oomph.predicting.allocator_settings import AllocatorSettings, segment_bytes
from oomph.predicting.device import Device
from oomph.predicting.segments import Block, Pool, find_room, map_pages, unmap_pages


class Reserve:
    """The memory that CUDA gave for the pools of one allocator."""

    def __init__(
        self, settings: AllocatorSettings, device: Device, synchronize: Callable[[], None]
    ) -> None:
        self.settings = settings
        self.device = device
        self._synchronize = synchronize  # completes the frees that wait for other streams
        self.pools: dict[int, tuple[Pool, Pool]] = {}  # by stream: the small one, the large one
        self.bytes = self.peak_bytes = 0
        self.num_retries = 0
        self.num_cuda_mallocs = self.num_cuda_frees = 0
        self.allowed_bytes: int | None = None
        self.collects_garbage = False
        self.num_searches = 0  # of large pools, if garbage is collected: blocks age by it
        if settings.memory_fraction_ratio is not None:
            self.limit(settings.memory_fraction_ratio)

    def limit(self, fraction_ratio: float) -> None:
        """Reserve no more than this share of the GPU; 1 is no limit (setMemoryFraction)."""
        is_limited = fraction_ratio < 1
        self.allowed_bytes = int(fraction_ratio * self.device.total_bytes) if is_limited else None
        self.collects_garbage = is_limited and self.settings.gc_threshold_ratio > 0

    def add_stream(self, stream: int) -> tuple[Pool, Pool]:
        small = Pool(stream, is_small=True, settings=self.settings)
        large = Pool(stream, is_small=False, settings=self.settings)
        self.pools[stream] = small, large
        return small, large

    def obtain(self, pool: Pool, size: int) -> Block | None:
        """A block that no pool had: from CUDA, in the last resort after giving it all the rest."""
        if self.collects_garbage:
            self._collect_garbage()
        block = self._grow(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._grow(pool, size)
        if block is None:
            self.release_all()
            self.num_retries += 1
            block = self._grow(pool, size)
        return block

    def holds(self, size: int) -> None:
        """So much more is reserved."""
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    # ---- taking ----------------------------------------------------------------------------------

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """alloc_block."""
        wanted = segment_bytes(size, self.settings.large_segment_bytes)
        if self.allowed_bytes is not None and self.bytes + wanted > self.allowed_bytes:
            return None
        if self.settings.expandable_segments:
            return self._grow_segment(pool, size)
        address = self.device.malloc(wanted)
        if address is None:
            return None
        self.num_cuda_mallocs += 1
        self.holds(wanted)
        return Block(pool, address, wanted)

    def _grow_segment(self, pool: Pool, size: int) -> Block | None:
        """try_allocate_expandable_block. What was mapped before a failure stays, and is free."""
        block = find_room(pool, size, self.device)
        if not block.is_mapped and not self._map(block, min(size, block.size)):
            if not block.is_split:
                # Torch keeps a new segment that has no page yet. To forget it is the same, and
                # the address of the next one is then asked for when it is known.
                pool.remove_unmapped(block)
            return None
        while block.size < size:
            after = block.next
            if after is None or not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # it has taken in the free block before it
        pool.remove(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        mapped = map_pages(block, size, self.device)
        self.num_cuda_mallocs += mapped > 0
        self.holds(mapped)
        return mapped > 0

    # ---- giving back -----------------------------------------------------------------------------

    def release_all(self) -> None:
        """Give back every segment and every page that is wholly free (release_cached_blocks)."""
        self._synchronize()
        for is_large in (True, False):
            self._release_pools(is_large=is_large)

    def _release_pools(self, *, is_large: bool) -> None:
        """release_blocks: first the segments of cudaMalloc, then the pages of expandable ones."""
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
            self.bytes -= unmapped

    def _pools_in_order(self, *, is_large: bool) -> Iterator[Pool]:
        return (self.pools[stream][is_large] for stream in sorted(self.pools))

    def _cuda_free(self, block: Block) -> None:
        """release_block, but for taking it out of its pool."""
        self.device.free(block.address, block.size)
        self.num_cuda_frees += 1
        self.bytes -= block.size

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Where there is a max_split_size: give back just enough unsplittable blocks.

        One that is as large as the request, or several from the largest down
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
        """Give back the segments that waited longest (garbage_collect_cached_blocks).

        A round frees all that are older than the mean, even beyond the target.
        """
        allowed_bytes = self.allowed_bytes or 0
        excess = self.bytes - int(self.settings.gc_threshold_ratio * allowed_bytes)
        if excess <= 0:
            return
        pools = list(self._pools_in_order(is_large=True))
        whole = [entry[2] for pool in pools for entry in pool.free if not entry[2].is_split]
        num_left = len(whole)
        total_age = sum(self.num_searches - block.idle_since for block in whole)
        has_freed = True
        while excess > 0 and has_freed and num_left > 0:
            threshold = total_age / num_left
            has_freed = False
            for block in whole:
                age = self.num_searches - block.idle_since
                if block.is_free and block.reservation is None and age >= threshold:
                    has_freed = True
                    block.is_free = False  # it is gone
                    excess -= block.size
                    total_age -= age
                    num_left -= 1
                    block.pool.remove(block)
                    self._cuda_free(block)
