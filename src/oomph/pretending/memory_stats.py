"""Count what torch.cuda.memory_stats reports: current, peak, total allocated and total freed.

Blocks, bytes and segments are counted for each pool. As in torch, expandable segments do not count
as segments and leave no splits.
"""

from __future__ import annotations

from typing import Any

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import SMALL_BYTES


class Stat:
    """One statistic of memory_stats."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        self.current = current = self.current + amount
        if amount > 0:
            self.allocated += amount
            if current > self.peak:
                self.peak = current
        else:
            self.freed -= amount

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in ("current", "peak", "allocated", "freed")}


class PoolStats:
    """The statistics of one pool, or of both."""

    __slots__ = ("blocks", "bytes", "requested", "reserved", "segments", "split_bytes", "splits")

    def __init__(self) -> None:
        self.blocks, self.bytes, self.requested = Stat(), Stat(), Stat()
        self.reserved, self.segments = Stat(), Stat()
        self.splits, self.split_bytes = Stat(), Stat()


class Statistics:
    """The statistics of one GPU."""

    def __init__(self, max_split_bytes: int | None = None) -> None:
        self.all, self.small, self.large = PoolStats(), PoolStats(), PoolStats()
        self.oversize_blocks, self.oversize_segments = Stat(), Stat()
        self._max_split_bytes = max_split_bytes
        # address -> pool, rounded bytes, requested bytes
        self._blocks: dict[int, tuple[PoolStats, int, int]] = {}

    def took(self, address: int, size_bytes: int, allocator: CachingAllocator) -> None:
        """Count a block after the allocator has handed it out."""
        rounded = allocator.allocated_bytes - self.all.bytes.current
        pool = self.small if size_bytes <= SMALL_BYTES else self.large
        self._blocks[address] = pool, rounded, size_bytes
        self._count(1, address, allocator)

    def giving_back(self, address: int, allocator: CachingAllocator) -> None:
        """Remove a block from the counts before the allocator frees it."""
        self._count(-1, address, allocator)
        del self._blocks[address]

    def _count(self, sign: int, address: int, allocator: CachingAllocator) -> None:
        pool, rounded, size_bytes = self._blocks[address]
        num_splits, split_bytes = allocator.splits_by(address)  # free blocks next to live ones
        for stats in (self.all, pool):
            stats.blocks.change(sign)
            stats.bytes.change(sign * rounded)
            stats.requested.change(sign * size_bytes)
            if split_bytes:
                stats.splits.change(sign * num_splits)
                stats.split_bytes.change(sign * split_bytes)
        if self._is_oversize(rounded):
            self.oversize_blocks.change(sign)

    def reserved(self, change_bytes: int, *, is_small: bool, is_expandable: bool) -> None:
        """Count memory that CUDA gave or took back."""
        sign = 1 if change_bytes > 0 else -1
        for stats in (self.all, self.small if is_small else self.large):
            stats.reserved.change(change_bytes)
            if not is_expandable:
                stats.segments.change(sign)
        if not is_expandable and self._is_oversize(abs(change_bytes)):
            self.oversize_segments.change(sign)

    def _is_oversize(self, size_bytes: int) -> bool:
        return self._max_split_bytes is not None and size_bytes >= self._max_split_bytes

    def _every(self) -> list[Stat]:
        pools = (self.all, self.small, self.large)
        of_pools = [getattr(pool, name) for pool in pools for name in PoolStats.__slots__]
        return [*of_pools, self.oversize_blocks, self.oversize_segments]

    def reset_peaks(self) -> None:
        for stat in self._every():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        for stat in self._every():
            stat.allocated = stat.freed = 0

    def nested(self) -> dict[str, Any]:
        """Return all statistics, nested as torch._C._cuda_memoryStats nests them."""
        return {
            "allocation": self._by_pool("blocks"),
            "active": self._by_pool("blocks"),
            "allocated_bytes": self._by_pool("bytes"),
            "active_bytes": self._by_pool("bytes"),
            "requested_bytes": self._by_pool("requested"),
            "reserved_bytes": self._by_pool("reserved"),
            "segment": self._by_pool("segments"),
            "inactive_split": self._by_pool("splits"),
            "inactive_split_bytes": self._by_pool("split_bytes"),
            "oversize_allocations": self.oversize_blocks.as_dict(),
            "oversize_segments": self.oversize_segments.as_dict(),
            "reserved_bytes_by_private_pools": {},
            "max_split_size": -1 if self._max_split_bytes is None else self._max_split_bytes,
            "num_alloc_retries": 0,
            "num_device_alloc": 0,
            "num_device_free": 0,
            "num_oom_rejections": 0,
            "num_ooms": 0,
            "num_sync_all_streams": 0,
        }

    def _by_pool(self, name: str) -> dict[str, dict[str, int]]:
        pools = {"all": self.all, "small_pool": self.small, "large_pool": self.large}
        return {pool: getattr(stats, name).as_dict() for pool, stats in pools.items()}
