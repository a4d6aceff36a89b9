"""What is set back after a step that could not be finished, and what that costs when none fails."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oomph.training.rollback import Rollback
from oomph.training.update import UpdateCopy


class Model(nn.Module):
    """Buffers of all kinds: of statistics, written in place, replaced, never touched, none."""

    counted: torch.Tensor
    replaced: torch.Tensor
    late: torch.Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("counted", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("still", torch.ones(3))
        self.register_buffer("late", None)

    def forward(self, x: Any) -> Any:
        self.counted.add_(1)
        self.replaced = self.replaced + 1
        self.late = torch.ones(1) if self.late is None else self.late * 2
        return self.norm(self.linear(x + torch.randn_like(x)))


def taken(model: nn.Module, **options: Any) -> Rollback:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rollback = Rollback(model, [optimizer], **{"keeps_other_rngs": False, **options})
    rollback.take()
    return rollback


def copied(model: nn.Module) -> dict[str, Any]:
    return {
        name: None if buffer is None else buffer.clone()
        for module in model.modules()
        for name, buffer in module._buffers.items()
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def test_everything_is_as_before_again_and_again() -> None:
    model = Model()
    rollback = taken(model)
    for _ in range(3):
        before, drawn = copied(model), torch.get_rng_state()
        for _ in range(3):  # attempts
            model(torch.randn(5, 4)).sum().backward()
            assert not same(before, copied(model))
            rollback.undo()
            assert same(before, copied(model))
            assert torch.equal(drawn, torch.get_rng_state())
            assert all(parameter.grad is None for parameter in model.parameters())
        model(torch.randn(5, 4)).sum().backward()  # one that is whole
        model.zero_grad()
        rollback.take()


def test_gradients_that_were_there_come_back() -> None:
    model = nn.Linear(2, 2)
    model.weight.grad = torch.full((2, 2), 3.0)
    rollback = taken(model)
    model(torch.randn(4, 2)).sum().backward()
    rollback.undo()
    assert model.weight.grad is not None
    assert model.weight.grad.eq(3).all()
    assert model.bias.grad is None


def test_a_buffer_that_does_not_change_is_copied_once() -> None:
    model = Model()
    rollback = taken(model)
    kept = {each.name: each.copy for each in rollback._small.kept.values()}
    model(torch.randn(5, 4))
    rollback.take()
    again = {each.name: each.copy for each in rollback._small.kept.values()}
    assert again["still"] is kept["still"]
    assert again["norm.running_mean"].eq(model.norm.running_mean).all()


def test_generators_of_python_and_numpy_are_set_back_if_asked_for() -> None:
    rollback = taken(nn.Linear(1, 1), keeps_other_rngs=True)
    drawn = random.random(), np.random.rand()  # noqa: S311
    rollback.undo()
    assert drawn == (random.random(), np.random.rand())  # noqa: S311


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.Adafactor])
@pytest.mark.parametrize("num_before", [0, 2])
def test_an_update_is_undone_with_its_state(make: Any, num_before: int) -> None:
    model = nn.Linear(3, 3)
    optimizer = make(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.ones(2, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(num_before):
        step()
    weights, copy = model.weight.clone(), UpdateCopy([optimizer])
    step()
    once = model.weight.clone()
    copy.restore()
    assert torch.equal(model.weight, weights)
    assert make is torch.optim.Adagrad or bool(optimizer.state) == bool(num_before)
    step()
    assert torch.equal(model.weight, once)
