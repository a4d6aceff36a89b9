"""What torch's allocator asks of CUDA, and a GPU that is a number of bytes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from oomph.units import MIB, TIB

# More than any GPU has. It is finite because expandable segments reserve address space by it.
UNLIMITED_BYTES = 1024 * TIB
# cudaMalloc and the virtual memory calls both hand out memory in pages of this size.
PAGE_BYTES = 2 * MIB


class Device(Protocol):
    """What the allocator asks of CUDA."""

    @property
    def total_bytes(self) -> int:
        """Of the whole GPU, whoever holds it: memory fractions and address space go by it."""

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo calls free."""

    def malloc(self, size_bytes: int) -> int | None:
        """cudaMalloc: an address, or None if there is no room."""

    def free(self, address: int, size_bytes: int) -> None:
        """cudaFree."""

    def reserve(self, size_bytes: int) -> int:
        """cuMemAddressReserve: addresses for an expandable segment, with no memory behind them."""

    def map(self, address: int, size_bytes: int) -> bool:
        """cuMemCreate and cuMemMap: memory behind a part of it; False if there is no room."""

    def unmap(self, address: int, size_bytes: int) -> None:
        """cuMemUnmap and cuMemRelease."""


class SimulatedDevice:
    """A GPU of so many free bytes, which hands out addresses upwards and never one twice."""

    # Told of all that is taken and given back: as a snapshot calls it, where, how many bytes.
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
