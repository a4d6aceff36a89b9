"""Account for the emulated GPU's memory: storages created and freed -> replica of the allocator.

A storage on the card holds a block from its creation until Python and autograd have dropped it.
Storages can die at any time and in any thread. Deaths are queued and take effect before the next
request or query, so nothing re-enters the allocator.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import torch

from oomph.errors import UsageError
from oomph.predicting.allocator import CachingAllocator, OutOfMemory
from oomph.predicting.allocator_settings import (
    NUM_ROUNDUP_INTERVALS,
    SMALL_BYTES,
    AllocatorSettings,
    parse_settings,
    round_size,
    segment_bytes,
)
from oomph.predicting.segments import SimulatedDevice
from oomph.pretending.card_history import Frames, History, Stack
from oomph.pretending.cuda import Gpu
from oomph.pretending.memory_stats import Statistics
from oomph.pretending.streams import Now
from oomph.units import GIB, KIB, MIB

Place = Literal["card", "host"]
# The arguments of _cuda_attach_out_of_memory_observer's callback: device, wanted, allowed, free.
Observer = Callable[[int, int, int, int], object]


class _Live(weakref.ref[torch.UntypedStorage]):
    """A weak reference to a storage on the card, with the address of its block."""

    __slots__ = ("address", "key", "size_bytes")
    address: int
    key: int
    size_bytes: int


class _Shortage(NamedTuple):
    """An out-of-memory error: its message and the arguments for observers."""

    text: str
    observed: tuple[int, int, int, int]


class Card(Gpu):
    """One emulated GPU. `settings_text` has the format of PYTORCH_ALLOC_CONF."""

    kind = "emulated"
    uuid = None  # so that watching looks for the GPU by its index
    instead = 'skipping it where torch.cuda.get_device_name() says "oomph\'s emulated GPU"'

    def __init__(self, total_bytes: int, settings_text: str, capability: tuple[int, int]) -> None:
        super().__init__(capability, total_bytes)
        self.recording = History()
        self.observers: list[Observer] = []
        self.num_out_of_memory = 0
        self.num_emptied = 0  # calls of torch.cuda.empty_cache()
        self.live: dict[int, _Live] = {}  # keyed by the storage's address in C++
        self._blocks: dict[int, tuple[int, int]] = {}  # address -> requested bytes, stream
        self._owners: list[tuple[int, int, bool]] = []  # per segment: address, stream, is small
        self._freed: deque[int] = deque()
        self._lock = threading.Lock()
        self._on_death = self._make_on_death()
        self._stack: Stack | None = None  # of the current request
        self._request = (0, True)  # stream of the current request, and whether it is small
        self._set_up(settings_text)

    def _set_up(self, settings_text: str) -> None:
        self._settings_text, self._settings = settings_text, parse_settings(settings_text)
        self.device = SimulatedDevice(self.total_bytes)
        self.device.note = self._note
        self.allocator = CachingAllocator(self._settings, self.device)
        self.statistics = Statistics(self._settings.max_split_bytes)

    def check(self, device: Any) -> None:
        place_of(device)

    def answers(self) -> dict[str, Any]:
        return {}

    # ---- blocks ------------------------------------------------------------------------------

    def take(self, sizes: Iterable[int], stream: int | None = None) -> list[int]:
        """Allocate blocks of these sizes: all of them, or none and raise torch.OutOfMemoryError."""
        taken = self._take(sizes, stream)
        if isinstance(taken, _Shortage):
            for observer in tuple(self.observers):  # outside the lock: observers take snapshots
                observer(*taken.observed)
            raise torch.OutOfMemoryError(taken.text)
        return taken

    def _take(self, sizes: Iterable[int], stream: int | None) -> list[int] | _Shortage:
        taken: list[int] = []
        size_bytes = 0
        stack = self.recording.stack()  # before the lock: it creates objects, which may free others
        with self._lock:
            self._free_dead()
            self._stack = stack
            if stream is None:
                stream = Now.stream
            try:
                for size_bytes in sizes:
                    taken.append(self._malloc(size_bytes, stream))
            except OutOfMemory:
                shortage = self._run_out(size_bytes, stream)
                self._free(taken)
                return shortage
            finally:
                self._stack = None
        return taken

    def give_back(self, addresses: Iterable[int]) -> None:
        with self._lock:
            self._free_dead()
            self._free(addresses)

    def take_raw(self, size_bytes: int, stream: int) -> int:
        return self.take((size_bytes,), stream)[0] if size_bytes else 0

    def give_back_raw(self, address: int) -> None:
        if not address:
            return
        with self._lock:
            self._free_dead()
            if address not in self._blocks:
                raise RuntimeError(f"invalid device pointer: {address:#x}")
            self._free((address,))

    def _malloc(self, size_bytes: int, stream: int) -> int:
        self._request = stream, size_bytes <= SMALL_BYTES
        address = self.allocator.malloc(size_bytes, stream)
        self._blocks[address] = size_bytes, stream
        self.statistics.took(address, size_bytes, self.allocator)
        if self.recording.is_on:
            self.recording.took(address, size_bytes, stream, self._stack)
        return address

    def _free(self, addresses: Iterable[int]) -> None:
        allocator = self.allocator
        for address in addresses:
            size_bytes, stream = self._blocks.pop(address)
            self.statistics.giving_back(address, allocator)
            allocator.free(address)
            if self.recording.has_begun:
                self.recording.gave_back(address, size_bytes, stream)

    def _note(self, action: str, address: int, size_bytes: int) -> None:
        """Record that CUDA gave memory or got it back."""
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
        if self.recording.is_on:
            self.recording.reserved(action, address, size_bytes, stream, self._stack)

    def _free_dead(self) -> None:
        """Free the blocks of storages that have died."""
        freed = self._freed
        while freed:
            self._free((freed.popleft(),))

    def _run_out(self, size_bytes: int, stream: int) -> _Shortage:
        allocator, free_bytes = self.allocator, self.device.free_bytes
        rounded = round_size(size_bytes, self._settings.divisions_by_interval())
        wanted_bytes = segment_bytes(rounded, self._settings.large_segment_bytes)
        allowed_bytes = allocator.allowed_bytes
        self.num_out_of_memory += 1
        self.recording.ran_out(free_bytes, rounded, stream, self._stack)
        text = out_of_memory_text(
            wanted_bytes=wanted_bytes,
            total_bytes=self.total_bytes,
            free_bytes=free_bytes,
            allocated_bytes=allocator.allocated_bytes,
            reserved_bytes=allocator.reserved_bytes,
            allowed_bytes=allowed_bytes,
        )
        allowed_or_total = self.total_bytes if allowed_bytes is None else allowed_bytes
        return _Shortage(text, (0, wanted_bytes, allowed_or_total, free_bytes))

    # ---- storages ----------------------------------------------------------------------------

    def hold(self, storage: torch.UntypedStorage, size_bytes: int, address: int) -> None:
        """Assign a block to a storage until the storage dies."""
        live = _Live(storage, self._on_death)
        live.address, live.key, live.size_bytes = address, storage._cdata, size_bytes
        before = self.live.get(live.key)
        self.live[live.key] = live
        if before is not None and before.size_bytes:  # resized: free the old block
            self._free_later(before.address)

    def hold_nothing(self, storage: torch.UntypedStorage) -> None:
        """Put an empty storage on the card, without a block."""
        if storage._cdata not in self.live:
            self.hold(storage, 0, -1)

    def _free_later(self, address: int) -> None:
        if self.recording.is_on:
            self.recording.died(address)
        self._freed.append(address)

    def place(self, storage: torch.UntypedStorage) -> None:
        """Put an existing storage on the card, or find room for its new size."""
        size_bytes = storage.nbytes()
        known = self.live.get(storage._cdata)
        if not size_bytes:
            self.hold_nothing(storage)
        elif known is None or known.size_bytes != size_bytes:
            self.hold(storage, size_bytes, *self.take((size_bytes,)))

    def _make_on_death(self) -> Callable[[weakref.ref[torch.UntypedStorage]], None]:
        # A closure, because a bound method would be created again for each storage.
        live, free_later = self.live, self._free_later

        def on_death(dead: Any) -> None:
            key, address = dead.key, dead.address
            # By now another storage may have this address, or this storage was resized.
            if live.get(key) is dead:
                del live[key]
                if address >= 0:  # else it was empty
                    free_later(address)

        return on_death

    def forget(self) -> None:
        """Forget every storage that is still alive: none is on a card any more."""
        self.live.clear()

    # ---- queries from torch ------------------------------------------------------------------

    def settled(self) -> CachingAllocator:
        """Return the allocator after processing all deaths so far."""
        with self._lock:
            self._free_dead()
        return self.allocator

    def empty_cache(self) -> None:
        stack = self.recording.stack()
        with self._lock:
            self._free_dead()
            self._stack = stack
            self.allocator.empty_cache()
            self._stack = None
            self.num_emptied += 1

    def limit(self, fraction_ratio: float) -> None:
        self.settled().limit(fraction_ratio)

    def fraction(self) -> float:
        allowed_bytes = self.allocator.allowed_bytes
        return 1.0 if allowed_bytes is None else allowed_bytes / self.total_bytes

    def configure(self, text: str) -> None:
        """Change the allocator's settings; only possible while it holds nothing."""
        parse_settings(text)
        if self.settled().reserved_bytes:
            raise UsageError(
                "the emulated GPU cannot change its allocator's settings now",
                because="it has handed out memory already, under the settings it began with",
                attempt='oomph.emulated_gpu("2GiB", allocator="expandable_segments:True"), '
                "or PYTORCH_ALLOC_CONF",
            )
        self._set_up(text)

    def free_and_total_bytes(self) -> tuple[int, int]:
        self.settled()
        return self.device.free_bytes, self.total_bytes

    def reset_peaks(self) -> None:
        self.settled()
        self.statistics.reset_peaks()

    def reset_accumulated(self) -> None:
        self.statistics.reset_accumulated()

    def memory_stats(self) -> dict[str, Any]:
        allocator = self.settled()
        return {
            **self.statistics.nested(),
            "num_alloc_retries": allocator.num_retries,
            "num_device_alloc": allocator.num_cuda_mallocs,
            "num_device_free": allocator.num_cuda_frees,
            "num_ooms": self.num_out_of_memory,
            "num_sync_all_streams": allocator.num_retries + self.num_emptied,
        }

    def history(self) -> dict[str, Any]:
        recording = self.recording
        return {
            "_cuda_record_memory_history": recording.record,
            "_cuda_record_memory_history_legacy": recording.record_as_before,
            "_cuda_isHistoryEnabled": lambda: recording.is_on,
            "_cuda_setMemoryMetadata": recording.set_metadata,
            "_cuda_getMemoryMetadata": lambda: recording.metadata,
            "_cuda_allocationTraceback": self._traceback_of,
            "_cuda_attach_out_of_memory_observer": self.observers.append,
            "_accelerator_setAllocatorSettings": self.configure,
        }

    def snapshot(self, asked: tuple[int, int, bool] | None = None) -> dict[str, Any]:
        """Describe a pool ((0, 0) contains everything), with traces if asked for."""
        first, second, has_traces = asked or (0, 0, True)
        settings = _recorded(self._settings, self._settings_text)
        with self._lock:
            self._free_dead()
            held = self.allocator.held_segments() if (first, second) == (0, 0) else ()
            return self.recording.snapshot(held, settings, has_traces=has_traces)

    def _traceback_of(self, pointer: int) -> Frames | None:
        """Return where the tensor with this data_ptr() was allocated."""
        for live in tuple(self.live.values()):
            storage = live()
            if storage is not None and storage.data_ptr() == pointer:
                return self.recording.frames_at(live.address)
        return None

    # ---- random numbers: the CPU generator's -------------------------------------------------

    def random_state(self) -> torch.Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: torch.Tensor) -> None:
        torch.set_rng_state(state)


def place_of(device: Any) -> Place | None:
    """Return the place that a device argument names: card, host, or None for neither (`meta`)."""
    if device is None:
        return None
    if isinstance(device, int):
        device = torch.device("cuda", device)
    elif isinstance(device, str):
        device = torch.device(device)
    if device.type == "cuda":
        if device.index not in (None, 0):
            raise RuntimeError(
                "CUDA error: invalid device ordinal\n"
                f"oomph emulates one GPU, cuda:0; there is no {device}"
            )
        return "card"
    return "host" if device.type == "cpu" else None


def _recorded(settings: AllocatorSettings, text: str) -> dict[str, object]:
    """Return the settings in the form a snapshot uses."""
    divisions = settings.divisions_by_interval() or (0,) * NUM_ROUNDUP_INTERVALS
    return {
        "PYTORCH_CUDA_ALLOC_CONF": text,
        "max_split_size": -1 if settings.max_split_bytes is None else settings.max_split_bytes,
        "garbage_collection_threshold": settings.gc_threshold_ratio,
        "expandable_segments": settings.expandable_segments,
        "pinned_num_register_threads": 1,
        "release_lock_on_cudamalloc": False,
        "pinned_use_cuda_host_register": False,
        "graph_capture_record_stream_reuse": False,
        "roundup_power2_divisions": {str(1 << at): one for at, one in enumerate(divisions)},
    }


# ---- the text of torch.OutOfMemoryError, as in torch 2.9 and later -------------------------------
# The wording is from c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc); sizes are
# formatted as by its format_size.


def out_of_memory_text(
    *,
    wanted_bytes: int,
    total_bytes: int,
    free_bytes: int,
    allocated_bytes: int,
    reserved_bytes: int,
    allowed_bytes: int | None = None,
) -> str:
    """Return the whole message. `wanted_bytes` is the size of the segment that CUDA refused."""
    allowed = "" if allowed_bytes is None else f"{format_size(allowed_bytes)} allowed; "
    return (
        f"CUDA out of memory. Tried to allocate {format_size(wanted_bytes)}. "
        f"GPU 0 has a total capacity of {format_size(total_bytes)} "
        f"of which {format_size(free_bytes)} is free. "
        "Including non-PyTorch memory, this process has "
        f"{format_size(total_bytes - free_bytes)} memory in use. {allowed}"
        f"Of the allocated memory {format_size(allocated_bytes)} is allocated by PyTorch, "
        f"and {format_size(reserved_bytes - allocated_bytes)} is reserved by PyTorch but "
        "unallocated. If reserved but unallocated memory is large try setting "
        "PYTORCH_ALLOC_CONF=expandable_segments:True to avoid fragmentation.  See documentation "
        "for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def format_size(size_bytes: int) -> str:
    """Format a size as c10's format_size does.

    >>> format_size(512), format_size(20 * 2**20), format_size(3 * 2**29)
    ('512 bytes', '20.00 MiB', '1.50 GiB')
    """
    if size_bytes <= KIB:
        return f"{size_bytes} bytes"
    if size_bytes <= MIB:
        return f"{size_bytes / KIB:.2f} KiB"
    if size_bytes <= GIB:
        return f"{size_bytes / MIB:.2f} MiB"
    return f"{size_bytes / GIB:.2f} GiB"
