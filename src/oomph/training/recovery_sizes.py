"""What fitted and what did not -> how many examples at a time.

Examples of one kind may differ in size (tokens, pixels): what is learnt of one size is true of
larger ones where it failed, and of smaller ones where it fitted. Sizes are sorted into buckets.
Without a plan the whole batch is tried first. After a failure the size is halved, or what a
predictor says if that is less, and divides the batch where it can. After a good while a size that
is larger is tried again, each time after twice the while: memory may have been another's.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

# (examples in the batch, size that failed) -> a size that should fit, None if it cannot tell
Predictor = Callable[[int, int], int | None]

_BUCKETS_PER_DOUBLING = 4  # lengths within a fifth of each other are one kind
_GROW_AFTER = 100  # whole steps; a try that fails costs one of them
_MOST_PATIENCE = 2**20


@dataclass(slots=True)
class _Limit:
    """What is known of one bucket."""

    size: int  # the largest that may be tried
    num_good: int = 0  # steps at this size since
    patience: int = _GROW_AFTER


class Sizes:
    """The sizes that fit, by how large an example is."""

    def __init__(self, first: int | None = None, predictor: Predictor | None = None) -> None:
        self._first, self._predictor = first, predictor
        self._limits: dict[int, _Limit] = {}  # by bucket, of those that failed

    def size_for(self, num: int, elements: int) -> int:
        """How many of `num` examples of that size to take at a time."""
        known = [self._first or num]
        known += [limit.size for at, limit in self._limits.items() if at <= bucket_of(elements)]
        return max(1, min(num, *known))

    def failed(self, num: int, elements: int, size: int) -> int:
        """The next size to try; 0 if a single example was too much."""
        smaller = next_size(num, size, self._predictor)
        bucket = bucket_of(elements)
        before = self._limits.get(bucket)
        patience = 2 * before.patience if before else _GROW_AFTER
        self._limits[bucket] = _Limit(max(smaller, 1), patience=min(patience, _MOST_PATIENCE))
        return smaller

    def fitted(self, num: int, elements: int, size: int) -> None:
        """A whole step went well. After many, a larger size may be tried."""
        limit = self._limits.get(bucket_of(elements))
        if limit is None or size < limit.size:
            return
        limit.num_good += 1
        if limit.num_good >= limit.patience:
            limit.num_good = 0
            limit.size = _next_divisor(num, limit.size)

    def cap(self, elements: int, size: int) -> None:
        """Another rank needs smaller pieces than this one."""
        bucket = bucket_of(elements)
        limit = self._limits.setdefault(bucket, _Limit(size))
        limit.size = min(limit.size, max(size, 1))

    def forget(self) -> None:
        """Begin with the first size again."""
        self._limits.clear()

    def grow_soon(self) -> None:
        """Something has changed that saves memory: larger sizes are tried after each good step."""
        for limit in self._limits.values():
            limit.num_good, limit.patience = 0, 1


def next_size(num: int, failed: int, predictor: Predictor | None = None) -> int:
    """A size below one that failed: half of it or less, a divisor of the batch if there is one."""
    half = failed // 2
    predicted = predictor(num, failed) if predictor else None
    if predicted is not None:
        half = min(half, predicted) or min(half, 1)
    divisor = max((size for size in divisors(num) if size <= half), default=0)
    # A batch of 37 has no divisors: 18 at a time are better than one, and as exact.
    return divisor if 2 * divisor > half else half


def divisors(num: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(num) + 1) if num % size == 0]
    return sorted({*small, *(num // size for size in small)})


def bucket_of(elements: int) -> int:
    return math.ceil(_BUCKETS_PER_DOUBLING * math.log2(max(elements, 1)))


def _next_divisor(num: int, size: int) -> int:
    return next((each for each in divisors(num) if each > size), num)
