"""Two recordings of the same training -> where they differ, allocation by allocation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from oomph.tracing.recorder import Recorder


class Counting(Recorder):
    """Counts the tensors of every device, and nothing that only a GPU would take."""

    counts = staticmethod(lambda _: True)
    counts_storage = staticmethod(lambda _: True)

    def __init__(self) -> None:
        super().__init__((8, 0))

    def take_temporaries(self, behaviour: Any, args: Any, outputs: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Recording:
    """What was requested and freed, in order, as `Trace.events` has it; and by which op."""

    sizes: Sequence[int]
    ops: Sequence[str]
    events: Sequence[int]

    def only(self, counts: Callable[[int], bool]) -> Recording:
        """The same without the allocations whose numbers do not count."""
        numbers = [number for number in range(len(self.sizes)) if counts(number)]
        place = {number + 1: i + 1 for i, number in enumerate(numbers)}
        return Recording(
            sizes=[self.sizes[number] for number in numbers],
            ops=[self.ops[number] for number in numbers],
            events=[
                place[abs(event)] * (1 if event > 0 else -1)
                for event in self.events
                if abs(event) in place
            ],
        )


def recording_of(recorder: Recorder) -> Recording:
    return Recording(recorder.sizes, [op for op, _, _ in recorder.born], list(recorder.events))


def in_order(events: Sequence[int]) -> list[int]:
    """The events, with each run of frees sorted: they have no order among themselves."""
    ordered: list[int] = []
    frees: list[int] = []
    for event in events:
        if event < 0:
            frees.append(event)
        else:
            ordered += [*sorted(frees), event]
            frees = []
    return ordered + sorted(frees)


@dataclass(frozen=True, slots=True)
class Difference:
    """The first event that is not the same."""

    number: int
    one: str
    other: str
    op: str
    num_bytes: int  # that one takes or frees, and the other does not

    def __str__(self) -> str:
        return f"event {self.number}: {self.one} | {self.other}"


def first_difference(one: Recording, other: Recording) -> Difference | None:
    events = zip_longest(in_order(one.events), in_order(other.events))
    for number, (here, there) in enumerate(events):
        if here != there or _size(one, here) != _size(other, there):
            return Difference(
                number,
                _told(one, here),
                _told(other, there),
                _op(one, here) or _op(other, there) or "nothing",
                abs(_signed(one, here) - _signed(other, there)),
            )
    return None


def _size(recording: Recording, event: int | None) -> int:
    return 0 if event is None else recording.sizes[abs(event) - 1]


def _signed(recording: Recording, event: int | None) -> int:
    return _size(recording, event) * (1 if (event or 0) > 0 else -1)


def _op(recording: Recording, event: int | None) -> str | None:
    return None if event is None else recording.ops[abs(event) - 1]


def _told(recording: Recording, event: int | None) -> str:
    if event is None:
        return "nothing"
    what = f"{_size(recording, event)} B of {_op(recording, event)}"
    return f"{'takes' if event > 0 else 'frees'} {what} ({abs(event) - 1})"
