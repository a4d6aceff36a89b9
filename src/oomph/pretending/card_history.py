"""Memory events on the card -> the events and state in torch's memory snapshots.

Fields, their order and the order of events match torch 2.13 (`record_trace` and `snapshot` in
c10/cuda/CUDACachingAllocator.cpp, torch/csrc/cuda/memory_snapshot.cpp), so torch's viewer and other
readers of its snapshot files can read these. All frames are Python frames.
"""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Iterable
from types import CodeType, FrameType
from typing import Any

from oomph.predicting.allocator import HeldSegment, PlacedBlock

Frames = list[dict[str, Any]]
Stack = tuple[tuple[CodeType, int], ...]  # code object and position in it, innermost first

_CONTEXTS = (None, "state", "alloc", "all")
# These modules stand in for torch's C++ code, so their frames are not part of the program.
_OWN = ("oomph.pretending.", "oomph.rehearsing.")
_STATES = {"live": "active_allocated", "pending": "active_pending_free", "free": "inactive"}


class _OfThread(threading.local):
    metadata = ""


class History:
    """The recording that torch.cuda.memory._record_memory_history switches on."""

    def __init__(self) -> None:
        self.is_on = self.has_begun = False
        self._keeps = 0  # 1: stacks of live allocations, 2: also of their events, 3: also of frees
        self._skipped: frozenset[str] = frozenset()
        self._events: deque[tuple[Any, ...]] = deque()
        self._annotations: deque[dict[str, Any]] = deque()
        self._stacks: dict[int, Stack] = {}  # of allocated blocks, keyed by address
        self._segment_stacks: dict[int, Stack] = {}
        self._deaths: dict[int, tuple[Stack | None, int]] = {}
        self._frames: dict[Stack, Frames] = {}
        self._here = _OfThread()

    # ---- switches ----------------------------------------------------------------------------

    def record(
        self,
        enabled: str | None,
        context: str | None,
        stacks: str,
        max_entries: int,
        clear_history: bool = False,
        _compile_context: bool = False,
        _annotations: bool = False,
        skip_actions: Iterable[str] = (),
    ) -> None:
        """Stand in for torch._C._cuda_record_memory_history."""
        if enabled not in (None, "state", "all"):
            raise RuntimeError("expected state to be 'state', 'all', or None")
        if context not in _CONTEXTS:
            raise RuntimeError("expected context to be 'state', 'alloc', 'all', or None")
        if stacks not in ("python", "all"):
            raise RuntimeError("expected stacks to be 'python', or 'all'")
        self._switch(
            is_on=enabled is not None,
            keeps=_CONTEXTS.index(context),
            max_entries=max_entries if enabled == "all" else 1,
            clears=clear_history,
        )
        self._skipped = frozenset(skip_actions)

    def record_as_before(
        self,
        enabled: bool,
        record_context: bool = True,
        max_entries: int = 1,
        record_context_of_events: bool = False,
        _record_context_cpp: bool = False,
        clear_history: bool = False,
        *_: Any,
    ) -> None:
        """Stand in for _cuda_record_memory_history_legacy: `_record_memory_history(True)`."""
        keeps = 2 if record_context_of_events else int(record_context)
        self._switch(is_on=enabled, keeps=keeps, max_entries=max_entries, clears=clear_history)
        self._skipped = frozenset()

    def _switch(self, *, is_on: bool, keeps: int, max_entries: int, clears: bool) -> None:
        self.is_on, self.has_begun = is_on, True
        self._keeps = keeps if is_on else 0
        events = () if clears or not is_on else self._events
        self._events = deque(events, maxlen=min(max(max_entries, 1), sys.maxsize))
        if clears or not is_on:
            self._annotations.clear()

    @property
    def metadata(self) -> str:
        return self._here.metadata

    def set_metadata(self, text: str) -> None:
        self._here.metadata = text

    # ---- events ------------------------------------------------------------------------------

    def stack(self) -> Stack | None:
        """Return the program's current stack, or None if stacks are not recorded."""
        return _stack() if self._keeps else None

    def died(self, address: int) -> None:
        """Record when a storage died. Its block is freed later, before the next request."""
        self._deaths[address] = (_stack() if self._keeps == 3 else None), time.time_ns()

    def took(self, address: int, size_bytes: int, stream: int, stack: Stack | None) -> None:
        if stack is not None:
            self._stacks[address] = stack
        self._add("alloc", address, size_bytes, stream, stack)

    def gave_back(self, address: int, size_bytes: int, stream: int) -> None:
        at_birth = self._stacks.pop(address, None)
        stack, at_ns = self._deaths.pop(address, (None, 0))
        if not self.is_on:
            return
        if not at_ns:  # freed at once
            stack, at_ns = (_stack() if self._keeps == 3 else None), time.time_ns()
        for action in ("free_requested", "free_completed"):
            self._add(action, address, size_bytes, stream, stack or at_birth, at_ns)

    def reserved(
        self, action: str, address: int, size_bytes: int, stream: int, stack: Stack | None
    ) -> None:
        if action in ("segment_free", "segment_unmap"):
            self._segment_stacks.pop(address, None)
        elif stack is not None:
            self._segment_stacks.setdefault(address, stack)
        self._add(action, address, size_bytes, stream, stack)

    def ran_out(self, free_bytes: int, rounded: int, stream: int, stack: Stack | None) -> None:
        self._add("oom", free_bytes, rounded, stream, stack)

    def annotate(self, stage: str, name: str) -> None:
        """Record the start or end of a record_function, with which torch marks optimizer steps."""
        if self.is_on:
            at_us = time.time_ns() // 1000
            self._annotations.append({"stage": stage, "name": name, "device": 0, "time_us": at_us})

    def _add(
        self,
        action: str,
        address: int,
        size_bytes: int,
        stream: int,
        stack: Stack | None,
        at_ns: int = 0,
    ) -> None:
        if self.is_on and action not in self._skipped:
            at_us = (at_ns or time.time_ns()) // 1000
            # Up to "state", torch gathers a stack for the block and leaves it out of the event.
            kept = stack if self._keeps >= 2 else None
            self._events.append((action, address, size_bytes, stream, at_us, self.metadata, kept))

    # ---- the snapshot ------------------------------------------------------------------------

    def snapshot(
        self,
        segments: Iterable[HeldSegment],
        settings: dict[str, object],
        *,
        has_traces: bool = True,
    ) -> dict[str, Any]:
        """Return what torch._C._cuda_memorySnapshot returns. The snapshot is itself an event."""
        described = [self._described(segment) for segment in segments]
        self._add("snapshot", 0, sum(one["active_size"] for one in described), 0, None)
        return {
            "segments": described,
            "device_traces": [[self._event(event) for event in self._events]] if has_traces else [],
            "allocator_settings": settings,
            "external_annotations": [dict(one) for one in self._annotations],
        }

    def frames_at(self, address: int) -> Frames | None:
        """Return where a block was allocated."""
        stack = self._stacks.get(address)
        return None if stack is None else self._frames_of(stack)

    def _described(self, segment: HeldSegment) -> dict[str, Any]:
        live = [block for block in segment.blocks if block.state == "live"]
        active = [block for block in segment.blocks if block.state != "free"]
        address = segment.blocks[0].address
        return {
            "device": 0,
            "address": address,
            "total_size": sum(block.size_bytes for block in segment.blocks),
            "allocated_size": sum(block.size_bytes for block in live),
            "active_size": sum(block.size_bytes for block in active),
            "requested_size": sum(block.requested_bytes for block in active),
            "stream": segment.stream,
            "segment_type": "small" if segment.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": segment.reservation is not None,
            "frames": self._frames_of(self._segment_stacks.get(address, ())),
            "blocks": [self._block(block) for block in segment.blocks],
        }

    def _block(self, block: PlacedBlock) -> dict[str, Any]:
        stack = self._stacks.get(block.address, ()) if block.state != "free" else ()
        return {
            "address": block.address,
            "size": block.size_bytes,
            "requested_size": block.requested_bytes,
            "state": _STATES[block.state],
            "frames": self._frames_of(stack),
        }

    def _event(self, event: tuple[Any, ...]) -> dict[str, Any]:
        action, address, size_bytes, stream, at_us, metadata, stack = event
        entry = {
            "action": action,
            "device_free" if action == "oom" else "addr": address,
            "size": size_bytes,
            "stream": stream,
            "time_us": at_us,
            "compile_context": "N/A",
            "user_metadata": metadata,
            "pool_id": (0, 0),
        }
        if stack is not None:
            entry["frames"] = self._frames_of(stack)
        return entry

    def _frames_of(self, stack: Stack) -> Frames:
        frames = self._frames.get(stack)
        if frames is None:
            frames = self._frames[stack] = [_frame(code, at) for code, at in stack]
        return frames


def _stack() -> Stack:
    found: list[tuple[CodeType, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith(_OWN):
            found.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return tuple(found)


def _frame(code: CodeType, at: int) -> dict[str, Any]:
    return {"name": code.co_name, "filename": code.co_filename, "line": _line(code, at)}


def _line(code: CodeType, at: int) -> int:
    for begin, end, line in code.co_lines():
        if begin <= at < end and line is not None:
            return line
    return code.co_firstlineno
