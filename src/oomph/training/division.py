"""Batches -> how many examples they have, their pieces, and how much each piece counts.

What nobody said of it (the dimension of the examples, what the loss divides by) is the likeliest
until the first batch is split: then it is found out (split_check.py) and set here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from oomph.training import examples, splitting
from oomph.training.examples import BatchDim, Dims, dims_given
from oomph.training.weights import Weight, weigher, weights_of

Split = Callable[[Any, Sequence[int]], Sequence[Any]]
Count = Callable[[Any], int]


def named_by(weight: Weight | None, said: str) -> str:
    """A weight by its own name, or by what its function counts."""
    if weight is None:
        return "mean"
    return weight if isinstance(weight, str) else said


class Division:
    """How batches are divided. weight: None if it is not known yet, and "mean" until then."""

    def __init__(
        self,
        weight: Weight | None = None,
        *,
        whole: Collection[str] = (),
        split: Split | None = None,
        count: Count | None = None,
        batch_dim: BatchDim | None = None,
    ) -> None:
        self.whole, self.dims = frozenset(whole), dims_given(batch_dim)
        # May the dimension of the examples be found by trying?
        self.is_free = split is None and count is None and batch_dim is None
        self._split, self._count = split, count
        self.is_given = weight is not None
        self.by_before: str | None = None  # what batches counted by before a checkpoint
        self.set_weight(weight)

    def set_weight(self, weight: Weight | None, said: str = "a function") -> None:
        """said: what a function counts."""
        self.weight, self._weigh = weight, weigher("mean" if weight is None else weight)
        self.is_sum, self.by = weight == "sum", named_by(weight, said)

    def num(self, batch: Any) -> int:
        """How many examples a batch has. Raises UsageError."""
        if self._count is not None:
            return self._count(batch)
        return examples.num_examples(batch, self.whole, self.dims)

    def pieces(self, batch: Any, sizes: Sequence[int], dims: Dims | None = None) -> Sequence[Any]:
        """One for each of `sizes`; by other dimensions, to try them. Raises UsageError."""
        if self._split is not None and len(sizes) > 1:
            return self._split(batch, sizes)
        return splitting.split(batch, sizes, self.whole, self.dims if dims is None else dims)

    def weights(self, pieces: Sequence[Any], sizes: list[int]) -> list[float]:
        """How much each piece counts; a sum is not divided by what all count."""
        return weights_of(pieces, sizes, self._weigh)
