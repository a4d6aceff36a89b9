"""What a memory snapshot of torch holds: for each GPU its segments, and the events that led there.

Events are kept as columns, because a snapshot may have millions. `events()` and `blocks` give them
as dicts in torch's own form, which `predicting/recorded.py` reads; `frames` is the number of a
stack there.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Record = Mapping[str, Any]


class Frame(NamedTuple):
    """One place on a stack. C++ frames have no line."""

    file: str
    line: int
    name: str

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py") or self.file.startswith("<")


class Annotation(NamedTuple):
    """The start or the end of something that torch names, such as Optimizer.step."""

    is_start: bool
    name: str
    device: int
    time_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The events of one GPU, one entry each."""

    actions: array[int]
    addresses: array[int]  # of an "oom": the bytes that the GPU had free
    sizes: array[int]
    streams: array[int]
    times_us: array[int]  # 0: not recorded
    stacks: array[int]  # 0: not recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSnapshot:
    """One GPU of a snapshot."""

    device: int
    segments: tuple[Record, ...]
    columns: Columns
    action_names: tuple[str, ...]

    @property
    def num_events(self) -> int:
        return len(self.columns.actions)

    def events(self) -> list[Record]:
        """Return the events in torch's form."""
        names, columns = self.action_names, self.columns
        found: list[Record] = []
        for code, address, size, stream, stack in zip(
            columns.actions,
            columns.addresses,
            columns.sizes,
            columns.streams,
            columns.stacks,
            strict=True,
        ):
            action = names[code]
            place = "device_free" if action == "oom" else "addr"
            found.append(
                {
                    "action": action,
                    place: address,
                    "size": size,
                    "stream": stream,
                    "frames": stack or None,
                }
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """A memory snapshot."""

    devices: tuple[DeviceSnapshot, ...]
    frames: tuple[Frame, ...]
    stacks: tuple[tuple[int, ...], ...]  # frames, innermost first; the first stack is empty
    settings: Record | None  # the allocator's; torch before 2.3 did not write them
    annotations: tuple[Annotation, ...]

    def stack(self, number: int) -> tuple[Frame, ...]:
        return tuple(self.frames[frame] for frame in self.stacks[number])
