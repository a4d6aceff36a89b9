"""An optimizer that steps in backward updates as it would have after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.optimizer_in_backward import step_in_backward
from oomph.tricks.trick import contradiction_in
from tricks import language_models as lm

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adamw for-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


def groups(model: Any) -> list[dict[str, Any]]:
    """Two groups, as people decay matrices and not biases."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [
        {"params": matrices, "weight_decay": 0.1},
        {"params": others, "weight_decay": 0.0, "lr": 3e-2},
    ]


def train(model: Any, optimizer: Any, num_steps: int = 4) -> list[float]:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(**lm.text()).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_weights_and_losses_are_the_same_with_groups_and_a_scheduler(name: str) -> None:
    plain, in_backward = lm.gpt2(), lm.gpt2()  # its head is tied to its embedding
    usual = OPTIMIZERS[name](groups(plain))
    early = step_in_backward(OPTIMIZERS[name](groups(in_backward)))
    assert train(plain, usual) == pytest.approx(train(in_backward, early), rel=1e-12)
    lm.assert_same(dict(plain.state_dict()), dict(in_backward.state_dict()))
    assert [group["lr"] for group in usual.param_groups] == [
        group["lr"] for group in early.param_groups
    ]


def test_a_scheduler_that_was_there_before_goes_on() -> None:
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    step_in_backward(optimizer)
    before = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    scheduler.step()
    middle = model.weight.detach().clone()
    model(torch.ones(1, 2)).sum().backward()
    torch.testing.assert_close(before - middle, torch.ones(1, 2))
    torch.testing.assert_close(middle - model.weight.detach(), torch.full((1, 2), 0.5))


def test_no_gradient_is_left_and_the_state_dict_is_the_usual_one() -> None:
    plain, in_backward = lm.llama(), lm.llama()
    usual = torch.optim.AdamW(plain.parameters())
    early = step_in_backward(torch.optim.AdamW(in_backward.parameters()))
    for model, optimizer in ((plain, usual), (in_backward, early)):
        model(**lm.text()).loss.backward()
        optimizer.step()
    assert lm.gradients(in_backward) == {}
    one, other = usual.state_dict(), early.state_dict()
    assert one["param_groups"] == other["param_groups"]
    for number, state in one["state"].items():
        lm.assert_same(state, other["state"][number])


def test_an_optimizer_that_computes_the_loss_again_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be stepped in backward"):
        step_in_backward(torch.optim.LBFGS(torch.nn.Linear(2, 2).parameters()))


def test_an_optimizer_that_counts_in_its_group_is_refused() -> None:
    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
            return super().step(closure)

    model = torch.nn.Linear(2, 2)
    step_in_backward(Counting(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="cannot be stepped in backward"):
        model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize(
    ("changes", "clips", "because"),
    [
        ({"accumulation": 4}, False, "several micro-batches"),
        ({}, True, "clip_grad_norm"),
        ({"precision": "fp16"}, False, "loss scaler"),
        ({"offload_optimizer": True}, False, "host"),
    ],
)
def test_what_cannot_go_together_is_told(changes: Any, clips: bool, because: str) -> None:
    variant = Variant(micro_batch=2, optimizer_in_backward=True, **changes)
    found = contradiction_in(variant, clips_gradients=clips)
    assert found is not None
    assert because in str(found)


def test_alone_it_contradicts_nothing() -> None:
    variant = Variant(micro_batch=2, precision="bf16", optimizer_in_backward=True)
    assert contradiction_in(variant, clips_gradients=False) is None
