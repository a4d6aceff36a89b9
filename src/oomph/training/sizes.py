"""Failures, successes, measurements and a plan -> how many examples to run at a time.

Examples may differ in size (tokens, pixels). A failure also holds for larger examples, a success
also for smaller ones; sizes are sorted into buckets.
"""

# Without a plan, the whole batch is tried first; with one, the number of examples that its replays
# say fit. Where memory is measured, the measurements decide, even above the plan, and longer
# examples are split before they fail. After a failure, the next size is one that fitted before, or
# half, or the predictor's if that is smaller; it divides the batch if possible. After many good
# steps a larger size is tried, since another process may have released memory; each failure doubles
# the number of steps until the next try.

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from oomph.records.plan import MicroBatchLimits, Plan
from oomph.records.prediction import Prediction
from oomph.records.trace import Category
from oomph.units import MIB

# (examples in the batch, size that failed) -> a size that should fit; None if unknown
Predictor = Callable[[int, int], int | None]

# Judgement: lengths within a fifth of each other share a bucket.
_BUCKETS_PER_DOUBLING = 4
# Judgement, in complete steps: a failed try costs one step, so at most one step in a hundred.
_GROW_AFTER = 100
_MOST_PATIENCE = 2**20  # judgement: longer than any training


@dataclass(slots=True)
class _Limit:
    """The limit of one bucket."""

    size: int  # the largest size to try
    below: int  # the size that failed, if measurements may approach it; else equal to `size`
    num_good: int = 0  # good steps at this size since then
    patience: int = _GROW_AFTER


class Sizes:
    """The micro-batch sizes that fit, by the size of an example."""

    def __init__(
        self,
        first: int | None = None,
        predictor: Predictor | None = None,
        *,
        planned: PlannedSizes | None = None,
        measured: Measurements | None = None,
        may_grow: Callable[[], bool] = lambda: False,
    ) -> None:
        """may_grow: whether measurements may exceed the first size; called once, after a step."""
        self._first, self._predictor, self._planned = first, predictor, planned
        self._measured, self._may_grow, self._grows = measured, may_grow, False
        self._has_stepped = False  # the first step allocates the optimizer's state
        self._by_memory: dict[tuple[int, int], int] = {}  # by (examples, elements)
        self._num_measured = 0  # number of measurements when `_by_memory` was computed
        self._limits: dict[int, _Limit] = {}  # by bucket; only buckets that failed

    def size_for(self, num: int, elements: int) -> int:
        """Return how many of `num` examples of this size to run at a time."""
        first = min(self._first or num, num)
        by_memory = self._size_by_memory(num, elements)
        if by_memory is not None:
            first = by_memory if self._grows or by_memory < first else first
        if self._planned is not None:
            first = max(first, self._planned.fit(num, elements))
        bucket = bucket_of(elements) if self._limits else 0
        limits = [_most(limit, by_memory) for at, limit in self._limits.items() if at <= bucket]
        return max(1, min([first, *limits]))

    def _size_by_memory(self, num: int, elements: int) -> int | None:
        """Return the largest size that fits by measurement; None if nothing was measured.

        Where the plan covers this length, measurements of other lengths are not used.
        """
        measured, planned = self._measured, self._planned
        if measured is None or not self._has_stepped:
            return None
        if planned is not None and planned.covers(elements) and not measured.has(elements):
            return None
        if measured.num != self._num_measured:
            self._by_memory, self._num_measured = {}, measured.num
        if (num, elements) not in self._by_memory:
            fits = measured.fits(elements)
            if fits is None:
                return None
            if planned is not None:
                fits = min(fits, planned.most(num, elements))
            self._by_memory[num, elements] = friendly(num, max(fits, 1))
        return self._by_memory[num, elements]

    def failed(self, num: int, elements: int, size: int) -> int:
        """Record a failure; return the next size to try, 0 if a single example was too much."""
        by_memory = self._size_by_memory(num, elements)
        fitted = self._measured.size_that_fitted(elements) if self._measured else 0
        smaller = fitted if 0 < fitted < size else next_size(num, size, self._predictor)
        if by_memory is not None:
            smaller = min(smaller, by_memory)
        bucket = bucket_of(elements)
        before = self._limits.get(bucket)
        patience = min(2 * before.patience, _MOST_PATIENCE) if before else _GROW_AFTER
        # If the measurements did not cause this failure, later ones may still approach `size`.
        below = size if by_memory is None or by_memory < size else max(smaller, 1)
        if self._measured is not None and below < size:
            self._measured.failed(elements, size)
        self._limits[bucket] = _Limit(max(smaller, 1), below, patience=patience)
        return smaller

    def fitted(self, num: int, elements: int, size: int) -> None:
        """Record a successful step. After many of them a larger size may be tried."""
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
            larger = (size for size in divisors(num) if size > limit.size)
            limit.size = limit.below = next(larger, num)

    def state(self) -> dict[str, Any]:
        """Return the sizes learnt, for a checkpoint."""
        limits = {bucket: asdict(limit) for bucket, limit in self._limits.items()}
        return {"limits": limits, "has_stepped": self._has_stepped, "grows": self._grows}

    def load(self, state: dict[str, Any]) -> None:
        limits = {int(bucket): _Limit(**limit) for bucket, limit in state["limits"].items()}
        self._limits, self._by_memory = limits, {}
        self._has_stepped, self._grows = bool(state["has_stepped"]), bool(state["grows"])

    def forget(self) -> None:
        """Start over with the first size."""
        self._limits.clear()
        self._forget_memory()

    def grow_soon(self) -> None:
        """Try larger sizes after each good step, because a change has saved memory."""
        self._forget_memory()
        for limit in self._limits.values():
            limit.num_good, limit.patience = 0, 1

    def _forget_memory(self) -> None:
        self._by_memory.clear()
        if self._measured is not None:
            self._measured.forget()


def _most(limit: _Limit, by_memory: int | None) -> int:
    """Return the limit, raised to what measurements allow below the size that failed."""
    if by_memory is not None and limit.size < by_memory < limit.below:
        return by_memory
    return limit.size


def next_size(num: int, failed: int, predictor: Predictor | None = None) -> int:
    """Return a size at most half of the one that failed; a divisor of the batch if possible."""
    half = failed // 2
    predicted = predictor(num, failed) if predictor else None
    if predicted is not None:
        half = min(half, predicted) or min(half, 1)
    return friendly(num, half)


@functools.lru_cache(maxsize=4096)  # called before every batch
def friendly(num: int, most: int) -> int:
    """Return the largest divisor of `num` up to `most`; `most` if none is above half of it."""
    if most >= num:
        return num
    divisor = max((size for size in divisors(num) if size <= most), default=0)
    # A batch of 37 has no useful divisor: 18 at a time are faster than 1, and as exact.
    return divisor if 2 * divisor > most else most


def divisors(num: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(num) + 1) if num % size == 0]
    return sorted({*small, *(num // size for size in small)})


def bucket_of(elements: int) -> int:
    return math.ceil(_BUCKETS_PER_DOUBLING * math.log2(max(elements, 1)))


# ---- sizes from a plan -------------------------------------------------------------------------

# Parts of the peak that do not depend on the micro-batch.
_FIXED: tuple[Category, ...] = ("parameters", "gradients", "optimizer")


def predictor_of(plan: Plan, available_bytes: Callable[[], int | None] | None = None) -> Predictor:
    """Return a predictor of the sizes that fit into the memory now free, by a plan's prediction.

    Weights, gradients and optimizer states are constant; all else is proportional to the
    micro-batch.
    """
    read = available_bytes or bytes_for_us

    def largest(num: int, failed: int) -> int | None:
        free = read()
        if free is None:
            return None
        fits = [
            size
            for size in divisors(num)
            if size < failed and predicted_bytes(plan.prediction, size) <= free
        ]
        return max(fits, default=1)

    return largest


class PlannedSizes:
    """The sizes that a plan's replays say fit, also for examples shorter than the planned ones.

    The same number of elements in shorter examples takes the same memory, or less where something
    grows with the square of the length.
    """

    def __init__(self, limits: MicroBatchLimits, elements: int) -> None:
        self._planned = elements
        self._fit, self._too_many = limits.fit * elements, limits.too_many * elements

    def covers(self, elements: int) -> bool:
        """Return whether examples of this size are no longer than the planned ones."""
        return elements <= self._planned

    def fit(self, num: int, elements: int) -> int:
        """Return how many are known to fit; 0 if the plan does not cover this size."""
        most = int(self._fit / max(elements, 1))
        return friendly(num, most) if self.covers(elements) else 0

    def most(self, num: int, elements: int) -> int:
        """Return how many may be tried: all if shorter than planned, where more may fit."""
        if elements < self._planned:
            return num
        return friendly(num, max(math.ceil(self._too_many / elements) - 1, 1))


def planned_sizes(plan: Plan | None) -> PlannedSizes | None:
    """Return the sizes that a plan gives; None if it gives none."""
    limits = plan.reach if plan else None
    return PlannedSizes(limits, limits.elements) if limits and limits.elements else None


def predicted_bytes(prediction: Prediction, size: int) -> int:
    """Return the bytes torch reserves at another micro-batch, scaled from a prediction's peak."""
    fixed = sum(prediction.by_category.get(each, 0) for each in _FIXED)
    moving = max(prediction.reserved_bytes - fixed, 0)
    return int(fixed + moving * size / prediction.variant.micro_batch)


def bytes_for_us() -> int | None:
    """Return the free GPU memory plus what torch has already reserved; None without a GPU."""
    if not torch.cuda.is_initialized():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved())


# ---- measurements ------------------------------------------------------------------------------
# Torch tracks its own peak. After a successful batch, the peak minus what stays allocated (weights,
# optimizer states, gradients) is what its largest piece took. More examples take at most
# proportionally more. An example of e elements takes u(e) x e bytes, where u is linear in e: exact
# for memory that grows with the length and its square, as in transformers. After only one size is
# measured, larger ones are assumed to grow with the square. For most models this is too much; it is
# corrected once such a batch is measured.
#
# Each pair of example size and micro-batch is measured once, by resetting torch's peak before and
# reading it after. Other batches are neither reset nor read, because both take time.

# Tensors whose sum fits may still not fit one by one: the allocator rounds sizes and leaves holes.
# Judgement: being wrong costs only one attempt.
_HOLES_RATIO = 0.04
# What does not fit into the holes needs a new segment, and the last one may be nearly empty:
# torch's kLargeBuffer (c10/cuda/CUDACachingAllocator.cpp).
_SEGMENT_BYTES = 20 * MIB


@dataclass(frozen=True, slots=True)
class Reading:
    """A GPU's memory at one moment."""

    allocated_bytes: int
    peak_bytes: int  # peak allocation since the last reset
    room_bytes: int  # that torch has reserved or could reserve


class CudaMemory:
    """The memory of a device, capped at `limit_bytes` for torch if that is given."""

    segment_bytes = _SEGMENT_BYTES

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device, self._limit_bytes = device, limit_bytes

    def read(self) -> Reading:
        free, _ = torch.cuda.mem_get_info(self._device)
        room = int(free + torch.cuda.memory_reserved(self._device))
        return Reading(
            allocated_bytes=torch.cuda.memory_allocated(self._device),
            peak_bytes=torch.cuda.max_memory_allocated(self._device),
            room_bytes=room if self._limit_bytes is None else min(room, self._limit_bytes),
        )

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats(self._device)


@dataclass(slots=True)
class _Measured:
    """For one example size: the most examples run at a time, and the bytes each one took."""

    size: int
    each_bytes: float


class Measurements:
    """The memory measured in this training run."""

    def __init__(self, memory: CudaMemory, gradient_bytes: Callable[[], int]) -> None:
        """gradient_bytes: returns the size of the gradients not allocated at that moment."""
        self._memory = memory
        self._gradient_bytes = gradient_bytes
        self._measured: dict[int, _Measured] = {}  # by elements
        self._seen: set[tuple[int, int]] = set()  # (elements, size)
        self._before: Reading | None = None
        self._standing_bytes = 0  # weights, states and gradients, at the last call of `fits`
        self._too_much_bytes: float = math.inf  # the smallest amount that has failed
        self._fitted: dict[int, int] = {}  # by elements: the most at a time in a complete step
        self.num = 0  # measurements so far

    # ---- measuring -----------------------------------------------------------------------------

    def begin(self, elements: int, size: int) -> None:
        """Reset the peak before a batch, unless this size has been measured."""
        if (elements, size) in self._seen:
            self._before = None
        else:
            self._memory.reset_peak()
            self._before = self._memory.read()

    def end(self, elements: int, size: int, num: int) -> None:
        """Read the peak after the last backward, before the update, while all gradients exist."""
        before, self._before = self._before, None
        if before is None:
            return
        after = self._memory.read()
        self._seen.add((elements, size))
        num_pieces = -(-num // size)
        # The gradients of a single piece appear while its activations are freed, so count them in.
        stays = before.allocated_bytes if num_pieces == 1 else after.allocated_bytes
        self._note(max(elements, 1), -(-num // num_pieces), after.peak_bytes - stays)

    def _note(self, elements: int, size: int, taken_bytes: int) -> None:
        known = self._measured.get(elements)
        if known is None or size > known.size:
            self._measured[elements] = _Measured(size, taken_bytes / size)
            self.num += 1

    def fitted(self, elements: int, size: int) -> None:
        """Record a step that fitted, with the optimizer's state already allocated."""
        if size > self._fitted.get(elements, 0):
            self._fitted[elements] = size

    def failed(self, elements: int, size: int) -> None:
        """Record that a size predicted to fit did not. No later prediction allows as much."""
        if self._measured and self._standing_bytes:
            needed = self._standing_bytes + size * self.each_bytes(elements)
            self._too_much_bytes = min(self._too_much_bytes, needed)
            self.num += 1

    def state(self) -> dict[str, Any]:
        """Return the measurements, for a checkpoint."""
        return {
            "measured": {elements: asdict(each) for elements, each in self._measured.items()},
            "seen": sorted(self._seen),
            "fitted": dict(self._fitted),
            "too_much_bytes": self._too_much_bytes,
            "room_bytes": self._memory.read().room_bytes,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Load measurements. Failures apply only if there is no more memory here than there was."""
        self.forget()
        self._measured = {int(e): _Measured(**each) for e, each in state["measured"].items()}
        if self._memory.read().room_bytes <= state["room_bytes"]:
            self._too_much_bytes = float(state["too_much_bytes"])
            self._fitted = {int(e): int(size) for e, size in state["fitted"].items()}
            self._seen = {(int(e), int(size)) for e, size in state["seen"]}
        self.num += 1

    def forget(self) -> None:
        """Drop all measurements, because they no longer hold."""
        self._measured.clear()
        self._seen.clear()
        self._fitted.clear()
        self._too_much_bytes = math.inf

    # ---- prediction ----------------------------------------------------------------------------

    def fits(self, elements: int) -> int | None:
        """Return how many fit at a time, read between two batches; None if nothing was measured."""
        if not self._measured:
            return None
        now = self._memory.read()
        self._standing_bytes = now.allocated_bytes + self._gradient_bytes()
        room = min(now.room_bytes, self._too_much_bytes)
        holes, each = room * _HOLES_RATIO, max(self.each_bytes(elements), 1)
        fits = int((room - holes - self._standing_bytes) / each)
        known = self._measured.get(max(elements, 1))
        if known is not None and fits > known.size:  # growing may need a new segment
            holes = max(holes, self._memory.segment_bytes)
            fits = max(int((room - holes - self._standing_bytes) / each), known.size)
        return max(fits, self.size_that_fitted(elements), 0)

    def has(self, elements: int) -> bool:
        """Return whether examples of this size were measured."""
        return max(elements, 1) in self._measured

    def size_that_fitted(self, elements: int) -> int:
        """Return the most examples of this size that ran at a time; 0 if none."""
        return self._fitted.get(elements, 0)

    def each_bytes(self, elements: int) -> float:
        """Return the bytes that one example of this many elements takes."""
        elements = max(elements, 1)
        known = self._measured.get(elements)
        if known is not None:
            return known.each_bytes
        sizes = sorted(self._measured)
        below = max((size for size in sizes if size < elements), default=None)
        above = min((size for size in sizes if size > elements), default=None)
        if below is None:
            assert above is not None  # noqa: S101 - something was measured
            return self._slope(above) * elements
        if above is None:
            return self._beyond(sizes[0], below, elements) * elements
        share = (elements - below) / (above - below)
        return (self._slope(below) * (1 - share) + self._slope(above) * share) * elements

    def _slope(self, elements: int) -> float:
        return self._measured[elements].each_bytes / elements

    def _beyond(self, smallest: int, largest: int, elements: int) -> float:
        """Return bytes per element for larger examples than measured: linear, at most quadratic."""
        least = self._slope(largest)
        most = least * elements / largest
        if smallest == largest:
            return most
        steepness = (least - self._slope(smallest)) / (largest - smallest)
        return min(max(least + steepness * (elements - largest), least), most)
