"""Tensors that models are given -> how many rows they have, and the longest sequence of them.

A model is also called in order to write a sample or to choose an action, often without `no_grad`:
what it is given then is no batch. A batch is what it was given last before a backward.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal

import torch

# They say which dimension is the batch, and by default it is the second.
_OF_SEQUENCES = (torch.nn.RNNBase, torch.nn.MultiheadAttention)


@dataclass(slots=True)
class _Call:
    is_training: bool  # as `model.train()` and `model.eval()` say
    shape: tuple[int, ...] | None  # of the first tensor; None: it was given none
    num_tokens: int
    is_of_features: bool  # one row of figures, which are no examples
    is_sequence_first: bool = False

    @property
    def num_rows(self) -> int | None:
        if self.shape is None or self.is_of_features:
            return None
        return self.shape[1] if self.is_sequence_first else self.shape[0]


class Given:
    """What was given to each model since the last backward, and what has come to one."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Call]] = {}
        self._last: _Call | None = None
        self._rows: Counter[int | None] = Counter()
        self._is_sequence_first = False
        self._most_tokens = 0
        self.num_batches = 0

    def called(self, module: Any, tensors: list[Any]) -> None:
        first = tensors[0] if tensors else None
        shape = None if first is None else tuple(first.shape)
        # a graph's edges are in two rows, and no sequences
        whole = (one.shape[1] for one in tensors if _is_tokens(one) and one.shape[0] == shape[0])  # type: ignore[index]
        is_row = first is not None and first.dim() == 1 and first.is_floating_point()
        self._last = _Call(module.training, shape, max(whole, default=0), is_row)
        self._waiting.setdefault(id(module), []).append(self._last)
        if tensors:
            self.passed_on(module, tensors[0])

    @property
    def rows_of_call(self) -> int | None:
        return None if self._last is None else self._last.num_rows

    def passed_on(self, module: Any, given: Any) -> None:
        """A part of the model is given something: it may tell that time comes first."""
        if not isinstance(module, _OF_SEQUENCES) or module.batch_first or self._last is None:
            return
        shape = self._last.shape
        is_whole = isinstance(given, torch.Tensor) and given.dim() == 3
        if is_whole and shape is not None and shape[:2] == tuple(given.shape[:2]):
            self._last.is_sequence_first = True
            if self._last.num_tokens:
                self._last.num_tokens = shape[0]

    def trained(self) -> bool:
        """A backward has gone through it, or a step was made without one. Was there a batch?"""
        is_batch = bool(self._waiting)
        for calls in self._waiting.values():
            last = calls[-1]
            alike = [call for call in calls if call.is_training == last.is_training]
            self._rows[last.num_rows] += 1
            self._is_sequence_first = self._is_sequence_first or last.is_sequence_first
            self._most_tokens = max(self._most_tokens, *(call.num_tokens for call in alike))
            self.num_batches += len(alike)
        self._waiting.clear()
        self._last = None
        return is_batch

    @property
    def rows(self) -> int | None:
        """Of most batches; a model may also be given several batches in one. None: no one number.

        One row is no batch that anybody could be sure of, and neither is one row of figures.
        """
        counts = {rows: n for rows, n in self._rows.items() if rows is not None}
        if not counts or sum(counts.values()) * 2 <= self._rows.total():
            return None
        most = max(counts, key=lambda rows: counts[rows])
        least = min(counts)
        if counts[most] * 2 > sum(counts.values()):
            return most
        return least if least > 1 and all(rows % least == 0 for rows in counts) else None

    @property
    def dimension(self) -> Literal["first dimension", "second dimension"]:
        """Which of a tensor's the rows are."""
        return "second dimension" if self._is_sequence_first else "first dimension"

    @property
    def longest_sequence(self) -> int | None:
        return self._most_tokens if self._most_tokens > 1 else None  # one number is no sequence


def _is_tokens(tensor: Any) -> bool:
    return bool(tensor.dim() == 2 and not tensor.is_floating_point())
