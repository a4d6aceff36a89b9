"""The learning rate of another batch size, in the optimizer and in its schedulers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn, optim
from torch.optim import lr_scheduler

import oomph
from oomph.errors import UsageError

batches = st.integers(1, 4096)


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(3))]


def test_sgd_follows_the_batch_and_adam_its_root() -> None:
    sgd = optim.SGD(parameters(), lr=0.8, momentum=0.9)
    found = oomph.scale_learning_rate(sgd, 256, 16)
    assert (found.rule, sgd.param_groups[0]["lr"]) == ("linear", pytest.approx(0.05))
    adam = optim.AdamW(parameters(), lr=0.008, betas=(0.9, 0.999), eps=1e-8)
    found = oomph.scale_learning_rate(adam, 64, 16)
    group = adam.param_groups[0]
    assert (found.rule, group["lr"]) == ("square-root", pytest.approx(0.004))
    assert group["betas"] == pytest.approx((0.9**0.25, 0.999**0.25))
    assert group["eps"] == pytest.approx(2e-8)


@settings(deadline=None, max_examples=30)
@given(batches, batches, st.floats(1, 1e5))
def test_there_and_back_is_where_it_was(one: int, other: int, noise: float) -> None:
    for scale in (None, noise):
        adam = optim.Adam(parameters(), lr=1e-3, betas=(0.9, 0.999))
        oomph.scale_learning_rate(adam, one, other, scale)
        oomph.scale_learning_rate(adam, other, one, scale)
        group = adam.param_groups[0]
        assert group["lr"] == pytest.approx(1e-3)
        if other / one < 100:  # an average over less than an example rounds to none
            assert group["betas"] == pytest.approx((0.9, 0.999))


def test_the_noise_curve_is_linear_below_the_noise_scale_and_flat_above() -> None:
    def factor(to_batch: int, optimizer: Any = optim.SGD) -> float:
        return oomph.scale_learning_rate(optimizer(parameters(), lr=1.0), 1, to_batch, 1e4).factor

    assert factor(10) == pytest.approx(10, rel=0.01)
    assert factor(10**7) == pytest.approx(1e4, rel=0.01)
    assert factor(10, optim.Adam) == pytest.approx(math.sqrt(10), rel=0.01)


def test_a_steppers_own_noise_scale_will_do() -> None:
    from oomph.records.stability import NoiseScale

    scale = NoiseScale(examples=50.0, low=25.0, high=100.0, batch=8, num_samples=9, trend=None)
    ours, number = (optim.SGD(parameters(), lr=1.0) for _ in range(2))
    oomph.scale_learning_rate(ours, 8, 64, scale)
    oomph.scale_learning_rate(number, 8, 64, 50.0)
    assert ours.param_groups[0]["lr"] == number.param_groups[0]["lr"]


def test_every_group_and_learning_rates_that_are_tensors_are_changed() -> None:
    one = optim.Adam(
        [
            {"params": parameters(), "lr": torch.tensor(0.1)},
            {"params": parameters(), "lr": 0.2, "betas": (0.8, 0.99)},
        ],
        capturable=True,
    )
    tensor = one.param_groups[0]["lr"]
    found = oomph.scale_learning_rate(one, 1, 4)
    assert one.param_groups[0]["lr"] is tensor  # a compiled step reads it there
    assert [float(group["lr"]) for group in one.param_groups] == pytest.approx([0.2, 0.4])
    assert {each.where for each in found.changes} == {"group 0", "group 1"}
    assert one.param_groups[1]["betas"] == pytest.approx((0.8**4, 0.99**4))


SCHEDULERS: list[Any] = [
    lambda o: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + 1)),
    lambda o: lr_scheduler.StepLR(o, 3, 0.5),
    lambda o: lr_scheduler.CosineAnnealingLR(o, 20, eta_min=0.01),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5, eta_min=0.01),
    lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=40),
    lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.4, step_size_up=4),
    lambda o: lr_scheduler.LinearLR(o, 0.1),
    lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 16)],
        milestones=[4],
    ),
    lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
]


def rates(make: Any, scaled_after: int | None, num: int = 16) -> list[float]:
    """The learning rates of a schedule, of a batch twice as large after so many steps."""
    optimizer = optim.SGD(parameters(), lr=0.2, momentum=0.9)
    scheduler, found = make(optimizer), []
    for step in range(num):
        if step == scaled_after:
            oomph.scale_learning_rate(optimizer, 8, 16)
            assert scheduler.get_last_lr()[0] == pytest.approx(optimizer.param_groups[0]["lr"])
        found.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("make", SCHEDULERS)
@pytest.mark.parametrize("after", [0, 2, 7])
def test_a_schedule_goes_on_at_the_new_height(make: Any, after: int) -> None:
    plain, scaled = rates(make, None), rates(make, after)
    factors = [1.0] * after + [2.0] * (len(plain) - after)
    expected = [rate * factor for rate, factor in zip(plain, factors, strict=True)]
    assert scaled == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_reduce_on_plateau_keeps_its_floor_in_proportion() -> None:
    optimizer = optim.SGD(parameters(), lr=0.2)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, min_lr=0.1)
    oomph.scale_learning_rate(optimizer, 8, 16)
    for _ in range(4):
        scheduler.step(1.0)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.2)


def test_another_optimizers_scheduler_is_left_alone() -> None:
    mine, other = (optim.SGD(parameters(), lr=0.2) for _ in range(2))
    theirs = lr_scheduler.StepLR(other, 3)
    oomph.scale_learning_rate(mine, 8, 16)
    assert (theirs.base_lrs, other.param_groups[0]["lr"]) == ([0.2], 0.2)


def test_what_was_changed_reads_as_a_list() -> None:
    text = str(oomph.scale_learning_rate(optim.SGD(parameters(), lr=0.8), 256, 16))
    assert text == "batch 256 -> 16: learning rate x 0.0625 (linear)\n  group 0 lr: 0.8 -> 0.05"


class Own(optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1.0})


def test_an_optimizer_of_another_kind_needs_a_rule() -> None:
    with pytest.raises(UsageError, match="Own's learning rate"):
        oomph.scale_learning_rate(Own(parameters()), 8, 16)
    assert oomph.scale_learning_rate(Own(parameters()), 8, 16, rule="linear").factor == 2


@pytest.mark.parametrize(
    ("arguments", "keywords", "what"),
    [
        ((0, 16), {}, "0 is not a batch size"),
        ((8, 1.5), {}, "1.5 is not a batch size"),
        ((8, 16), {"rule": "noise-curve"}, "needs the noise scale"),
        ((8, 16), {"rule": "cubic"}, "rule='cubic' is unknown"),
        ((8, 16), {"noise_scale": -3.0}, "cannot be -3.0"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_changes(
    arguments: Any, keywords: Any, what: str
) -> None:
    optimizer = optim.SGD(parameters(), lr=0.2)
    with pytest.raises(UsageError, match=what):
        oomph.scale_learning_rate(optimizer, *arguments, **keywords)
    assert optimizer.param_groups[0]["lr"] == 0.2
