"""What an emulated GPU is asked for, while it is asked."""

from __future__ import annotations

from typing import Any

from oomph.pretending.emulated import EmulatedGpu


class Requests:
    """Every request and free from now on: i + 1 asks for sizes[i], -(i + 1) frees it."""

    def __init__(self, gpu: EmulatedGpu) -> None:
        self.sizes: list[int] = []
        self.events: list[int] = []
        self._numbers: dict[int, int] = {}
        allocator: Any = gpu._card.allocator
        self._malloc, self._free = allocator.malloc, allocator.free
        allocator.malloc, allocator.free = self.malloc, self.free

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        address: int = self._malloc(size_bytes, stream)
        self.sizes.append(size_bytes)
        self._numbers[address] = len(self.sizes)
        self.events.append(len(self.sizes))
        return address

    def free(self, address: int) -> None:
        self.events.append(-self._numbers.pop(address))
        self._free(address)
