"""What fitted and what did not -> how many examples at a time.

Examples of one kind may differ in size (tokens, pixels): what is learnt of one size is true of
larger ones where it failed, and of smaller ones where it fitted. Sizes are sorted into buckets.
Without a plan the whole batch is tried first; with one, as many as its replays said that fit. Where
memory is measured (recovery_memory.py), as many are taken as fit by that, more than was planned
included, and what it says of longer examples comes before they fail. After a failure the size is
what fitted before, or half, or what a predictor says if that is less, and divides the batch where
it can. After a good while a size that is larger is tried again, each time after twice the while:
memory may have been another's.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

# (examples in the batch, size that failed) -> a size that should fit, None if it cannot tell
Predictor = Callable[[int, int], int | None]

_BUCKETS_PER_DOUBLING = 4  # lengths within a fifth of each other are one kind
_GROW_AFTER = 100  # whole steps; a try that fails costs one of them
_MOST_PATIENCE = 2**20


class Measured(Protocol):
    """What is known of the memory that examples take (recovery_memory.Measurements)."""

    num: int

    def forget(self) -> None: ...
    def fitted(self, elements: int, size: int) -> None: ...
    def failed(self, elements: int, size: int) -> None: ...
    def has(self, elements: int) -> bool: ...
    def fits(self, elements: int) -> int | None: ...
    def size_that_fitted(self, elements: int) -> int: ...


class Reach(Protocol):
    """What a plan knows of sizes (recovery.PlannedReach), by the batch and its examples' size."""

    def covers(self, elements: int) -> bool: ...
    def fit(self, num: int, elements: int) -> int: ...
    def most(self, num: int, elements: int) -> int: ...


@dataclass(slots=True)
class _Limit:
    """What is known of one bucket."""

    size: int  # the largest that may be tried
    below: int  # the size that failed, if measurements may come near it; else the same as `size`
    num_good: int = 0  # steps at this size since
    patience: int = _GROW_AFTER


class Sizes:
    """The sizes that fit, by how large an example is."""

    def __init__(
        self,
        first: int | None = None,
        predictor: Predictor | None = None,
        *,
        reach: Reach | None = None,
        measured: Measured | None = None,
        may_grow: Callable[[], bool] = lambda: False,
    ) -> None:
        """may_grow: beyond the first, as far as was measured; asked once, after a whole step."""
        self._first, self._predictor, self._reach = first, predictor, reach
        self._measured, self._may_grow, self._grows = measured, may_grow, False
        self._has_stepped = False  # there is memory of the optimizer that comes with its first step
        self._told: dict[tuple[int, int], int] = {}  # by measurements; of examples and elements
        self._num_told_by = 0  # measurements
        self._limits: dict[int, _Limit] = {}  # by bucket, of those that failed

    def size_for(self, num: int, elements: int) -> int:
        """How many of `num` examples of that size to take at a time."""
        first = min(self._first or num, num)
        told = self._told_by_memory(num, elements)
        if told is not None:
            first = told if self._grows or told < first else first
        if self._reach is not None:
            first = max(first, self._reach.fit(num, elements))
        if not self._limits:
            return max(1, first)
        bucket = bucket_of(elements)
        limits = [_most(limit, told) for at, limit in self._limits.items() if at <= bucket]
        return max(1, min(first, *limits) if limits else first)

    def _told_by_memory(self, num: int, elements: int) -> int | None:
        """The largest size that fits by what was measured; None before there is anything.

        What was measured of other lengths is not asked where the plan knows this one.
        """
        measured, reach = self._measured, self._reach
        if measured is None or not self._has_stepped:
            return None
        if reach is not None and reach.covers(elements) and not measured.has(elements):
            return None
        if measured.num != self._num_told_by:
            self._told, self._num_told_by = {}, measured.num
        told = self._told.get((num, elements))
        if told is None:
            fits = measured.fits(elements)
            if fits is None:
                return None
            if reach is not None:
                fits = min(fits, reach.most(num, elements))
            told = self._told[num, elements] = friendly(num, max(fits, 1))
        return told

    def failed(self, num: int, elements: int, size: int) -> int:
        """The next size to try; 0 if a single example was too much."""
        told = self._told_by_memory(num, elements)
        fitted = self._measured.size_that_fitted(elements) if self._measured else 0
        smaller = fitted if 0 < fitted < size else next_size(num, size, self._predictor)
        if told is not None:
            smaller = min(smaller, told)
        bucket = bucket_of(elements)
        before = self._limits.get(bucket)
        patience = 2 * before.patience if before else _GROW_AFTER
        # What was measured has just been wrong, or there was nothing: then it may still come near.
        below = size if told is None or told < size else max(smaller, 1)
        if self._measured is not None and below < size:
            self._measured.failed(elements, size)
        self._limits[bucket] = _Limit(
            max(smaller, 1), below, patience=min(patience, _MOST_PATIENCE)
        )
        return smaller

    def fitted(self, num: int, elements: int, size: int) -> None:
        """A whole step went well. After many, a larger size may be tried."""
        if self._measured is not None and self._has_stepped:
            self._measured.fitted(elements, size)
        if not self._has_stepped:
            self._has_stepped, self._grows = True, self._may_grow()
        limit = self._limits.get(bucket_of(elements)) if self._limits else None
        if limit is None or size < limit.size:
            return
        limit.num_good += 1
        if limit.num_good >= limit.patience:
            limit.num_good = 0
            limit.size = limit.below = _next_divisor(num, limit.size)

    def state(self) -> dict[str, Any]:
        """What was learnt, for a checkpoint."""
        limits = {bucket: asdict(limit) for bucket, limit in self._limits.items()}
        return {"limits": limits, "has_stepped": self._has_stepped, "grows": self._grows}

    def load(self, state: dict[str, Any]) -> None:
        limits = {int(bucket): _Limit(**limit) for bucket, limit in state["limits"].items()}
        self._limits, self._told = limits, {}
        self._has_stepped, self._grows = bool(state["has_stepped"]), bool(state["grows"])

    def forget(self) -> None:
        """Begin with the first size again."""
        self._limits.clear()
        self._forget_memory()

    def grow_soon(self) -> None:
        """Something has changed that saves memory: larger sizes are tried after each good step."""
        self._forget_memory()
        for limit in self._limits.values():
            limit.num_good, limit.patience = 0, 1

    def _forget_memory(self) -> None:
        self._told.clear()
        if self._measured is not None:
            self._measured.forget()


def _most(limit: _Limit, told: int | None) -> int:
    """Measurements may say that more fits, below what failed."""
    return told if told is not None and limit.size < told < limit.below else limit.size


def next_size(num: int, failed: int, predictor: Predictor | None = None) -> int:
    """A size below one that failed: half of it or less, a divisor of the batch if there is one."""
    half = failed // 2
    predicted = predictor(num, failed) if predictor else None
    if predicted is not None:
        half = min(half, predicted) or min(half, 1)
    return friendly(num, half)


@functools.lru_cache(maxsize=4096)  # asked before every batch
def friendly(num: int, most: int) -> int:
    """The largest divisor of a batch that is not more than `most`, if it is not much less."""
    if most >= num:
        return num
    divisor = max((size for size in divisors(num) if size <= most), default=0)
    # A batch of 37 has no divisors: 18 at a time are better than one, and as exact.
    return divisor if 2 * divisor > most else most


def divisors(num: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(num) + 1) if num % size == 0]
    return sorted({*small, *(num // size for size in small)})


def bucket_of(elements: int) -> int:
    return math.ceil(_BUCKETS_PER_DOUBLING * math.log2(max(elements, 1)))


def _next_divisor(num: int, size: int) -> int:
    return next((each for each in divisors(num) if each > size), num)
