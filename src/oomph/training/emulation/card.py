"""The memory of the emulated GPU: storages are born and die -> the replica of the allocator.

A storage that is on the card holds a block from its birth until Python and autograd have dropped
it. Deaths come at any time and in any thread: they are noted, and take effect before the next
request or question. So nothing re-enters the allocator.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from oomph.training.emulation.message import out_of_memory_text
from oomph.training.emulation.statistics import Statistics


class Allocator(Protocol):
    """What the card asks of the replica of the caching allocator."""

    allocated_bytes: int
    requested_bytes: int

    @property
    def reserved_bytes(self) -> int: ...
    @property
    def num_retries(self) -> int: ...
    @property
    def num_cuda_mallocs(self) -> int: ...
    @property
    def num_cuda_frees(self) -> int: ...
    def malloc(self, size_bytes: int, stream: int = 0) -> int: ...
    def free(self, address: int) -> None: ...
    def empty_cache(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A card's allocator, and what must be known about it."""

    allocator: Allocator
    total_bytes: int
    shortage: type[Exception]  # what the allocator raises when there is no room
    free_bytes: Callable[[], int]  # what cudaMemGetInfo calls free
    segment_bytes: Callable[[int], int]  # a request -> what torch asks CUDA for
    current_stream: Callable[[], int]


class _Live(weakref.ref):  # type: ignore[type-arg]
    """A storage on the card: where its block is."""

    __slots__ = ("address", "key", "size_bytes")
    address: int
    key: int
    size_bytes: int


class Card:
    """One emulated GPU."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.statistics = Statistics()
        self.num_out_of_memory = 0
        self.live: dict[int, _Live] = {}  # by the address of the storage in C++
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        self._on_death = self._make_on_death()

    # ---- blocks ------------------------------------------------------------------------------

    def take(self, sizes: Iterable[int]) -> list[int]:
        """Blocks of these sizes: all of them, or torch.OutOfMemoryError and none."""
        taken: list[int] = []
        size_bytes = 0
        with self._lock:
            self._bury()
            try:
                for size_bytes in sizes:
                    taken.append(self._malloc(size_bytes))
            except self.memory.shortage:
                text = self._shortage_text(size_bytes)
                self._free(taken)
                self.num_out_of_memory += 1
                raise torch.OutOfMemoryError(text) from None
        return taken

    def give_back(self, addresses: Iterable[int]) -> None:
        with self._lock:
            self._bury()
            self._free(addresses)

    def _malloc(self, size_bytes: int) -> int:
        memory = self.memory
        address = memory.allocator.malloc(size_bytes, memory.current_stream())
        self.statistics.took(address, size_bytes, memory.allocator)
        return address

    def _free(self, addresses: Iterable[int]) -> None:
        allocator = self.memory.allocator
        for address in addresses:
            allocator.free(address)
            self.statistics.gave_back(address)

    def _bury(self) -> None:
        """Free the blocks of storages that have died."""
        freed = self._freed
        while freed:
            self._free((freed.popleft(),))

    def _shortage_text(self, size_bytes: int) -> str:
        memory = self.memory
        return out_of_memory_text(
            wanted_bytes=memory.segment_bytes(size_bytes),
            total_bytes=memory.total_bytes,
            free_bytes=memory.free_bytes(),
            allocated_bytes=memory.allocator.allocated_bytes,
            reserved_bytes=memory.allocator.reserved_bytes,
        )

    # ---- storages ----------------------------------------------------------------------------

    def hold(self, storage: Any, size_bytes: int, address: int) -> None:
        """From now on this block is the storage's, until it dies."""
        live: Any = _Live(storage, self._on_death)
        live.address, live.key, live.size_bytes = address, storage._cdata, size_bytes
        before = self.live.get(live.key)
        self.live[live.key] = live
        if before is not None:  # resized: a new block, and the old one is given back
            self._freed.append(before.address)

    def place(self, storage: Any) -> None:
        """Put a storage that exists on the card, or find room for its new size."""
        size_bytes = storage.nbytes()
        known = self.live.get(storage._cdata)
        if size_bytes and (known is None or known.size_bytes != size_bytes):
            self.hold(storage, size_bytes, *self.take((size_bytes,)))

    def _make_on_death(self) -> Callable[[Any], None]:
        # A closure: a bound method would be made anew for each storage.
        live, freed = self.live, self._freed

        def on_death(of_dead: weakref.ref[Any]) -> None:
            dead: Any = of_dead
            key, address = dead.key, dead.address
            # Another storage may be at the same place by now, or this one was resized.
            if live.get(key) is dead:
                del live[key]
                freed.append(address)

        return on_death

    def forget(self) -> None:
        """What is still alive is on no card any more."""
        self.live.clear()

    # ---- questions ---------------------------------------------------------------------------

    def settled(self) -> Allocator:
        """The allocator, after the deaths so far."""
        with self._lock:
            self._bury()
        return self.memory.allocator

    def empty_cache(self) -> None:
        with self._lock:
            self._bury()
            self.memory.allocator.empty_cache()
            self.statistics.note_reserved(self.memory.allocator.reserved_bytes)

    def free_and_total_bytes(self) -> tuple[int, int]:
        self.settled()
        return self.memory.free_bytes(), self.memory.total_bytes

    def reset_peaks(self) -> None:
        self.settled()
        self.statistics.reset_peaks()

    def memory_stats(self) -> dict[str, Any]:
        """What torch._C._cuda_memoryStats returns."""
        allocator = self.settled()
        return {
            **self.statistics.nested(),
            "num_alloc_retries": allocator.num_retries,
            "num_device_alloc": allocator.num_cuda_mallocs,
            "num_device_free": allocator.num_cuda_frees,
            "num_ooms": self.num_out_of_memory,
            "num_sync_all_streams": allocator.num_retries,
            "max_split_size": -1,
        }
