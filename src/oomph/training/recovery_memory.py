"""What pieces took of the GPU's memory -> how many examples of any size fit at a time.

Torch counts its own peak. After a batch that went well, the peak above what stays (weights, states,
gradients) is what its largest piece took. More examples take at most in proportion more. Examples
of other sizes take u(e) x e bytes each, where e is their number of elements and u is a line in e:
exact for all that grows with the length and with its square, which is what transformers have. With
one size measured the square is assumed for larger ones: too much for most models, until such a
batch has been measured itself.

Each size of examples and of pieces is measured once. For that torch's peak is reset before and read
after; otherwise nothing is read and nothing reset, for it takes its time.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch

from oomph.units import MIB

# What fits as a sum of tensors may not fit in pieces: the allocator rounds sizes, and has holes.
_HOLES_RATIO = 0.04
# What does not fit into the holes needs a segment, and the last one may be nearly empty: torch's
# kLargeBuffer (c10/cuda/CUDACachingAllocator.cpp).
_SEGMENT_BYTES = 20 * MIB


@dataclass(frozen=True, slots=True)
class Reading:
    """The memory of one GPU at a moment."""

    allocated_bytes: int
    peak_bytes: int  # of what was allocated, since it was reset
    room_bytes: int  # that torch has, or could have


class Memory(Protocol):
    """A GPU's memory, as torch counts it."""

    segment_bytes: int  # that it is taken in

    def read(self) -> Reading: ...
    def reset_peak(self) -> None: ...


class CudaMemory:
    """Of a device, of which torch may have `limit_bytes`, where that is less than it could."""

    segment_bytes = _SEGMENT_BYTES

    def __init__(self, device: Any, limit_bytes: int | None = None) -> None:
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
    """Of examples of one size: the most that were run at a time, and what one of them took."""

    size: int
    each_bytes: float


class Measurements:
    """What was measured in this training."""

    def __init__(self, memory: Memory, gradient_bytes: Callable[[], int]) -> None:
        """gradient_bytes: of what is trained and has no gradient at that moment."""
        self._memory = memory
        self._gradient_bytes = gradient_bytes
        self._measured: dict[int, _Measured] = {}  # by elements
        self._seen: set[tuple[int, int]] = set()  # elements and sizes
        self._before: Reading | None = None
        self._standing_bytes = 0  # weights, states and gradients, when it was last asked
        self._too_much_bytes: float = math.inf  # the least that has failed
        self._fitted: dict[int, int] = {}  # by elements, the most at a time in a whole step
        self.num = 0  # of measurements so far

    # ---- measuring -----------------------------------------------------------------------------

    def begin(self, elements: int, size: int) -> None:
        """Before a batch."""
        if (elements, size) in self._seen:
            self._before = None
        else:
            self._memory.reset_peak()
            self._before = self._memory.read()

    def end(self, elements: int, size: int, num: int) -> None:
        """After its last backward, and before the update, when its gradients are all there."""
        before, self._before = self._before, None
        if before is None:
            return
        after = self._memory.read()
        self._seen.add((elements, size))
        num_pieces = -(-num // size)
        # The gradients of a single piece come while it gives its memory back: they are counted in.
        stays = before.allocated_bytes if num_pieces == 1 else after.allocated_bytes
        self._note(max(elements, 1), -(-num // num_pieces), after.peak_bytes - stays)

    def _note(self, elements: int, size: int, taken_bytes: int) -> None:
        known = self._measured.get(elements)
        if known is None or size > known.size:
            self._measured[elements] = _Measured(size, taken_bytes / size)
            self.num += 1

    def fitted(self, elements: int, size: int) -> None:
        """A whole step went well, with what the optimizer's first one had left in memory."""
        if size > self._fitted.get(elements, 0):
            self._fitted[elements] = size

    def failed(self, elements: int, size: int) -> None:
        """What was told to fit did not: as much is not told again, of examples of any size."""
        if self._measured and self._standing_bytes:
            needed = self._standing_bytes + size * self.each_bytes(elements)
            self._too_much_bytes = min(self._too_much_bytes, needed)
            self.num += 1

    def state(self) -> dict[str, Any]:
        """What was measured, for a checkpoint."""
        return {
            "measured": {elements: asdict(each) for elements, each in self._measured.items()},
            "seen": sorted(self._seen),
            "fitted": dict(self._fitted),
            "too_much_bytes": self._too_much_bytes,
            "room_bytes": self._memory.read().room_bytes,
        }

    def load(self, state: dict[str, Any]) -> None:
        """What failed is of this GPU only if there is no more room than there was."""
        self.forget()
        self._measured = {int(e): _Measured(**each) for e, each in state["measured"].items()}
        if self._memory.read().room_bytes <= state["room_bytes"]:
            self._too_much_bytes = float(state["too_much_bytes"])
            self._fitted = {int(e): int(size) for e, size in state["fitted"].items()}
            self._seen = {(int(e), int(size)) for e, size in state["seen"]}
        self.num += 1

    def forget(self) -> None:
        """What was measured is true no more."""
        self._measured.clear()
        self._seen.clear()
        self._fitted.clear()
        self._too_much_bytes = math.inf

    # ---- telling -------------------------------------------------------------------------------

    def fits(self, elements: int) -> int | None:
        """How many at a time, between two batches; None if nothing was measured."""
        if not self._measured:
            return None
        now = self._memory.read()
        self._standing_bytes = now.allocated_bytes + self._gradient_bytes()
        room = min(now.room_bytes, self._too_much_bytes)
        holes, each = room * _HOLES_RATIO, max(self.each_bytes(elements), 1)
        fits = int((room - holes - self._standing_bytes) / each)
        known = self._measured.get(max(elements, 1))
        if known is not None and fits > known.size:  # to grow, a segment is to be had
            holes = max(holes, self._memory.segment_bytes)
            fits = max(int((room - holes - self._standing_bytes) / each), known.size)
        return max(fits, self.size_that_fitted(elements), 0)

    def has(self, elements: int) -> bool:
        """Were examples of this size measured?"""
        return max(elements, 1) in self._measured

    def size_that_fitted(self, elements: int) -> int:
        """The most that were run at a time of examples of this size; 0 for none."""
        return self._fitted.get(elements, 0)

    def each_bytes(self, elements: int) -> float:
        """What one example of so many elements takes."""
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
        """Bytes for each element, where no examples were as large: by the line, or the square."""
        least = self._slope(largest)
        most = least * elements / largest
        if smallest == largest:
            return most
        steepness = (least - self._slope(smallest)) / (largest - smallest)
        return min(max(least + steepness * (elements - largest), least), most)
