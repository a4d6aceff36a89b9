"""Budget: how much text is to be trained on, and what a GPU costs. Bill: what that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from oomph.errors import UsageError
from oomph.records.prediction import Prediction

_SECONDS_OF_AN_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """A number of tokens, and the price of a GPU for an hour, in any currency."""

    tokens: float
    price: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What a training takes from its first to its last token, if nothing goes wrong."""

    tokens: float
    hours: float
    gpu_hours: float
    cost: float | None  # None: no price is given


def budget_of(tokens: float | None, price: float | None) -> Budget | None:
    """Return the budget; None without tokens. Raises UsageError."""
    for name, value in (("--tokens", tokens), ("--price", price)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{name} {value:g} is not possible", attempt=f"{name} above 0")
    if tokens is None:
        if price is not None:
            raise UsageError(
                "a price needs a number of tokens",
                because="a plan's cost is that of the whole training",
                attempt=f"--tokens 1e9 --price {price:g}",
            )
        return None
    return Budget(tokens=tokens, price=price)


def bill_of(prediction: Prediction, budget: Budget) -> Bill | None:
    """Return what a training costs by this prediction; None if it has no time, or no text."""
    if not prediction.tokens_per_s:
        return None
    hours = budget.tokens / prediction.tokens_per_s / _SECONDS_OF_AN_HOUR
    gpu_hours = hours * prediction.variant.num_gpus
    cost = None if budget.price is None else gpu_hours * budget.price
    return Bill(tokens=budget.tokens, hours=hours, gpu_hours=gpu_hours, cost=cost)
