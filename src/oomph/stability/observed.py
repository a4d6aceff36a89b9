"""What is seen of a step in fp64, and of the same step under autocast."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from oomph.stability.low_precision import Overflow
from oomph.stability.randomness import Draws
from oomph.stability.trial import Trial


@dataclass(frozen=True)
class Reference:
    """The step in fp64, what it drew, and what is not finite in it either (masks of -inf)."""

    trial: Trial
    cuda_autocast: Callable[[], AbstractContextManager[Any]]  # entered by the steps beside it
    gradient: Any
    fp32_gradient: Any
    draws: Draws
    is_there: Any  # for each value of the gradient: is it one, and not rounding of 0?
    infinite: set[tuple[str | None, str]]  # module and op
    limits: tuple[str, ...]


@dataclass(frozen=True)
class Observed:
    """One step under autocast."""

    scale: float
    loss: float
    gradient: Any
    zeroed_ratio: float
    overflows: list[Overflow]
    largest: float
    largest_in: str | None
    emulated: set[str]

    @property
    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.gradient).all())


class Broken(Exception):
    """What autocast makes the user's code raise, and where."""

    def __init__(self, error: Exception, module: str | None, op: str | None) -> None:
        super().__init__(str(error))
        self.error, self.module, self.op = error, module, op
