"""Muon for hidden weights, AdamW for the rest: each computes what torch's own does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from planning.plans import plan_of

import oomph
from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.muon import MUON, mark_hidden_weights, muon
from oomph.tricks.optimizer_in_backward import step_in_backward
from oomph.tricks.trick import contradiction_in
from tricks import language_models as lm

LR, DECAY = 0.01, 0.1


def groups(model: Any) -> list[dict[str, Any]]:
    """Weight decay on matrices only, as is usual."""
    parameters = [*model.parameters()]
    return [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]


def with_muon(model: Any) -> torch.optim.Optimizer:
    mark_hidden_weights(model)
    return muon(torch.optim.AdamW(groups(model), lr=LR, betas=(0.8, 0.9)))


def step(model: Any, *optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.zero_grad()
    model(**lm.text()).loss.backward()
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.parametrize("make", [lm.gpt2, lm.llama])
def test_an_update_is_that_of_torchs_two_optimizers(make: Any) -> None:
    model, other = make(), make()
    together = with_muon(model)
    hidden = [
        p
        for name, p in other.named_parameters()
        if p.dim() == 2 and (".h." in name or "layers" in name)
    ]
    rest = [p for p in other.parameters() if all(p is not one for one in hidden)]
    one = torch.optim.Muon(hidden, lr=LR, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    two = torch.optim.AdamW(
        [
            {"params": [p for p in rest if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
        ],
        lr=LR,
        betas=(0.8, 0.9),
    )
    for _ in range(3):
        step(model, together)
        step(other, one, two)
    lm.assert_same(dict(model.named_parameters()), dict(other.named_parameters()), within=1e-12)


def test_a_hidden_weight_has_one_momentum_and_the_rest_has_two() -> None:
    model = lm.llama()
    optimizer = with_muon(model)
    step(model, optimizer)
    for name, parameter in model.named_parameters():
        is_hidden = parameter.dim() == 2 and "layers" in name
        wanted = {"momentum_buffer"} if is_hidden else {"step", "exp_avg", "exp_avg_sq"}
        assert optimizer.state[parameter].keys() == wanted, name


def test_a_resumed_run_is_the_run_that_was_not_stopped() -> None:
    model = lm.llama()
    optimizer = with_muon(model)
    step(model, optimizer)
    other = lm.llama()
    other.load_state_dict(model.state_dict())
    resumed = with_muon(other)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(2):
        step(model, optimizer)
        step(other, resumed)
    lm.assert_same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_a_scheduler_sets_the_rate_of_both() -> None:
    model = lm.llama()
    optimizer = with_muon(model)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    step(model, optimizer)
    scheduler.step()
    lm.assert_same(before, dict(model.named_parameters()), within=0)


def test_it_steps_in_backward_too() -> None:
    model, other = lm.llama(), lm.llama()
    usual, early = with_muon(model), step_in_backward(with_muon(other))
    for _ in range(2):
        step(model, usual)
        other(**lm.text()).loss.backward()
        early.step()
    lm.assert_same(dict(model.named_parameters()), dict(other.named_parameters()))


def test_a_stepper_trains_a_plan_with_it_also_in_pieces() -> None:
    plan = plan_of(micro_batch=3, accumulation=1, optimizer="muon")
    model: Any = lm.llama()
    found: Any = oomph.apply(plan, model, lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=DECAY))
    trainer = oomph.Stepper(
        found[0],
        found[1],
        lambda model, data: model(**data).loss,
        plan,
        weight="next-tokens",
        micro_batch=None,
    )
    whole: Any = lm.llama()
    other: Any = oomph.apply(plan, whole, lambda p: torch.optim.AdamW(p, lr=LR, weight_decay=DECAY))
    batch = lm.text(5)
    for _ in range(2):
        trainer(batch)
        other[1].zero_grad()
        whole(**batch).loss.backward()
        other[1].step()
    # Orthogonal updates are computed in bf16: a last bit of a gradient can show in them.
    lm.assert_same(dict(model.named_parameters()), dict(whole.named_parameters()), within=2e-3)


@pytest.mark.parametrize("option", ["amsgrad", "maximize"])
def test_what_muon_does_not_compute_is_refused(option: str) -> None:
    model = lm.llama()
    mark_hidden_weights(model)
    options: Any = {option: True}
    adam = torch.optim.AdamW(model.parameters(), **options)
    with pytest.raises(UsageError, match=f"Muon has no {option}"):
        muon(adam)


def test_other_optimizers_and_models_without_hidden_weights_are_refused() -> None:
    model = lm.llama()
    mark_hidden_weights(model)
    with pytest.raises(UsageError, match="SGD cannot become Muon"):
        muon(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(UsageError, match="nothing that Muon could update"):
        muon(torch.optim.AdamW(torch.nn.Linear(3, 3).parameters()))
    assert MUON.why_not_on(torch.nn.Linear(3, 3)) is not None


def test_a_weight_that_an_embedding_shares_stays_with_adamw() -> None:
    model = lm.gpt2()
    model.transformer.h[0].mlp.c_fc = torch.nn.Linear(16, 96, bias=False)
    model.transformer.h[0].mlp.c_fc.weight = model.transformer.wte.weight
    optimizer = with_muon(model)
    shared = model.transformer.wte.weight
    holders = [g for g in optimizer.param_groups if any(p is shared for p in g["params"])]
    assert [g["is_muon"] for g in holders] == [False]


@pytest.mark.parametrize(
    "settings",
    [
        {"adapters": "lora"},
        {"sharding": "fsdp", "num_gpus": 2},
        {"offload_optimizer": True},
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(settings: dict[str, Any]) -> None:
    variant = Variant(micro_batch=2, optimizer="muon", **settings)
    error = contradiction_in(variant, clips_gradients=False)
    assert error is not None
    assert "Muon" in error.what
