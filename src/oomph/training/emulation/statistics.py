"""What torch.cuda.memory_stats counts: now, at most, in all taken and in all given back.

Blocks are told apart by pool, as torch does. Segments and their unused rests are not counted:
memory_stats says 0 of them, and reserved memory is of both pools together.
"""

from __future__ import annotations

from typing import Any, Protocol

from oomph.units import MIB

_SMALL_BYTES = MIB  # kSmallSize of c10/cuda/CUDACachingAllocator.cpp: the small pool's largest


class Counted(Protocol):
    """What is read from the allocator after each request."""

    allocated_bytes: int

    @property
    def reserved_bytes(self) -> int: ...


class Stat:
    """One figure of memory_stats."""

    __slots__ = ("current", "peak", "taken")

    def __init__(self) -> None:
        self.current = self.peak = self.taken = 0

    def add(self, amount: int) -> None:
        self.taken += amount
        self.current = current = self.current + amount
        if current > self.peak:
            self.peak = current

    def as_dict(self) -> dict[str, int]:
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.taken,
            "freed": self.taken - self.current,
        }


class Of:
    """Blocks, their bytes, and the bytes that were asked for."""

    __slots__ = ("blocks", "bytes", "requested")

    def __init__(self) -> None:
        self.blocks, self.bytes, self.requested = Stat(), Stat(), Stat()

    def took(self, rounded: int, requested: int) -> None:
        self.blocks.add(1)
        self.bytes.add(rounded)
        self.requested.add(requested)

    def gave_back(self, rounded: int, requested: int) -> None:
        self.blocks.current -= 1
        self.bytes.current -= rounded
        self.requested.current -= requested

    def reset_peaks(self) -> None:
        for stat in (self.blocks, self.bytes, self.requested):
            stat.peak = stat.current


class Statistics:
    """Of one card."""

    def __init__(self) -> None:
        self.all, self.small, self.large = Of(), Of(), Of()
        self.reserved = Stat()
        self._blocks: dict[int, tuple[Of, int, int]] = {}  # address -> pool, rounded, requested

    def took(self, address: int, size_bytes: int, allocator: Counted) -> None:
        rounded = allocator.allocated_bytes - self.all.bytes.current
        pool = self.small if rounded <= _SMALL_BYTES else self.large
        self._blocks[address] = pool, rounded, size_bytes
        self.all.took(rounded, size_bytes)
        pool.took(rounded, size_bytes)
        self.note_reserved(allocator.reserved_bytes)

    def gave_back(self, address: int) -> None:
        pool, rounded, size_bytes = self._blocks.pop(address)
        self.all.gave_back(rounded, size_bytes)
        pool.gave_back(rounded, size_bytes)

    def note_reserved(self, reserved_bytes: int) -> None:
        """A request may have given back the cache before it took a segment."""
        reserved = self.reserved
        change = reserved_bytes - reserved.current
        if change > 0:
            reserved.add(change)
        elif change:
            reserved.current = reserved_bytes

    def reset_peaks(self) -> None:
        for of in (self.all, self.small, self.large):
            of.reset_peaks()
        self.reserved.peak = self.reserved.current

    def nested(self) -> dict[str, Any]:
        """As torch nests them."""
        blocks, size, requested = (self._by_pool(name) for name in Of.__slots__)
        nothing = Stat().as_dict()
        of_no_pool = {"all": nothing, "small_pool": nothing, "large_pool": nothing}
        return {
            "allocation": blocks,
            "active": blocks,
            "allocated_bytes": size,
            "active_bytes": size,
            "requested_bytes": requested,
            "reserved_bytes": {**of_no_pool, "all": self.reserved.as_dict()},
            "segment": of_no_pool,
            "inactive_split": of_no_pool,
            "inactive_split_bytes": of_no_pool,
            "oversize_allocations": nothing,
            "oversize_segments": nothing,
        }

    def _by_pool(self, name: str) -> dict[str, dict[str, int]]:
        pools = {"all": self.all, "small_pool": self.small, "large_pool": self.large}
        return {pool: getattr(of, name).as_dict() for pool, of in pools.items()}
