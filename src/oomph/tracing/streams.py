"""Stand-ins for torch.cuda's streams and events: which stream an allocation is of, who waits.

A stream here is a number; nothing runs. Blocks of different streams come from different pools of
the allocator, so that what is gathered on one stream does not fill the gaps of another.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch


class Now:
    """The stream that is current in this process, and the communication that was begun."""

    stream = 0
    num_streams = 1
    num_begun = 0
    note_wait: Callable[[int], None] | None = None  # told how much of the begun may go on

    @classmethod
    def begin(cls, note_wait: Callable[[int], None]) -> None:
        """As in a new process, so that each rehearsal has the same numbers."""
        cls.stream, cls.num_streams, cls.num_begun, cls.note_wait = 0, 1, 0, note_wait


class Stream:
    """A stream, or the context in which it is current: `with torch.cuda.stream(it)`."""

    device_index, device = 0, torch.device("cuda", 0)
    device_type = 1  # of c10: CUDA
    priority = 0

    def __init__(self, *_: Any, priority: int = 0, **__: Any) -> None:
        self.stream_id = self.cuda_stream = Now.num_streams
        self.priority = priority
        self._before: list[int] = []
        Now.num_streams += 1

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        return 0, -5  # of recent GPUs: the least and the greatest

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
    """A moment of a stream. Its time is the host's: what is queued has happened already."""

    def __init__(self, *args: Any, enable_timing: bool = False, **__: Any) -> None:
        self.stream_id: int | None = None
        self.num_begun = 0
        # torch.cuda.Event(True); torch.Event has the device first.
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
        """The milliseconds between two events, in torch's words where there are none."""
        if not (self._is_timed and end_event._is_timed):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if self._at_s is None or end_event._at_s is None:
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._at_s - self._at_s) * 1e3


class use_stream:  # noqa: N801 - it stands in for torch.cuda.stream
    """Within it, a stream is current. None changes nothing."""

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
    """torch.cuda.set_stream."""
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
