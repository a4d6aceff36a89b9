"""A loader and its batches -> how many samples there are, and how long they were waited for.

Nothing here imports torch: a tensor is what has a shape, a DataLoader what makes iterators as
torch's does (held against 2.13; `_get_iterator` and `_next_data` are as old as 1.2).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

# When a wait began, when it ended, and for which batch. It must not raise.
Waited = Callable[[float, float, Any], None]

_DEEPEST = 4
_MANY_ALIKE = 32
_ASKED_EVERY = 16


def num_samples_in(batch: Any, depth: int = 0) -> int | None:
    """The first size of the first tensor in a batch; None where there is none.

    >>> num_samples_in({"labels": ["a", "b"]}) is None
    True
    """
    shape = getattr(batch, "shape", None)
    if shape is not None:
        return int(shape[0]) if len(shape) else None
    if depth == _DEEPEST:
        return None
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    if not isinstance(batch, list | tuple):
        return None
    found = (num_samples_in(part, depth + 1) for part in batch)
    return next((number for number in found if number is not None), None)


class BatchSizes:
    """How many samples each batch has, where asking every one costs more than all else of a step:
    torch's code has left the processor's caches by then.

    Once many batches were alike, only every sixteenth is asked, and the last; at one that is not,
    each again. Where nobody knows which is the last, each is asked. Where the loader draws another
    number of samples for its batches than the first has rows (graphs, time first), that number
    counts.
    """

    __slots__ = ("_drawn", "_last", "_num_alike", "ask_at", "size")

    def __init__(
        self, num_batches: int | None, told: int | None, num_drawn: int | None = None
    ) -> None:
        self.size, self._drawn = told, num_drawn
        self.ask_at: float = 0 if told is None else math.inf  # the next batch to be asked
        self._last = None if num_batches is None else num_batches - 1
        self._num_alike = 0

    def ask(self, number: int, batch: Any) -> tuple[int | None, float]:
        """The size of the batch of that number, None if unknown; and which one to ask next.

        A batch is an object of the user's, of whatever kind.
        """
        try:
            size = num_samples_in(batch)
        except Exception:  # noqa: BLE001 - its shape is code of the user's
            size = None
        is_full = self._last is not None and number < self._last
        if self._drawn is not None and is_full and size != self._drawn:
            self.size, self.ask_at = self._drawn, math.inf
            return self.size, self.ask_at
        self._num_alike = self._num_alike + 1 if size == self.size else 0
        self.size = size
        self.ask_at = number + 1
        if self._num_alike >= _MANY_ALIKE and self._last is not None and number < self._last:
            self.ask_at = min(number + _ASKED_EVERY, self._last)
        return size, self.ask_at


def num_drawn_by(loader: Any) -> int | None:
    """Samples of each batch but the last, as a DataLoader or its batch sampler says it."""
    try:
        if not hasattr(loader, "batch_sampler"):  # others may count tokens
            return None
        size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    except Exception:  # noqa: BLE001 - a loader of the user's, of whatever kind: unknown
        return None
    return size if isinstance(size, int) and size > 0 else None


def num_batches_in(loader: Any) -> int | None:
    """As many as the loader will give, where that is certain.

    torch's DataLoader over an iterable dataset only hopes so, and warns who has asked it.
    """
    try:
        return len(getattr(loader, "batch_sampler", loader))
    except Exception:  # noqa: BLE001 - a loader of the user's, of whatever kind: unknown
        return None


class TimedLoader:
    """A torch DataLoader that somebody else iterates, whose waits are told until `undo`.

    It and its iterators stay what they are, but for one attribute each.
    """

    def __init__(self, loader: Any, waited: Waited) -> None:
        # accelerate wraps torch's; both its own and a skipping one ask the loader inside.
        while hasattr(loader, "base_dataloader"):
            loader = loader.base_dataloader
        self._loader, self._waited = loader, waited
        self.is_timed = callable(getattr(loader, "_get_iterator", None))
        if self.is_timed:
            self._get_iterator = loader._get_iterator
            loader._get_iterator = self._make

    def _make(self) -> Any:
        iterator = self._get_iterator()
        next_data = getattr(iterator, "_next_data", None)
        if next_data is not None:
            iterator._next_data = self._timed(next_data)
        return iterator

    def _timed(self, next_data: Callable[[], Any]) -> Callable[[], Any]:
        def timed() -> Any:
            began = time.monotonic()
            batch = next_data()
            self._waited(began, time.monotonic(), batch)
            return batch

        return timed

    def undo(self) -> None:
        """The next iterator is not timed."""
        if self.is_timed:
            vars(self._loader).pop("_get_iterator", None)
