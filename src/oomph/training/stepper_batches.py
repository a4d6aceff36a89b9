"""Batches of the loader -> the pieces of one optimizer step, and how much each piece counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oomph.training import examples, splitting
from oomph.training.evaluation import joined
from oomph.training.weights import Weight, weigher, weights_of

Split = Callable[[Any, Sequence[int]], Sequence[Any]]
Count = Callable[[Any], int]


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


class Batches:
    """The batches of one optimizer step so far."""

    def __init__(
        self,
        weight: Weight,
        accumulate: int,
        whole: Collection[str],
        split: Split | None,
        count: Count | None,
    ) -> None:
        self._weigh, self._is_sum = weigher(weight), weight == "sum"
        self._accumulate, self._whole, self._split = accumulate, frozenset(whole), split
        self._count = count
        self._expected = 0.0  # what all batches of a step weigh, judged by the first
        self.opened: list[Batch] = []
        self.carried = Carried()

    def open(self, data: Any) -> Batch:
        num = self._count(data) if self._count else examples.num_examples(data, self._whole)
        opened = Batch(data, num, examples.elements_per_example(data, num))
        self.opened.append(opened)
        return opened

    def begin_again(self) -> None:
        self._expected = self.carried.expected

    def clear(self) -> None:
        self._expected, self.opened, self.carried = 0.0, [], Carried()

    @property
    def is_whole(self) -> bool:
        return self.carried.num + len(self.opened) >= self._accumulate

    @property
    def factor(self) -> float:
        """What the gradients are to be multiplied by: batches may weigh unlike the first."""
        if self._is_sum:
            return 1.0
        return self._expected / self.so_far.total

    @property
    def so_far(self) -> Carried:
        """All batches of the step, those that were run before a checkpoint included."""
        total = sum((batch.total for batch in self.opened), self.carried.total)
        size = self.opened[-1].size if self.opened else self.carried.size
        return Carried(self.carried.num + len(self.opened), total, self._expected, size)

    def carry(self, carried: Carried) -> None:
        self.clear()
        self.carried, self._expected = carried, carried.expected

    def count(self, data: Any) -> int:
        return self._count(data) if self._count else examples.num_examples(data, self._whole)

    def cut(self, data: Any, sizes: Sequence[int]) -> Sequence[Any]:
        return (
            self._split(data, sizes) if self._split else splitting.split(data, sizes, self._whole)
        )

    def joined(self, done: Sequence[tuple[Any, int, Any]]) -> Any:
        """What pieces gave that were evaluated, weighted as in training."""
        return joined(done, self._weigh, is_sum=self._is_sum)

    def pieces(self, batch: Batch) -> Iterator[tuple[Any, int, float]]:
        """What to run: each piece, its examples, and how much its loss counts."""
        sizes = splitting.piece_sizes(batch.num, batch.size)
        if self._split is not None and len(sizes) > 1:
            parts = self._split(batch.data, sizes)
        else:
            parts = splitting.split(batch.data, sizes, self._whole)
        weights = weights_of(parts, sizes, self._weigh)
        batch.total = sum(weights)
        self._expected = self._expected or batch.total * self._accumulate
        for part, num, weight in zip(parts, sizes, weights, strict=True):
            if weight:
                yield part, num, 1.0 if self._is_sum else weight / self._expected
