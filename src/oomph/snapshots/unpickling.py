"""Standard input, a memory snapshot -> standard output, its checked columns. Run as a program.

A pickle can run any code and ask for any amount of memory. So it is read in this process of its
own: every global is refused, memory, time and files are limited, and what was read is taken apart
into numbers and texts whose types and ranges are checked. The parent never sees a pickle. Only the
standard library is imported, so that Python can start without site-packages.

The answer is a length and a JSON object, then the columns of each device, as `array` writes them.
"""

from __future__ import annotations

import gc
import io
import json
import pickle
import resource
import signal
import sys
from array import array
from collections.abc import Iterator
from itertools import chain
from typing import Any, BinaryIO, NoReturn

# In the order of their codes; what a later torch adds gets the last one.
ACTIONS = (
    *("alloc", "free_requested", "free_completed", "segment_alloc", "segment_free"),
    *("segment_map", "segment_unmap", "snapshot", "oom", "other"),
)
STATES = ("active_allocated", "active_pending_free", "inactive")
_MOST_BYTES = 1 << 50
_MOST_ADDRESS = 1 << 62
# All GPUs of a large machine have a few TiB. Pages of expandable segments are counted one by one.
_MOST_RESERVED_BYTES = 1 << 43
_MOST_MAPPED_BYTES = 1 << 47  # over a whole trace
_LONGEST_TEXT = 1000
_NUM_INTERVALS, _DIVISIONS = 16, (0, 1, 2, 4, 8, 16, 32, 64)
_LEAST_MEMORY_BYTES = 1 << 30
_MOST_INFLATED = 60  # times the size of a gzip file


class Refused(Exception):
    """It is not a snapshot; the text says why."""


class _Plain(pickle.Unpickler):
    """Reads lists, dicts, texts and numbers. Whatever would run code is refused."""

    def find_class(self, module: str, name: str) -> NoReturn:  # noqa: ARG002
        raise Refused("it would import Python code, which a snapshot never does")

    def persistent_load(self, pid: Any) -> NoReturn:  # noqa: ARG002
        raise Refused("it refers to something outside of it, which a snapshot never does")


# ---- bytes -> lists and dicts --------------------------------------------------------------------


def read(file: BinaryIO, size_bytes: int) -> tuple[Any, int]:
    """Return what the file holds, and its size without compression."""
    start = file.read(16)
    file.seek(0)
    if start.startswith(b"\x1f\x8b"):
        data = _inflated(file, size_bytes)
        return read(io.BytesIO(data), len(data))
    if start.startswith(b"SQLite format"):
        raise Refused("it is an SQLite database; dump it with torch.cuda.memory._dump_snapshot")
    if start.startswith(b"PK"):
        raise Refused("it is a zip file, as torch.save writes; a snapshot is a plain pickle")
    if start.lstrip()[:1] in (b"{", b"["):
        return json.loads(file.read()), size_bytes
    return _Plain(file).load(), size_bytes


def _inflated(file: BinaryIO, size_bytes: int) -> bytes:
    import gzip

    most = size_bytes * _MOST_INFLATED + (1 << 20)
    with gzip.GzipFile(fileobj=file) as inflating:
        data = inflating.read(most + 1)
    if len(data) > most:
        raise Refused(f"it is more than {_MOST_INFLATED} times larger without compression")
    return data


# ---- lists and dicts -> columns ------------------------------------------------------------------


class Checked:
    """What a snapshot holds, in numbers and texts that were checked one by one."""

    def __init__(self, content: Any, size_bytes: int) -> None:
        # Every item takes a byte of the file at least; one that is referred to again and again
        # would multiply, so they are counted.
        self._left = max(size_bytes, 10_000)
        self._frames: dict[tuple[str, int, str], int] = {}
        self._stacks: dict[tuple[int, ...], int] = {(): 0}
        self._by_lists: dict[int, int] = {}  # ids: the content lives as long as this
        self._by_items: dict[tuple[int, ...], int] = {}
        if isinstance(content, list):  # torch.cuda.memory_snapshot()
            content = {"segments": content}
        if not isinstance(content, dict) or not isinstance(content.get("segments"), list):
            raise Refused("it has no list of segments")
        self.segments = [self._segment(one) for one in content["segments"]]
        if sum(segment[2] for segment in self.segments) > _MOST_RESERVED_BYTES:
            raise Refused("its segments are larger than any machine's GPUs")
        traces = content.get("device_traces") or []
        if not isinstance(traces, list):
            raise Refused("device_traces is not a list")
        self.traces = [self._trace(trace) for trace in traces]
        self.settings = self._settings(content.get("allocator_settings"))
        self.annotations = self._annotations(content.get("external_annotations"))

    def header(self) -> dict[str, Any]:
        return {
            "segments": self.segments,
            "num_events": [len(trace[0]) for trace in self.traces],
            "frames": list(self._frames),
            "stacks": list(self._stacks),
            "settings": self.settings,
            "annotations": self.annotations,
        }

    def _count(self, number: int) -> None:
        self._left -= number
        if self._left < 0:
            raise Refused("it refers to the same items again and again")

    # ---- segments

    def _segment(self, one: Any) -> list[Any]:
        if not isinstance(one, dict):
            raise Refused("a segment is not a dict")
        blocks = one.get("blocks")
        if not isinstance(blocks, list):
            raise Refused("a segment has no list of blocks")
        self._count(1 + len(blocks))
        pool = one.get("segment_pool_id") or (0, 0)
        if not isinstance(pool, tuple | list) or len(pool) != 2:
            raise Refused("a segment's pool is not a pair")
        written = [self._block(block) for block in blocks]
        return [
            _number(one, "device", default=0, most=4096),
            _number(one, "address", most=_MOST_ADDRESS),
            _number(one, "total_size"),
            _number(one, "stream", default=0, most=_MOST_ADDRESS),
            one.get("segment_type") == "small",
            one.get("is_expandable") is True,
            [_whole(each) for each in pool],
            written,
        ]

    def _block(self, one: Any) -> list[Any]:
        if not isinstance(one, dict):
            raise Refused("a block is not a dict")
        state = one.get("state")
        if state == "active_awaiting_free":  # as in the documentation of torch 2.13
            state = "active_pending_free"
        if state not in STATES:
            raise Refused(f"a block's state is {state!r:.40}")
        size, frames = _number(one, "size"), one.get("frames")
        requested = one.get("requested_size")
        history = one.get("history")  # torch 2.0
        if isinstance(history, list) and history and isinstance(history[0], dict):
            frames = frames or history[0].get("frames")
            requested = history[0].get("real_size") if requested is None else requested
        requested = size if requested is None else _whole(requested)
        return [size, min(requested, size), STATES.index(state), self._stack(frames)]

    # ---- the trace

    def _trace(self, trace: Any) -> tuple[array[int], ...]:
        if not isinstance(trace, list):
            raise Refused("a device's trace is not a list")
        self._count(len(trace))
        codes = {name: code for code, name in enumerate(ACTIONS)}
        other = codes["other"]
        actions, stacks = array("b"), array("i")
        addresses, sizes, streams, times = (array("q") for _ in range(4))
        seen, stack_of = self._by_lists, self._stack
        for event in trace:
            action = codes.get(event["action"], other)
            actions.append(action)
            addresses.append(event.get("device_free" if action == 8 else "addr") or 0)
            sizes.append(event.get("size") or 0)
            streams.append(event.get("stream") or 0)
            times.append(event.get("time_us") or 0)
            frames = event.get("frames")
            stacks.append(seen.get(id(frames)) or stack_of(frames) if frames else 0)
        for column, most in ((addresses, _MOST_ADDRESS), (sizes, _MOST_BYTES)):
            if column and (min(column) < 0 or max(column) > most):
                raise Refused("an event's address or size is out of range")
        maps = (codes["segment_map"], codes["segment_unmap"])
        mapped = (size for size, action in zip(sizes, actions, strict=True) if action in maps)
        if sum(mapped) > _MOST_MAPPED_BYTES:
            raise Refused("more is mapped than in any training")
        return actions, addresses, sizes, streams, times, stacks

    # ---- stacks: few differ, so each is kept once

    def _stack(self, frames: Any) -> int:
        if not frames:
            return 0
        if not isinstance(frames, list):
            raise Refused("frames are not a list")
        if len(frames) > _LONGEST_TEXT * 10:
            raise Refused("a stack is too deep")
        items = tuple(map(id, frames))
        number = self._by_items.get(items)
        if number is None:
            self._count(len(frames))
            content = tuple(self._frame(frame) for frame in frames)
            number = self._stacks.setdefault(content, len(self._stacks))
            self._by_items[items] = number
        self._by_lists[id(frames)] = number
        return number

    def _frame(self, frame: Any) -> int:
        if not isinstance(frame, dict):
            raise Refused("a frame is not a dict")
        key = (
            _text(frame.get("filename")),
            _whole(frame.get("line") or 0),
            _text(frame.get("name")),
        )
        return self._frames.setdefault(key, len(self._frames))

    # ---- the rest

    def _settings(self, written: Any) -> dict[str, Any] | None:
        """Return the settings that decide where blocks lie, if they make sense."""
        if not isinstance(written, dict):
            return None
        get, plain = written.get, dict[str, Any]()
        if isinstance(get("PYTORCH_CUDA_ALLOC_CONF"), str):
            plain["PYTORCH_CUDA_ALLOC_CONF"] = _text(get("PYTORCH_CUDA_ALLOC_CONF"))
        split = get("max_split_size")
        if type(split) is int and split <= _MOST_BYTES:
            plain["max_split_size"] = split
        ratio = get("garbage_collection_threshold")
        if isinstance(ratio, int | float) and 0 <= ratio < 1:
            plain["garbage_collection_threshold"] = ratio
        plain["expandable_segments"] = get("expandable_segments") is True
        divisions = get("roundup_power2_divisions")
        if isinstance(divisions, dict) and len(divisions) == _NUM_INTERVALS:
            values = list(divisions.values())
            if all(type(value) is int and value in _DIVISIONS for value in values):
                plain["roundup_power2_divisions"] = {str(n): v for n, v in enumerate(values)}
        return plain

    def _annotations(self, written: Any) -> list[list[Any]]:
        if not isinstance(written, list):
            return []
        self._count(len(written))
        return [
            [
                one.get("stage") == "START",
                _text(one.get("name")),
                _whole(one.get("device") or 0),
                _whole(one.get("time_us") or 0),
            ]
            for one in written
            if isinstance(one, dict)
        ]


def _number(
    record: dict[str, Any], name: str, *, most: int = _MOST_BYTES, default: int = -1
) -> int:
    value = _whole(record.get(name, default))
    if not 0 <= value <= most:
        raise Refused(f"{name} is missing or out of range")
    return value


def _whole(value: Any) -> int:
    if not isinstance(value, int) or abs(value) > _MOST_ADDRESS:
        raise Refused("a number is none, or out of range")
    return int(value)


def _text(value: Any) -> str:
    return value[:_LONGEST_TEXT] if isinstance(value, str) else "??"


# ---- the program ---------------------------------------------------------------------------------


def _limit(size_bytes: int) -> int:
    """Limit this process: memory, processor and wall time, files."""
    memory = max(_LEAST_MEMORY_BYTES, 12 * size_bytes)
    seconds = 60 + size_bytes // (1 << 20)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(4 * seconds)  # also if the parent is gone
    return memory


def answer(
    file: BinaryIO, size_bytes: int, memory_bytes: int
) -> tuple[dict[str, Any], list[tuple[array[int], ...]]]:
    """Return the header and the columns; for a file that is no snapshot, why, and nothing."""
    try:
        content, plain_bytes = read(file, size_bytes)
        checked = Checked(content, plain_bytes)
        return checked.header(), checked.traces
    except Refused as error:
        because = str(error)
    except MemoryError:
        because = f"reading it takes more than {memory_bytes >> 20} MiB"
    except RecursionError:
        because = "it is nested too deeply"
    except Exception as error:  # noqa: BLE001 - a broken file breaks the unpickler in many ways
        because = f"it is broken ({type(error).__name__})"
    return {"error": because}, []


def written(header: dict[str, Any], traces: list[tuple[array[int], ...]]) -> Iterator[bytes]:
    """Yield the answer as it is sent."""
    text = json.dumps(header, allow_nan=False).encode("ascii")
    yield len(text).to_bytes(8, "little")
    yield text
    for column in chain.from_iterable(traces):
        yield column.tobytes()


def main() -> None:
    """Read standard input and write the answer."""
    size_bytes = int(sys.argv[1])
    memory_bytes = _limit(size_bytes)
    gc.disable()  # nothing here is garbage, and looking for it takes most of the time
    for piece in written(*answer(sys.stdin.buffer, size_bytes, memory_bytes)):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
