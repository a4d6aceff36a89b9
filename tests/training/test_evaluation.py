"""A batch that is evaluated in pieces gives what the whole would have given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import oomph
from oomph.errors import OomphError, UsageError
from training.stepper_kinds import (
    CLASS_WEIGHTS,
    MESSAGE,
    Cnn,
    Tagger,
    by_class,
    images,
    mlp,
    of_images,
    of_rows,
    of_tokens,
    padded,
    rows,
)


class Job:
    """A Stepper whose model fits so many examples at a time."""

    def __init__(self, model: nn.Module, loss: Any = of_rows, **options: Any) -> None:
        torch.manual_seed(0)
        self.model, self.said, self.sizes = model, list[str](), list[int]()
        self.most = 10**9
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        self.step = oomph.Stepper(model, optimizer, loss, say=self.said.append, **options)
        model.register_forward_pre_hook(self._check)

    def _check(self, _: Any, args: Any) -> None:
        if len(args[0]) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)
        self.sizes.append(len(args[0]))


class Pair(NamedTuple):
    logits: Any
    right: int


@dataclass
class Record:
    logits: Any
    loss: Any
    name: str


RESULTS: dict[str, Any] = {
    "the loss": None,
    "rows": lambda m, b: m(b[0]),
    "a dict": lambda m, b: {"logits": m(b[0]), "loss": of_rows(m, b), "same": torch.ones(3)},
    "a tuple": lambda m, b: (m(b[0]).argmax(1), float(of_rows(m, b)), None),
    "a named tuple": lambda m, b: Pair(m(b[0]), int((m(b[0]).argmax(1) == b[1]).sum())),
    "a dataclass": lambda m, b: Record(m(b[0]), of_rows(m, b), "test"),
    "a count": lambda m, b: (m(b[0]).argmax(1) == b[1]).sum(),
    "texts": lambda m, b: [f"{each:.6f}" for each in m(b[0]).sum(1).tolist()],
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=1e-10)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        pairs = zip(one, other, strict=True)
        return type(one) is type(other) and all(same(a, b) for a, b in pairs)
    if isinstance(one, Record):
        return isinstance(other, Record) and same(vars(one), vars(other))
    return one == pytest.approx(other) if isinstance(one, float) else bool(one == other)


@pytest.mark.parametrize("name", RESULTS)
@settings(max_examples=8, deadline=None, derandomize=True)
@given(num=st.integers(2, 13), most=st.integers(1, 6))
def test_pieces_give_what_the_whole_gives(name: str, num: int, most: int) -> None:
    torch.manual_seed(0)
    job = Job(mlp().double())
    x, y = rows(num)
    batch = (x.double(), y)
    whole = job.step.evaluate(batch, RESULTS[name])
    job.most = most
    assert same(whole, job.step.evaluate(batch, RESULTS[name]))
    job.most = 10**9
    assert same(whole, job.step.evaluate(batch, RESULTS[name]))


def test_losses_are_weighed_as_in_training() -> None:
    torch.manual_seed(0)
    for model, loss, weight, batch in (
        (Tagger().double(), of_tokens, "tokens", padded(9)),
        (
            mlp().double(),
            by_class,
            lambda b: CLASS_WEIGHTS.double()[b[1]].sum(),
            (torch.randn(9, 8).double(), torch.randint(0, 4, (9,))),
        ),
    ):
        job = Job(model, loss, weight=weight)
        whole = float(job.step.evaluate(batch))
        job.most = 4
        assert float(job.step.evaluate(batch)) == pytest.approx(whole, rel=1e-12)
        assert job.said


def test_nothing_of_training_is_touched() -> None:
    torch.manual_seed(0)
    frozen = Cnn(nn.BatchNorm2d(8))
    frozen.norm.eval()
    job = Job(frozen, of_images, accumulate=2)
    job.step(images(8))
    gradients = [p.grad.clone() for p in frozen.parameters() if p.grad is not None]
    modes = [module.training for module in frozen.modules()]
    before = {name: each.clone() for name, each in frozen.state_dict().items()}
    job.most = 3
    value = job.step.evaluate(images(8))
    assert not value.requires_grad
    assert modes == [module.training for module in frozen.modules()]
    assert all(torch.equal(each, before[name]) for name, each in frozen.state_dict().items())
    for p, gradient in zip(frozen.parameters(), gradients, strict=True):
        assert p.grad is not None
        assert torch.equal(p.grad, gradient)
    assert job.step.num_ooms == 0
    job.most = 10**9
    assert job.step(images(8)).micro_batch == 8


def test_what_has_been_run_is_not_run_again_and_the_size_is_remembered() -> None:
    job = Job(mlp())
    seen: list[int] = []

    def counting(model: Any, batch: Any) -> Any:
        if len(seen) >= 4:
            job.most = 1
        out = model(batch[0])
        seen.extend(batch[1].tolist())
        return out

    batch = torch.randn(11, 8), torch.arange(11)
    job.most = 5
    assert len(job.step.evaluate(batch, counting)) == 11
    assert seen == list(range(11))
    del job.sizes[:], seen[:]
    job.step.evaluate(batch, counting)
    assert max(job.sizes) == 1
    assert len(job.said) >= 2


def test_autocast_and_the_device_are_those_of_training() -> None:
    job = Job(mlp(), precision="bf16", device="cpu")
    out = job.step.evaluate(rows(4), lambda m, b: m(b[0]))
    assert out.dtype is torch.bfloat16


def test_a_vector_that_is_as_long_as_a_piece_is_not_taken_for_rows() -> None:
    job = Job(mlp())
    per_class = lambda m, b: m(b[0]).sum(0)  # noqa: E731 - one number for each of four classes
    job.most = 4
    with pytest.raises(UsageError, match="cannot join"):
        job.step.evaluate(rows(8), per_class)
    total = job.step.evaluate(rows(8), per_class, join=lambda results, _: sum(results))
    assert total.shape == (4,)


def test_one_example_that_does_not_fit_is_an_error_and_training_goes_on() -> None:
    job = Job(mlp())
    job.most = 0
    with pytest.raises(OomphError, match="in evaluation"):
        job.step.evaluate(rows(4))
    job.most = 4
    assert job.model.training
    assert job.step(rows(4)).has_stepped


def test_other_errors_are_the_users() -> None:
    job = Job(mlp())
    with pytest.raises(ZeroDivisionError):
        job.step.evaluate(rows(4), lambda *_: 1 / 0)
    assert job.model.training
