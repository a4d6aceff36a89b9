"""Tensors that models are given -> the micro-batch and the longest sequence of those trained on.

A model is also called in order to write a sample or to choose an action, often without `no_grad`:
what it is given then is no batch. A batch is what it was given last before a backward.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple


class _Call(NamedTuple):
    is_training: bool  # as `model.train()` and `model.eval()` say
    num_rows: int
    num_tokens: int


class Given:
    """What was given to each model since the last backward, and what has come to one."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[_Call]] = {}
        self._rows: Counter[int] = Counter()
        self._most_tokens = 0
        self.num_batches = 0

    def called(self, module: Any, tensors: list[Any]) -> None:
        if not tensors:
            return
        num_rows = tensors[0].shape[0]
        # a graph's edges are in two rows, and no sequences
        whole = (one.shape[1] for one in tensors if _is_tokens(one) and one.shape[0] == num_rows)
        call = _Call(module.training, num_rows, max(whole, default=0))
        self._waiting.setdefault(id(module), []).append(call)

    def trained(self) -> bool:
        """A backward has gone through it, or a step was made without one. Was there a batch?"""
        is_batch = bool(self._waiting)
        for calls in self._waiting.values():
            last = calls[-1]
            alike = [call for call in calls if call.is_training == last.is_training]
            self._rows[last.num_rows] += 1
            self._most_tokens = max(self._most_tokens, *(call.num_tokens for call in alike))
            self.num_batches += len(alike)
        self._waiting.clear()
        return is_batch

    @property
    def micro_batch(self) -> int | None:
        return self._rows.most_common(1)[0][0] if self._rows else None

    @property
    def longest_sequence(self) -> int | None:
        return self._most_tokens if self._most_tokens > 1 else None  # one number is no sequence


def _is_tokens(tensor: Any) -> bool:
    return bool(tensor.dim() == 2 and not tensor.is_floating_point())
