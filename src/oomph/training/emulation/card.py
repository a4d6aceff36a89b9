"""The memory of the emulated GPU: storages are born and die -> the replica of the allocator.

A storage that is on the card holds a block from its birth until Python and autograd have dropped
it. Deaths come at any time and in any thread: they are noted, and take effect before the next
request or question. So nothing re-enters the allocator.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from oomph.errors import UsageError
from oomph.training.emulation.history import History, Stack
from oomph.training.emulation.message import out_of_memory_text
from oomph.training.emulation.statistics import SMALL_BYTES, Statistics


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
    @property
    def allowed_bytes(self) -> int | None: ...
    def malloc(self, size_bytes: int, stream: int = 0) -> int: ...
    def free(self, address: int) -> None: ...
    def empty_cache(self) -> None: ...
    def limit(self, fraction_ratio: float) -> None: ...
    def held_segments(self) -> Any: ...
    def splits_by(self, address: int) -> tuple[int, int]: ...


class Device(Protocol):
    """What the allocator takes memory from."""

    note: Callable[[str, int, int], None] | None

    @property
    def free_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """A card's allocator, and what must be known about it."""

    allocator: Allocator
    device: Device
    total_bytes: int
    shortage: type[Exception]  # what the allocator raises when there is no room
    rounded_bytes: Callable[[int], int]  # a request -> the block that serves it
    segment_bytes: Callable[[int], int]  # a request -> what torch asks CUDA for
    current_stream: Callable[[], int]
    settings: Mapping[str, Any]  # as a snapshot has them
    max_split_bytes: int | None
    with_settings: Callable[[str], Memory]  # a new one, for a text of PYTORCH_ALLOC_CONF


# What _cuda_attach_out_of_memory_observer is given: device, wanted, allowed, free.
Observer = Callable[[int, int, int, int], object]


class _Live(weakref.ref):  # type: ignore[type-arg]
    """A storage on the card: where its block is."""

    __slots__ = ("address", "key", "size_bytes")
    address: int
    key: int
    size_bytes: int


class _Shortage(NamedTuple):
    """Out of memory: the text, and what observers are told."""

    text: str
    told: tuple[int, int, int, int]


class Card:
    """One emulated GPU."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.statistics = Statistics(memory.max_split_bytes)
        self.history = History()
        self.observers: list[Observer] = []
        self.num_out_of_memory = 0
        self.num_emptied = 0  # by torch.cuda.empty_cache()
        self.live: dict[int, _Live] = {}  # by the address of the storage in C++
        self._blocks: dict[int, tuple[int, int]] = {}  # address -> requested bytes, stream
        self._owners: list[tuple[int, int, bool]] = []  # of segments: address, stream, is small
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        self._on_death = self._make_on_death()
        self._stack: Stack | None = None  # of the request in progress
        self._request = (0, True)  # its stream, and whether it is small
        memory.device.note = self._note

    # ---- blocks ------------------------------------------------------------------------------

    def take(self, sizes: Iterable[int], stream: int | None = None) -> list[int]:
        """Blocks of these sizes: all of them, or torch.OutOfMemoryError and none."""
        taken = self._take(sizes, stream)
        if isinstance(taken, _Shortage):
            for observer in tuple(self.observers):  # without the lock: they take snapshots
                observer(*taken.told)
            raise torch.OutOfMemoryError(taken.text)
        return taken

    def _take(self, sizes: Iterable[int], stream: int | None) -> list[int] | _Shortage:
        taken: list[int] = []
        size_bytes = 0
        stack = self.history.stack()  # before the lock: it makes objects, and some may die
        with self._lock:
            self._bury()
            self._stack = stack
            if stream is None:
                stream = self.memory.current_stream()
            try:
                for size_bytes in sizes:
                    taken.append(self._malloc(size_bytes, stream))
            except self.memory.shortage:
                shortage = self._run_out(size_bytes, stream)
                self._free(taken)
                return shortage
            finally:
                self._stack = None
        return taken

    def give_back(self, addresses: Iterable[int]) -> None:
        with self._lock:
            self._bury()
            self._free(addresses)

    def give_back_raw(self, address: int) -> None:
        """torch.cuda.caching_allocator_delete."""
        with self._lock:
            self._bury()
            if address not in self._blocks:
                raise RuntimeError(f"invalid device pointer: {address:#x}")
            self._free((address,))

    def _malloc(self, size_bytes: int, stream: int) -> int:
        memory = self.memory
        self._request = stream, size_bytes <= SMALL_BYTES
        address = memory.allocator.malloc(size_bytes, stream)
        self._blocks[address] = size_bytes, stream
        self.statistics.took(address, size_bytes, memory.allocator)
        if self.history.is_on:
            self.history.took(address, size_bytes, stream, self._stack)
        return address

    def _free(self, addresses: Iterable[int]) -> None:
        allocator = self.memory.allocator
        for address in addresses:
            size_bytes, stream = self._blocks.pop(address)
            self.statistics.giving_back(address, allocator)
            allocator.free(address)
            if self.history.has_begun:
                self.history.gave_back(address, size_bytes, stream)

    def _note(self, action: str, address: int, size_bytes: int) -> None:
        """CUDA gave memory, or got it back."""
        is_taken = action in ("segment_alloc", "segment_map")
        if is_taken:
            stream, is_small = self._request
            insort(self._owners, (address, stream, is_small))
        else:
            at = bisect_right(self._owners, address, key=lambda owner: owner[0]) - 1
            _, stream, is_small = self._owners[at]
            if action == "segment_free":
                del self._owners[at]
        self.statistics.reserved(
            size_bytes if is_taken else -size_bytes,
            is_small=is_small,
            is_expandable=action in ("segment_map", "segment_unmap"),
        )
        if self.history.is_on:
            self.history.reserved(action, address, size_bytes, stream, self._stack)

    def _bury(self) -> None:
        """Free the blocks of storages that have died."""
        freed = self._freed
        while freed:
            self._free((freed.popleft(),))

    def _run_out(self, size_bytes: int, stream: int) -> _Shortage:
        memory, allocator = self.memory, self.memory.allocator
        free_bytes, allowed_bytes = memory.device.free_bytes, allocator.allowed_bytes
        wanted_bytes = memory.segment_bytes(size_bytes)
        self.num_out_of_memory += 1
        self.history.ran_out(free_bytes, memory.rounded_bytes(size_bytes), stream, self._stack)
        text = out_of_memory_text(
            wanted_bytes=wanted_bytes,
            total_bytes=memory.total_bytes,
            free_bytes=free_bytes,
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            allowed_bytes=allowed_bytes,
        )
        allowed_or_total = memory.total_bytes if allowed_bytes is None else allowed_bytes
        return _Shortage(text, (0, wanted_bytes, allowed_or_total, free_bytes))

    # ---- storages ----------------------------------------------------------------------------

    def hold(self, storage: Any, size_bytes: int, address: int) -> None:
        """From now on this block is the storage's, until it dies."""
        live: Any = _Live(storage, self._on_death)
        live.address, live.key, live.size_bytes = address, storage._cdata, size_bytes
        before = self.live.get(live.key)
        self.live[live.key] = live
        if before is not None and before.size_bytes:  # resized: the old block is given back
            self._bury_later(before.address)

    def hold_nothing(self, storage: Any) -> None:
        """An empty storage is on the card, too, without a block."""
        if storage._cdata not in self.live:
            self.hold(storage, 0, -1)

    def _bury_later(self, address: int) -> None:
        if self.history.is_on:
            self.history.died(address)
        self._freed.append(address)

    def place(self, storage: Any) -> None:
        """Put a storage that exists on the card, or find room for its new size."""
        size_bytes = storage.nbytes()
        known = self.live.get(storage._cdata)
        if not size_bytes:
            self.hold_nothing(storage)
        elif known is None or known.size_bytes != size_bytes:
            self.hold(storage, size_bytes, *self.take((size_bytes,)))

    def _make_on_death(self) -> Callable[[Any], None]:
        # A closure: a bound method would be made anew for each storage.
        live, freed, history = self.live, self._freed, self.history

        def on_death(of_dead: weakref.ref[Any]) -> None:
            dead: Any = of_dead
            key, address = dead.key, dead.address
            # Another storage may be at the same place by now, or this one was resized.
            if live.get(key) is dead:
                del live[key]
                if address < 0:  # it was empty
                    return
                if history.is_on:
                    history.died(address)
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
        stack = self.history.stack()
        with self._lock:
            self._bury()
            self._stack = stack
            self.memory.allocator.empty_cache()
            self._stack = None
            self.num_emptied += 1

    def limit(self, fraction_ratio: float) -> None:
        """torch.cuda.set_per_process_memory_fraction."""
        self.settled().limit(fraction_ratio)

    def fraction(self) -> float:
        allowed_bytes = self.memory.allocator.allowed_bytes
        return 1.0 if allowed_bytes is None else allowed_bytes / self.memory.total_bytes

    def configure(self, text: str) -> None:
        """Other settings of the allocator, while it holds nothing."""
        memory = self.memory.with_settings(text)
        if self.settled().reserved_bytes:
            raise UsageError(
                "the emulated GPU cannot change its allocator's settings now",
                because="it has handed out memory already, under the settings it began with",
                attempt='oomph.emulated_gpu("2GiB", allocator="expandable_segments:True"), '
                "or PYTORCH_ALLOC_CONF",
            )
        memory.device.note = self._note
        self.memory, self.statistics = memory, Statistics(memory.max_split_bytes)

    def free_and_total_bytes(self) -> tuple[int, int]:
        self.settled()
        return self.memory.device.free_bytes, self.memory.total_bytes

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
            "num_oom_rejections": 0,
            "num_ooms": self.num_out_of_memory,
            "num_sync_all_streams": allocator.num_retries + self.num_emptied,
        }

    def snapshot(self, asked: tuple[int, int, bool] | None = None) -> dict[str, Any]:
        """What torch._C._cuda_memorySnapshot returns: of a pool (all is in (0, 0)), with traces?"""
        first, second, has_traces = asked or (0, 0, True)
        with self._lock:
            self._bury()
            held = self.memory.allocator.held_segments() if (first, second) == (0, 0) else ()
            return self.history.snapshot(held, self.memory.settings, has_traces=has_traces)

    def traceback_of(self, pointer: int) -> Any:
        """Where the tensor with this data_ptr() was allocated."""
        for live in tuple(self.live.values()):
            storage = live()
            if storage is not None and storage.data_ptr() == pointer:
                return self.history.frames_at(live.address)
        return None
