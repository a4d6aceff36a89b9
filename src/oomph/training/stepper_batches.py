"""Batches of the loader -> the pieces of one optimizer step, and how much each piece counts."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from oomph.training import examples, splitting
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

    def open(self, data: Any) -> Batch:
        num = self._count(data) if self._count else examples.num_examples(data, self._whole)
        opened = Batch(data, num, examples.elements_per_example(data, num))
        self.opened.append(opened)
        return opened

    def begin_again(self) -> None:
        self._expected = 0.0

    def clear(self) -> None:
        self._expected, self.opened = 0.0, []

    @property
    def is_whole(self) -> bool:
        return len(self.opened) >= self._accumulate

    @property
    def factor(self) -> float:
        """What the gradients are to be multiplied by: batches may weigh unlike the first."""
        if self._is_sum:
            return 1.0
        return self._expected / sum(batch.total for batch in self.opened)

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
