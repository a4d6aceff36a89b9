"""An out-of-memory error -> its memory back, a smaller size or another trick, or a clear end.

First everything that the error holds is dropped: its traceback has the frames of the forward, and
these have the activations. What the frames of the caller hold cannot be dropped from here.
"""

from __future__ import annotations

import gc
import math
import textwrap
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from oomph.errors import OomphError
from oomph.records.plan import Plan, Reach
from oomph.records.prediction import Prediction
from oomph.training.out_of_memory import is_out_of_memory, which_memory
from oomph.training.recovery_memory import Measurements
from oomph.training.recovery_sizes import Predictor, Sizes, divisors, friendly
from oomph.training.recovery_tricks import LastResorts

_MOST_TEXT = 400  # of torch's message, whose rest is advice
# Of the peak's make-up, what does not depend on the micro-batch.
_FIXED = ("parameters", "gradients", "optimizer")
_T = TypeVar("_T")


@dataclass(slots=True)
class Recovery:
    """What to do after each failure, and what was done so far."""

    sizes: Sizes
    resorts: LastResorts
    say: Callable[[str], None]
    splits: bool = True
    measured: Measurements | None = None
    num_ooms: int = 0
    num_ooms_before: int = 0  # this step
    tried: dict[str, None] = field(default_factory=dict)  # in order

    def after(self, error: BaseException, num: int, elements: int, size: int) -> int:
        """The size to go on with; 0 if nothing is left that could be tried."""
        memory, text = which_memory(error), said_by(error)
        self.num_ooms += 1
        release(error, is_thorough=self.num_ooms - self.num_ooms_before > 2)
        smaller = self.sizes.failed(num, elements, size) if self.splits else 0
        if smaller:
            next_one = f"trying {smaller} at a time"
        else:
            next_one = self.resorts.switch_on(memory) or ""
            smaller = size if next_one else 0
            self.sizes.grow_soon()
        self.tried.setdefault(f"{size} of {num} examples at a time")
        if next_one:
            self.say(f"out of memory with {size} of {num} examples at a time; {next_one}. {text}")
        return smaller

    def nothing_left(self, error_text: str) -> OomphError:
        """What was tried, and what would help."""
        tried = ", ".join([*self.tried, *self.resorts.tried])
        return OomphError(
            "one step does not fit into memory",
            because=f"tried: {tried}. {error_text}" if tried else error_text,
            attempt="oomph plan, for a way that fits: 8-bit or offloaded optimizer states, lower"
            " precision, several GPUs. Weights and optimizer are those of the last whole step",
        )


def half_updated(error_text: str) -> OomphError:
    return OomphError(
        "the optimizer ran out of memory in the middle of its step",
        because=f"{error_text}. Some parameters may have been updated and others not",
        attempt='the last checkpoint; Stepper(..., copies="always") keeps a copy of each step,'
        " where the optimizer does not step in backward",
    )


def said_by(error: BaseException) -> str:
    """The first sentences of an error, in one line."""
    return textwrap.shorten(" ".join(map(str, error.args)), _MOST_TEXT, placeholder=" ...")


def release(error: BaseException, *, is_thorough: bool = False) -> None:
    """Drop what an error holds, and give cached memory back."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        each = pending.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        pending += [each.__context__, each.__cause__]
        traceback.clear_frames(each.__traceback__)
        each.__traceback__ = None
    # Graphs with functions of Python's are often in circles. These are young; to look through all
    # that lives takes a large part of a second.
    gc.collect(2 if is_thorough else 1)
    empty_caches()


def tried_twice(work: Callable[[], _T]) -> _T:
    """What can be done again, with the cache emptied in between."""
    try:
        return work()
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        release(error)
    return work()


def empty_caches() -> None:
    for name in ("cuda", "xpu", "mps"):
        device = getattr(torch, name)
        if getattr(device, "is_initialized", device.is_available)():
            device.empty_cache()


# ---- what a plan knows ----------------------------------------------------------------------


def planned_sizes(plan: Plan, available_bytes: Callable[[], int | None] | None = None) -> Predictor:
    """The sizes that a plan's prediction says fit into what is free now.

    What grows with the micro-batch grows in proportion: the rest is weights, gradients and states.
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


class PlannedReach:
    """What a plan's replays say of sizes, also of shorter examples than it was made with.

    As many elements in shorter examples take the same, or less where something grows with the
    square of the length.
    """

    def __init__(self, reach: Reach, elements: int) -> None:
        self._planned = elements
        self._fit, self._too_many = reach.fit * elements, reach.too_many * elements

    def covers(self, elements: int) -> bool:
        """Are these no longer than what was planned with?"""
        return elements <= self._planned

    def fit(self, num: int, elements: int) -> int:
        """How many of these are known to fit; 0 if the plan does not cover them."""
        most = int(self._fit / max(elements, 1))
        return friendly(num, most) if self.covers(elements) else 0

    def most(self, num: int, elements: int) -> int:
        """How many may be tried; all of shorter ones: more of them may fit than are known."""
        if elements < self._planned:
            return num
        return friendly(num, max(math.ceil(self._too_many / elements) - 1, 1))


def reach_of(plan: Plan | None) -> PlannedReach | None:
    """None where the plan does not say."""
    reach = plan.reach if plan else None
    return PlannedReach(reach, reach.elements) if reach and reach.elements else None


def predicted_bytes(prediction: Prediction, size: int) -> int:
    """What torch reserves for another micro-batch, by the make-up of a prediction's peak."""
    fixed = sum(prediction.by_category.get(each, 0) for each in _FIXED)  # type: ignore[call-overload]
    moving = max(prediction.reserved_bytes - fixed, 0)
    return int(fixed + moving * size / prediction.variant.micro_batch)


def bytes_for_us() -> int | None:
    """What is free on the GPU, and what torch has of it already; None without one."""
    if not torch.cuda.is_initialized():
        return None
    free, _ = torch.cuda.mem_get_info()
    return int(free + torch.cuda.memory_reserved())
