"""The replica as a recorder: its own traces, in the form in which torch writes its snapshots."""

from __future__ import annotations

from typing import Any

from oomph.predicting.allocator import CachingAllocator, OutOfMemory
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.segments import PAGE_BYTES, UNLIMITED_BYTES, Block, SimulatedDevice

_STATES = {"live": "active_allocated", "pending": "active_pending_free", "free": "inactive"}


class _RecordingDevice(SimulatedDevice):
    def __init__(self, free_bytes: int, recorder: Recorder) -> None:
        super().__init__(free_bytes)
        self._recorder = recorder

    def malloc(self, size_bytes: int) -> int | None:
        address = super().malloc(size_bytes)
        if address is not None:
            self._recorder.note("segment_alloc", address, size_bytes)
        return address

    def free(self, address: int, size_bytes: int) -> None:
        super().free(address, size_bytes)
        self._recorder.note("segment_free", address, size_bytes)

    def map(self, address: int, size_bytes: int) -> bool:
        is_mapped = super().map(address, size_bytes)
        if is_mapped:
            self._recorder.note("segment_map", address, size_bytes)
        return is_mapped

    def unmap(self, address: int, size_bytes: int) -> None:
        self.free_bytes += size_bytes
        self._recorder.note("segment_unmap", address, size_bytes)


class Recorder(CachingAllocator):
    """An allocator that keeps a trace."""

    def __init__(
        self, settings: AllocatorSettings | None = None, free_bytes: int = UNLIMITED_BYTES
    ) -> None:
        self.trace: list[dict[str, Any]] = []
        self._num_calls = 0
        self._stream = 0
        self._owners: dict[int, int] = {}  # the stream of each page that CUDA gave
        super().__init__(settings, _RecordingDevice(free_bytes, self))

    def note(self, action: str, address: int, size_bytes: int, **more: int) -> None:
        frames = [{"name": "call", "line": self._num_calls}]
        pages = range(address, address + size_bytes, PAGE_BYTES)
        if action in ("segment_alloc", "segment_map"):
            self._owners.update(dict.fromkeys(pages, self._stream))
        is_release = action in ("segment_free", "segment_unmap")
        stream = self._owners[address] if is_release else self._stream
        entry = {"action": action, "addr": address, "size": size_bytes, "stream": stream}
        self.trace.append({**entry, "frames": frames, **more})

    def malloc(self, size_bytes: int, stream: int = 0) -> int:
        self._num_calls += 1
        self._stream = stream
        try:
            address = super().malloc(size_bytes, stream)
        except OutOfMemory as error:
            self.note("oom", 0, size_bytes, device_free=error.shortage.device_free_bytes)
            raise
        self.note("alloc", address, size_bytes)
        return address

    def free(self, address: int) -> None:
        self.free_requested(address)
        self.free_completed(address)

    def free_requested(self, address: int) -> None:
        self._num_calls += 1
        block = self._live[address]
        super().free_requested(address)
        self.note("free_requested", address, block.requested)

    def free_completed(self, address: int) -> None:
        self.note("free_completed", address, self._pending[address].requested)
        super().free_completed(address)

    def empty_cache(self) -> None:
        self._num_calls += 1
        super().empty_cache()

    def segments(self) -> list[dict[str, Any]]:
        """As the snapshot has them: by address, one for each mapped range."""
        found = (*self._live.values(), *self._pending.values(), *self._free_blocks())
        heads = [block for block in found if block.prev is None or not block.prev.is_mapped]
        return [self._segment(head) for head in sorted(heads, key=lambda head: head.address)]

    def _free_blocks(self) -> list[Block]:
        return [e[2] for pair in self._pools.values() for pool in pair for e in pool.free]

    def _segment(self, head: Block) -> dict[str, Any]:
        blocks = []
        block: Block | None = head
        while block is not None and block.is_mapped:
            blocks.append(
                {
                    "size": block.size,
                    "requested_size": block.requested,
                    "state": _STATES[self._state(block)],
                }
            )
            block = block.next
        return {
            "address": head.address,
            "total_size": sum(block["size"] for block in blocks),
            "stream": head.pool.stream,
            "segment_type": "small" if head.pool.is_small else "large",
            "is_expandable": head.reservation is not None,
            "blocks": blocks,
        }

    def _state(self, block: Block) -> str:
        if block.is_free:
            return "free"
        return "pending" if block.address in self._pending else "live"
