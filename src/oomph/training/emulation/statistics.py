"""What torch.cuda.memory_stats counts: now, at most, in all taken and in all given back.

Blocks, bytes and segments are told apart by pool, as torch does. Expandable segments are no
segments and leave no splits, as in torch.
"""

from __future__ import annotations

from typing import Any, Protocol

from oomph.units import MIB

SMALL_BYTES = MIB  # kSmallSize of c10/cuda/CUDACachingAllocator.cpp: the small pool's largest


class Counted(Protocol):
    """What is read from the allocator after each request."""

    allocated_bytes: int

    def splits_by(self, address: int) -> tuple[int, int]: ...


class Stat:
    """One figure of memory_stats."""

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
        names = ("current", "peak", "allocated", "freed")
        return {name: getattr(self, name) for name in names}


class Of:
    """The figures of one pool, or of both."""

    __slots__ = ("blocks", "bytes", "requested", "reserved", "segments", "split_bytes", "splits")

    def __init__(self) -> None:
        for name in Of.__slots__:
            setattr(self, name, Stat())

    blocks: Stat
    bytes: Stat
    requested: Stat
    reserved: Stat
    segments: Stat
    splits: Stat
    split_bytes: Stat

    def took(self, rounded: int, requested: int) -> None:
        """One block more. Written out: it is done for each op, as is the next."""
        for stat, amount in ((self.blocks, 1), (self.bytes, rounded), (self.requested, requested)):
            stat.allocated += amount
            stat.current = current = stat.current + amount
            if current > stat.peak:
                stat.peak = current

    def gave_back(self, rounded: int, requested: int) -> None:
        """One block less."""
        for stat, amount in ((self.blocks, 1), (self.bytes, rounded), (self.requested, requested)):
            stat.freed += amount
            stat.current -= amount

    def split(self, num: int, size_bytes: int) -> None:
        """So many free blocks more beside live ones."""
        self.splits.change(num)
        self.split_bytes.change(size_bytes)


class Statistics:
    """Of one card."""

    def __init__(self, max_split_bytes: int | None = None) -> None:
        self.all, self.small, self.large = Of(), Of(), Of()
        self.oversize_blocks, self.oversize_segments = Stat(), Stat()
        self._max_split_bytes = max_split_bytes
        self._blocks: dict[int, tuple[Of, int, int]] = {}  # address -> pool, rounded, requested

    def took(self, address: int, size_bytes: int, allocator: Counted) -> None:
        rounded = allocator.allocated_bytes - self.all.bytes.current
        pool = self.small if size_bytes <= SMALL_BYTES else self.large
        self._blocks[address] = pool, rounded, size_bytes
        num_splits, split_bytes = allocator.splits_by(address)
        for of in (self.all, pool):
            of.took(rounded, size_bytes)
            if split_bytes:
                of.split(num_splits, split_bytes)
        if self._max_split_bytes is not None and self._is_oversize(rounded):
            self.oversize_blocks.change(1)

    def giving_back(self, address: int, allocator: Counted) -> None:
        """Before the allocator frees a block."""
        pool, rounded, size_bytes = self._blocks.pop(address)
        num_splits, split_bytes = allocator.splits_by(address)
        for of in (self.all, pool):
            of.gave_back(rounded, size_bytes)
            if split_bytes:
                of.split(-num_splits, -split_bytes)
        if self._max_split_bytes is not None and self._is_oversize(rounded):
            self.oversize_blocks.change(-1)

    def reserved(self, change_bytes: int, *, is_small: bool, is_expandable: bool) -> None:
        """CUDA gave memory, or took it back."""
        sign = 1 if change_bytes > 0 else -1
        for of in (self.all, self.small if is_small else self.large):
            of.reserved.change(change_bytes)
            if not is_expandable:
                of.segments.change(sign)
        if not is_expandable and self._is_oversize(abs(change_bytes)):
            self.oversize_segments.change(sign)

    def _is_oversize(self, size_bytes: int) -> bool:
        return self._max_split_bytes is not None and size_bytes >= self._max_split_bytes

    def _every(self) -> list[Stat]:
        pools = (self.all, self.small, self.large)
        return [
            *(getattr(of, name) for of in pools for name in Of.__slots__),
            self.oversize_blocks,
            self.oversize_segments,
        ]

    def reset_peaks(self) -> None:
        for stat in self._every():
            stat.peak = stat.current

    def reset_accumulated(self) -> None:
        for stat in self._every():
            stat.allocated = stat.freed = 0

    def nested(self) -> dict[str, Any]:
        """As torch nests them."""
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
        }

    def _by_pool(self, name: str) -> dict[str, dict[str, int]]:
        pools = {"all": self.all, "small_pool": self.small, "large_pool": self.large}
        return {pool: getattr(of, name).as_dict() for pool, of in pools.items()}
