"""Channels last computes the same, is off unless it is asked for, and goes through every export."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from planning.plans import plan_of
from planning.test_choices import BERT, left_out, plain

from oomph.planning.choices import choices_for, variants
from oomph.records.workload import divides_parameters
from oomph.tricks import apply
from oomph.tricks.channels_last import use_channels_last
from oomph.verbs.training import apply as apply_plan


class Net(torch.nn.Module):
    """Two convolutions and a head; `mask` is no image."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.second = torch.nn.Conv2d(8, 8, 3, stride=2)
        self.last = torch.nn.Linear(8, 5)
        self.layouts: list[bool] = []

    def forward(self, images: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.layouts.append(images.is_contiguous(memory_format=torch.channels_last))
        found = self.second(self.first(images).relu())
        self.layouts.append(found.is_contiguous(memory_format=torch.channels_last))
        found = found.mean((2, 3))
        out: torch.Tensor = self.last(found if mask is None else found * mask)
        return out


def make_model() -> Net:
    torch.manual_seed(0)
    return Net().double()


def images(num: int = 4) -> torch.Tensor:
    return torch.randn(num, 3, 16, 16, dtype=torch.float64, generator=torch.Generator())


def gradients(model: Net, *args: Any, **kwargs: Any) -> list[torch.Tensor]:
    model(*args, **kwargs).square().sum().backward()
    return [p.grad.contiguous() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("is_named", [False, True])
def test_gradients_are_the_same_within_rounding(is_named: bool) -> None:
    usual, laid_out = make_model(), make_model()
    use_channels_last(laid_out)
    mask = torch.rand(4, 8, dtype=torch.float64)
    given: dict[str, Any] = {"images": images(), "mask": mask} if is_named else {}
    args = () if is_named else (images(), mask)
    torch.testing.assert_close(
        gradients(laid_out, *args, **given), gradients(usual, *args, **given)
    )
    assert laid_out.layouts == [True, True]
    assert list(laid_out.state_dict()) == list(usual.state_dict())


def test_it_is_possible_where_there_are_images_and_tensor_cores() -> None:
    optimizer = torch.optim.SGD(make_model().parameters())
    assert "channels-last" not in apply.possible(make_model(), optimizer).impossible
    without = apply.possible(torch.nn.Sequential(torch.nn.Linear(2, 2)), optimizer)
    assert without.impossible["channels-last"] == "the model has no Conv2d layers"
    asked = frozenset({"channels-last"})
    assert "Conv2d" in left_out(plain(possible=without, allow=asked))["channels-last"]
    assert "tensor cores" in left_out(plain(capability=(6, 1), allow=asked))["channels-last"]


def test_both_layouts_are_compared_unless_it_is_forbidden() -> None:
    for forbid in (frozenset[str](), frozenset({"channels-last"})):
        found = variants(choices_for(plain(possible=replace(BERT), forbid=forbid), ("blocks",)))
        assert {one.channels_last for one in found} == ({False} if forbid else {False, True})


def test_plans_that_divide_the_parameters_leave_it_out_because_fully_shard_refuses_it() -> None:
    found = list(variants(choices_for(plain(possible=replace(BERT), max_gpus=4), ("blocks",))))
    with_it = {one.sharding for one in found if one.channels_last}
    assert {one.sharding for one in found} >= {"none", "ddp", "fsdp"}
    assert with_it == {one.sharding for one in found if not divides_parameters(one)}


def test_a_plan_is_applied_and_exported() -> None:
    plan = plan_of(channels_last=True, micro_batch=2, accumulation=2)
    applied, optimizer = apply_plan(plan, make_model(), torch.optim.SGD)
    assert isinstance(optimizer, torch.optim.Optimizer)
    applied(images())
    assert applied.layouts == [True, True]
    for target in ("hf", "lightning", "accelerate", "deepspeed"):
        assert any("channels_last" in said for said in plan.not_expressed(target))
    assert plan.not_expressed("code") == ()


def test_the_exported_loop_trains_the_same() -> None:
    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)

    def loss_of(model: Any, batch: Any) -> torch.Tensor:
        out: torch.Tensor = model(batch).square().mean()
        return out

    trained = []
    for settings in ({}, {"channels_last": True}):
        names: dict[str, Any] = {"__name__": "exported"}
        text = plan_of(micro_batch=2, accumulation=2, **settings).to_code()
        exec(compile(text, "exported.py", "exec"), names)  # noqa: S102 # what is tested
        model = names["train"](make_model, make_optimizer, loss_of, [images(), images()])
        assert model.layouts == [bool(settings)] * len(model.layouts)
        trained.append([parameter.detach().contiguous() for parameter in model.parameters()])
    torch.testing.assert_close(trained[1], trained[0])
