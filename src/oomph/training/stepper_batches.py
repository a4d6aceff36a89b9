"""Batches of the loader -> the pieces of one optimizer step, and how much each piece counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from oomph.errors import UsageError
from oomph.training import examples, splitting
from oomph.training.division import Division


@dataclass(slots=True)
class Batch:
    """One batch of the loader, kept until the optimizer has stepped: it may be run again."""

    data: Any
    num: int
    elements: int  # of one example
    total: float = 0  # what its pieces weigh together
    size: int = 0  # examples at a time, in the last attempt


@dataclass(frozen=True, slots=True)
class Carried:
    """Batches of a step whose gradients are there, but not they themselves: from a checkpoint."""

    num: int = 0
    total: float = 0.0  # what they weigh
    expected: float = 0.0
    size: int = 0  # examples at a time, of the last
    by: str = "mean"  # what they were weighed by


class Batches:
    """The batches of one optimizer step so far."""

    def __init__(self, division: Division, accumulate: int) -> None:
        self.division, self._accumulate = division, accumulate
        self._expected = 0.0  # what all batches of a step weigh, judged by the first
        self.opened: list[Batch] = []
        self.carried = Carried()

    def open(self, data: Any) -> Batch:
        opened = Batch(data, 0, 0)
        self._count(opened)
        self.opened.append(opened)
        return opened

    def count_again(self) -> None:
        """The dimension of the examples may be another one than was thought."""
        for batch in self.opened:
            self._count(batch)

    def _count(self, batch: Batch) -> None:
        batch.num = self.division.num(batch.data)
        batch.elements = examples.elements_per_example(batch.data, batch.num)

    def begin_again(self) -> None:
        self._expected = self.carried.expected

    def clear(self) -> None:
        self._expected, self.opened, self.carried = 0.0, [], Carried()

    @property
    def accumulates(self) -> bool:
        """Are several batches to count as one?"""
        return self._accumulate > 1

    @property
    def is_whole(self) -> bool:
        return self.carried.num + len(self.opened) >= self._accumulate

    @property
    def factor(self) -> float:
        """What the gradients are to be multiplied by: batches may weigh unlike the first."""
        if self.division.is_sum or (self.carried.num and self.carried.by == "sum"):
            return 1.0
        return self._expected / self.so_far.total

    @property
    def so_far(self) -> Carried:
        """All batches of the step, those that were run before a checkpoint included."""
        total = sum((batch.total for batch in self.opened), self.carried.total)
        size = self.opened[-1].size if self.opened else self.carried.size
        num = self.carried.num + len(self.opened)
        return Carried(num, total, self._expected, size, self.division.by)

    def carry(self, carried: Carried) -> None:
        self.clear()
        self.carried, self._expected = carried, carried.expected
        self.division.by_before = carried.by

    def pieces(self, batch: Batch) -> Iterator[tuple[Any, int, float]]:
        """What to run: each piece, its examples, and how much its loss counts."""
        sizes, division = splitting.piece_sizes(batch.num, batch.size), self.division
        if self.carried.num and not division.is_given and division.by != self.carried.by:
            raise _weighs_otherwise(self.carried.by, division.by)
        parts = division.pieces(batch.data, sizes)
        weights = division.weights(parts, sizes)
        batch.total = sum(weights)
        self._expected = self._expected or batch.total * self._accumulate
        for part, num, weight in zip(parts, sizes, weights, strict=True):
            if weight:
                yield part, num, 1.0 if division.is_sum else weight / self._expected


def _weighs_otherwise(before: str, now: str) -> UsageError:
    return UsageError(
        "gradients of the checkpoint cannot be added to those of this batch",
        because=f"they were weighed by {before}, and this batch is weighed by {now}",
        attempt="weight=, which says what the loss is a mean of, from the beginning; or saving"
        " after a step, and not between the batches of one",
    )
