"""An optimizer's step that a library calls is whole or did not happen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.errors import OomphError
from oomph.training.update import make_whole
from training.adapters import jobs


def with_gradients() -> Any:
    model = jobs.make()
    model(**jobs.collate(jobs.examples(4)))["loss"].backward()
    return model


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def test_a_schedule_finds_the_step_that_it_looks_for() -> None:
    """torch warns of a step that was replaced after the schedule was made: here an error."""
    before, after = with_gradients(), with_gradients()
    one, other = adam(before), adam(after)
    schedule = torch.optim.lr_scheduler.StepLR(one, 1)
    make_whole(one)
    make_whole(other)
    late = torch.optim.lr_scheduler.StepLR(other, 1)
    for each in (one, schedule, other, late):
        each.step()
    jobs.assert_equal(jobs.weights_of(before), jobs.weights_of(after))


def test_it_is_put_on_once() -> None:
    optimizer = adam(with_gradients())
    make_whole(optimizer)
    step = optimizer.step
    make_whole(optimizer)
    assert optimizer.step is step


def test_a_closure_is_called_once_though_the_step_is_tried_twice() -> None:
    model, twin = with_gradients(), with_gradients()
    adam(twin).step()
    optimizer, injector, calls = adam(model), jobs.OutOfMemoryAt(), []
    make_whole(optimizer)
    jobs.strike_in_update(optimizer, injector)

    def closure() -> int:
        calls.append(torch.is_grad_enabled())
        return 7

    with injector:
        assert optimizer.step(closure) == 7
    assert injector.num_raised == 1
    assert calls == [True]
    jobs.assert_close(jobs.weights_of(model), jobs.weights_of(twin), 1e-12)


def test_a_later_step_that_fails_says_that_it_may_be_half_done() -> None:
    optimizer, injector = adam(with_gradients()), jobs.OutOfMemoryAt()
    make_whole(optimizer)
    optimizer.step()
    jobs.strike_in_update(optimizer, injector)
    with injector, pytest.raises(OomphError, match="in the middle of its step"):
        optimizer.step()


def test_optimizers_that_evaluate_as_they_go_are_left_alone() -> None:
    class Mine(torch.optim.SGD):
        pass

    model = with_gradients()
    for optimizer in (torch.optim.LBFGS(model.parameters()), Mine(model.parameters())):
        step = optimizer.step
        make_whole(optimizer)
        assert optimizer.step == step
