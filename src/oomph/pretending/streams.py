"""Stand in for torch.cuda's streams and events: the stream of an allocation, and waiting.

A stream here is just a number; nothing runs on it. Blocks of different streams come from different
allocator pools, so tensors gathered on one stream do not fill gaps of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Now:
    """The current stream of this process, and the communication that was started."""

    stream = 0
    num_streams = 1
    num_begun = 0
    note_wait: Callable[[int], None] | None = None  # takes how much may go on

    @classmethod
    def begin(cls, note_wait: Callable[[int], None]) -> None:
        """Reset to the state of a new process, so that rehearsals have the same stream numbers."""
        cls.stream, cls.num_streams, cls.num_begun, cls.note_wait = 0, 1, 0, note_wait


class Stream:
    """A stream, also as the context in which it is current: `with torch.cuda.stream(it)`."""

    device_index, device = 0, torch.device("cuda", 0)
    device_type = 1  # CUDA in c10
    priority = 0

    def __init__(self, *_: Any, priority: int = 0, **__: Any) -> None:
        self.stream_id = self.cuda_stream = Now.num_streams
        self.priority = priority
        self._before: list[int] = []
        Now.num_streams += 1

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        return 0, -5  # lowest and highest priority on recent GPUs

    def __enter__(self) -> Stream:
        self._before.append(Now.stream)
        Now.stream = self.stream_id
        return self

    def __exit__(self, *_: object) -> None:
        Now.stream = self._before.pop()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        is_of_another = event.stream_id not in (None, self.stream_id)
        if self.stream_id == 0 and is_of_another and Now.note_wait is not None:
            Now.note_wait(Now.num_begun - event.num_begun)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())


class Event:
    """A point in a stream. Its time is the host's: everything queued counts as done."""

    def __init__(self, *args: Any, enable_timing: bool = False, **__: Any) -> None:
        self.stream_id: int | None = None
        self.num_begun = 0
        # torch.cuda.Event(True) enables timing; torch.Event takes the device first.
        self._is_timed = enable_timing or bool(args and args[0] is True)
        self._at_s: float | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.stream_id = Now.stream if stream is None else stream.stream_id
        self.num_begun = Now.num_begun
        self._at_s = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        """Return the milliseconds between two events; raise torch's error if they have no times."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at_s is None or end_event._at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at_s - self._at_s) * 1e3


class use_stream:  # noqa: N801 - it stands in for torch.cuda.stream
    """Make a stream current inside this context. None changes nothing."""

    def __init__(self, stream: Stream | None) -> None:
        self._stream = stream
        self._before = 0

    def __enter__(self) -> Stream | None:
        self._before = Now.stream
        if self._stream is not None:
            Now.stream = self._stream.stream_id
        return self._stream

    def __exit__(self, *_: object) -> None:
        Now.stream = self._before


def set_stream(stream: Stream | None) -> None:
    """Stand in for torch.cuda.set_stream."""
    if stream is not None:
        Now.stream = stream.stream_id


def current_stream(*_: Any, **__: Any) -> Stream:
    return _numbered(Now.stream)


def default_stream(*_: Any, **__: Any) -> Stream:
    return _numbered(0)


def _numbered(number: int) -> Stream:
    stream = Stream.__new__(Stream)
    stream.stream_id = stream.cuda_stream = number
    stream._before = []
    return stream
