"""What a whole training takes, worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from planning.plans import plan_of

from oomph.errors import UsageError
from oomph.records.bill import Budget, bill_of, budget_of
from oomph.showing.predict import bill_in_words

PREDICTION = replace(
    plan_of().prediction,
    variant=replace(plan_of().variant, num_gpus=64, sharding="fsdp"),
    step_s=2.0,
    tokens_per_s=250_000.0,
)


def test_a_billion_tokens_take_their_time_on_every_gpu() -> None:
    bill = bill_of(PREDICTION, Budget(tokens=1e9, price=2.5))
    assert bill is not None
    assert bill.hours == pytest.approx(4000 / 3600)
    assert bill.gpu_hours == pytest.approx(64 * 4000 / 3600)
    assert bill.cost == pytest.approx(2.5 * 64 * 4000 / 3600)


def test_without_a_price_there_are_hours_and_no_cost() -> None:
    bill = bill_of(PREDICTION, Budget(tokens=1e9))
    assert bill is not None
    assert bill.cost is None
    assert bill_in_words(PREDICTION, Budget(tokens=1e9)) == (
        "1e+09 tokens: 1.11 hours on 64 GPUs, 71 GPU-hours"
    )


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"tokens_per_s": None, "step_s": None}, "a step's time is unknown"),
        ({"tokens_per_s": None}, "the batch has no text"),
    ],
)
def test_what_cannot_be_known_is_said_to_be_unknown(
    changes: dict[str, float | None], why: str
) -> None:
    prediction = replace(PREDICTION, **changes)  # type: ignore[arg-type] # fields of one type
    assert bill_of(prediction, Budget(tokens=1e9)) is None
    assert why in bill_in_words(prediction, Budget(tokens=1e9))


@pytest.mark.parametrize(
    ("tokens", "price"), [(0.0, None), (-1.0, None), (1e9, 0.0), (float("nan"), None), (None, 2.5)]
)
def test_an_impossible_budget_is_refused(tokens: float | None, price: float | None) -> None:
    with pytest.raises(UsageError):
        budget_of(tokens, price)


def test_without_tokens_there_is_no_budget() -> None:
    assert budget_of(None, None) is None
