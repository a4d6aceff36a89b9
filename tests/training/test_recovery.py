"""After an error: its memory back, the next size, the next trick."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from planning.plans import plan_of
from torch import nn

from oomph.errors import UsageError
from oomph.records.plan import MicroBatchLimits
from oomph.records.workload import Variant
from oomph.training.recovery import LastResorts, release, text_of
from oomph.training.sizes import (
    _GROW_AFTER,
    PlannedSizes,
    Sizes,
    bucket_of,
    divisors,
    next_size,
    planned_sizes,
    predicted_bytes,
    predictor_of,
)
from training.stepper_kinds import MESSAGE


class Held:
    """Something that a frame holds, as it would an activation."""


def failing(kept: list[Any]) -> None:
    activation = Held()
    kept.append(weakref.ref(activation))
    try:
        raise ValueError("first")
    except ValueError:
        raise torch.OutOfMemoryError(MESSAGE)  # noqa: B904


def test_what_the_frames_of_an_error_hold_is_dropped() -> None:
    kept: list[Any] = []
    with pytest.raises(torch.OutOfMemoryError) as caught:
        failing(kept)
    assert kept[0]() is not None
    release(caught.value)
    assert kept[0]() is None


def test_what_an_error_said_is_one_line() -> None:
    assert text_of(RuntimeError("CUDA error:\n  out of memory")) == "CUDA error: out of memory"


@given(num=st.integers(1, 500), data=st.data())
def test_the_next_size_is_half_or_a_divisor_that_is_not_much_less(
    num: int, data: st.DataObject
) -> None:
    failed = data.draw(st.integers(1, num))
    half, size = failed // 2, next_size(num, failed)
    near = [divisor for divisor in divisors(num) if half < 2 * divisor <= 2 * half]
    assert size == max(near, default=half)


def test_sizes_end_at_one() -> None:
    size, seen = 96, []
    while size:
        seen.append(size)
        size = next_size(96, size)
    assert seen == [96, 48, 24, 12, 6, 3, 1]


def test_a_predictor_may_ask_for_less_than_half_and_never_for_more() -> None:
    assert next_size(64, 64, lambda *_: 8) == 8
    assert next_size(64, 64, lambda *_: 60) == 32
    assert next_size(64, 64, lambda *_: None) == 32
    assert next_size(64, 2, lambda *_: 0) == 1


def test_longer_examples_are_cut_finer_and_shorter_ones_are_not() -> None:
    sizes = Sizes()
    assert sizes.size_for(32, 512) == 32
    assert sizes.failed(32, 512, 32) == 16
    assert sizes.size_for(32, 512) == 16
    assert sizes.size_for(32, 1024) == 16
    assert sizes.size_for(32, 256) == 32


def test_larger_sizes_are_tried_again_after_a_while_and_then_after_twice_the_while() -> None:
    sizes = Sizes()
    sizes.failed(32, 8, 32)
    for patience in (_GROW_AFTER, 2 * _GROW_AFTER, 4 * _GROW_AFTER):
        for _ in range(patience):
            assert sizes.size_for(32, 8) == 16
            sizes.fitted(32, 8, 16)
        assert sizes.size_for(32, 8) == 32
        sizes.failed(32, 8, 32)


def test_nothing_is_tried_beyond_what_was_planned() -> None:
    sizes = Sizes(8)
    sizes.failed(32, 8, 8)
    for _ in range(10 * _GROW_AFTER):
        sizes.fitted(32, 8, sizes.size_for(32, 8))
    assert sizes.size_for(32, 8) == 8
    assert sizes.size_for(5, 8) == 5


def test_lengths_within_a_fifth_are_of_one_kind() -> None:
    assert bucket_of(1000) == bucket_of(1020)
    assert bucket_of(1000) < bucket_of(1250)


def test_a_plan_knows_what_fits_into_what_is_free() -> None:
    plan = plan_of(micro_batch=8, accumulation=4)
    whole = predicted_bytes(plan.prediction, 8)
    assert whole == plan.prediction.reserved_bytes
    enough_for_four = predicted_bytes(plan.prediction, 4)
    assert enough_for_four < whole
    assert predictor_of(plan, lambda: enough_for_four)(32, 8) == 4
    assert predictor_of(plan, lambda: 0)(32, 8) == 1
    assert predictor_of(plan, lambda: None)(32, 8) is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.second(self.first(x).relu())


def stack() -> nn.Module:
    return nn.Sequential(*[Block() for _ in range(4)])


def test_tricks_are_switched_on_one_after_the_other() -> None:
    resorts = LastResorts(stack(), Variant(micro_batch=1))
    assert resorts.switch_on("gpu") == "recomputing 4 blocks in backward"
    assert resorts.switch_on("gpu") == "offloading activations to the host"
    assert resorts.variant == Variant(
        micro_batch=1, checkpointing="blocks", offload_activations=True
    )
    assert resorts.switch_on("gpu") is None


def test_only_what_is_not_recomputed_yet_is() -> None:
    from oomph.tricks.checkpointing import checkpoint_blocks

    model = stack()
    checkpoint_blocks(model, "every-2")
    assert LastResorts(model, Variant(micro_batch=1, checkpointing="every-2")).switch_on("gpu") == (
        "recomputing 2 blocks in backward"
    )


def test_a_trick_that_is_on_or_cannot_help_is_passed_over() -> None:
    assert LastResorts(nn.Linear(1, 1), Variant(micro_batch=1)).switch_on("host") is None
    assert (
        LastResorts(
            stack(), Variant(micro_batch=1, offload_activations=True), ("offload",)
        ).switch_on("gpu")
        is None
    )
    with pytest.raises(UsageError, match="'magic' cannot be switched on"):
        LastResorts(stack(), Variant(micro_batch=1), ("magic",))


# ---- how far a plan's replays reach --------------------------------------------------------------


def reach(fit: float, too_many: float = 1000.0) -> PlannedSizes:
    return PlannedSizes(MicroBatchLimits(fit=fit, too_many=too_many, elements=100), 100)


def test_a_plan_that_says_nothing_of_other_sizes_has_no_reach() -> None:
    assert planned_sizes(None) is None
    assert planned_sizes(plan_of(micro_batch=8)) is None
    unknown = MicroBatchLimits(fit=9.0, too_many=10.0, elements=None)
    assert planned_sizes(replace(plan_of(micro_batch=8), reach=unknown)) is None


def test_training_begins_with_what_the_replays_of_the_plan_let_through() -> None:
    sizes = Sizes(8, planned=reach(13.9))
    assert sizes.size_for(48, 100) == 12  # 8 is what kernels like, and 13 does not divide 48
    assert sizes.size_for(48, 101) == 8  # longer than what was planned with


@given(fit=st.floats(1, 64), elements=st.integers(1, 100), num=st.integers(1, 256))
def test_shorter_examples_have_no_more_elements_than_fit(
    fit: float, elements: int, num: int
) -> None:
    size = reach(fit).fit(num, elements)
    assert 1 <= size <= num
    assert size * elements <= fit * 100 or size == 1


def test_more_are_not_tried_than_the_plan_has_ruled_out() -> None:
    assert reach(9, too_many=12).most(48, 100) == 8
    assert reach(9, too_many=12.1).most(48, 100) == 12
    assert reach(9, too_many=12).most(48, 50) == 48  # what grows with the square may let them in
    assert reach(1, too_many=1.5).most(48, 200) == 1


def test_what_fails_though_it_was_planned_is_not_begun_with_again() -> None:
    sizes = Sizes(8, planned=reach(13.9))
    assert sizes.failed(48, 100, 12) == 6
    assert sizes.size_for(48, 100) == 6
    assert sizes.size_for(48, 50) == 24
