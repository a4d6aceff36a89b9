"""What is offloaded comes back as it was: training is the same, bit for bit."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rehearsing.zoo import TORCH_MODELS

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks import offload_activations
from oomph.tricks.offload_activations import empty_on_host, offloaded_activations
from oomph.tricks.offload_optimizer import make_on_host
from oomph.tricks.trick import contradiction_in
from tricks import language_models as lm

# Of torch, about models that users write like this.
pytestmark = pytest.mark.filterwarnings("ignore")

PLAIN = {
    name: kind
    for name, kind in TORCH_MODELS.items()
    if kind.is_comparable and not kind.has_sparse_gradients
}


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_are_the_same_with_offloaded_activations(name: str) -> None:
    kind = PLAIN[name]
    found = []
    for is_offloaded in (False, True):
        model, batch = lm.seeded(kind.make), kind.batch(3)
        torch.manual_seed(1)
        if is_offloaded:
            with offloaded_activations(small_bytes=0, num_kept=2):
                loss = kind.loss(model, batch)
        else:
            loss = kind.loss(model, batch)
        loss.backward()
        found.append((loss, lm.gradients(model)))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1].keys() == found[1][1].keys()
    assert all(torch.equal(found[0][1][key], found[1][1][key]) for key in found[0][1])


def copies_of(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every copy that is made, and its size."""
    made: list[tuple[str, int]] = []
    for name, sized in (("_copy_out", 0), ("_copy_back", 0)):
        original = getattr(offload_activations, name)

        def copy(*args: Any, name: str = name, original: Any = original, place: int = sized) -> Any:
            made.append((name, args[place].nbytes))
            return original(*args)

        monkeypatch.setattr(offload_activations, name, copy)
    return made


def test_parameters_stay_and_a_tensor_with_many_uses_is_moved_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = copies_of(monkeypatch)
    layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(3))
    x = torch.randn(8, 64, requires_grad=True) * 1
    with offloaded_activations(small_bytes=0, num_kept=0):
        loss = sum(layer(x).sum() for layer in layers)
    assert made == [("_copy_out", x.nbytes)]
    loss.backward()
    assert made[1:] == [("_copy_back", x.nbytes)]


def test_small_tensors_and_parts_of_large_ones_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies_of(monkeypatch)
    x = torch.randn(100, 100, requires_grad=True) * 1
    with offloaded_activations(small_bytes=1000):
        x[:2].pow(2)
        x[0, :10].clone().pow(2)
        torch.ones(3, requires_grad=True).pow(2)
        x[:1].expand(100, 100).pow(2)
    assert made == []


def test_the_newest_stay_and_need_no_copy_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made = copies_of(monkeypatch)
    x = torch.randn(100, 100, requires_grad=True)
    with offloaded_activations(small_bytes=0, num_kept=5):
        for _ in range(8):
            x = x.sin()  # saves its input
    x.sum().backward()
    assert [name for name, _ in made] == ["_copy_out"] * 8 + ["_copy_back"] * 3


def test_backward_can_run_twice() -> None:
    x = torch.randn(50, 50, requires_grad=True)
    with offloaded_activations(small_bytes=0, num_kept=1):
        loss = (x.sin() * x.cos()).sum()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, x)
    assert torch.equal(first, second)


def test_what_was_offloaded_is_given_back_after_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = []

    def held_weakly(like: Any) -> Any:
        made = empty_on_host(like)
        held.append(weakref.ref(made.untyped_storage()))
        return made

    monkeypatch.setattr(offload_activations, "empty_on_host", held_weakly)
    x = torch.randn(50, 50, requires_grad=True)
    with offloaded_activations(small_bytes=0, num_kept=2):
        y = x.sin().sin().sin()
    assert [one() is not None for one in held] == [True] * 3
    y.sum().backward()
    assert [one() for one in held] == [None] * 3


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_on_the_host_trains_the_same_with_clipping_and_a_scheduler(name: str) -> None:
    weights = []
    for is_offloaded in (False, True):
        model, make = lm.gpt2(), OPTIMIZERS[name]
        parameters = list(model.parameters())
        optimizer = make_on_host(make, parameters) if is_offloaded else make(parameters)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.3)
        for _ in range(4):
            optimizer.zero_grad()
            model(**lm.text()).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
        weights.append(dict(model.state_dict()))
        assert len(optimizer.state_dict()["state"]) == len(parameters)
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_a_parameter_without_a_gradient_stays_as_it_is() -> None:
    model: Any = torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])
    optimizer = make_on_host(lambda p: torch.optim.AdamW(p, weight_decay=0.5), model.parameters())
    before = model[1].weight.detach().clone()
    model[0](torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert torch.equal(model[1].weight.detach(), before)
    optimizer.zero_grad(set_to_none=False)
    assert model[0].weight.grad is not None
    assert not model[0].weight.grad.any()


def test_gradients_that_are_views_of_ddps_buckets_are_zeroed() -> None:
    model = torch.nn.Linear(2, 2, bias=False)
    optimizer = make_on_host(torch.optim.SGD, model.parameters())
    bucket = torch.ones(4)
    model.weight.grad = bucket.view_as(model.weight)
    optimizer.zero_grad(set_to_none=False)
    assert not bucket.any()


def test_what_cannot_be_offloaded_says_why() -> None:
    with pytest.raises(UsageError, match="cannot be offloaded"):
        make_on_host(torch.optim.SGD, [{"params": [torch.ones(1, requires_grad=True)]}])

    def make_something_else(_: Any) -> Any:
        return object()

    with pytest.raises(UsageError, match="cannot be offloaded"):
        make_on_host(make_something_else, [torch.ones(1, requires_grad=True)])
    others = [torch.ones(1, requires_grad=True)]
    with pytest.raises(UsageError, match="does not use the parameters that it is given"):
        make_on_host(lambda _: torch.optim.SGD(others), [torch.ones(1, requires_grad=True)])


def test_fp16_is_no_obstacle() -> None:
    fp16 = Variant(micro_batch=1, precision="fp16", offload_optimizer=True)
    assert contradiction_in(fp16, clips_gradients=True) is None
