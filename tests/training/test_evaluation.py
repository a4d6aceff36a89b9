"""A batch that is evaluated in pieces gives what the whole would have given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

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
    job = Job(mlp().double(), weight="mean")
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
    assert seen[:11] == list(range(11))  # then some of them, to try if they add up
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
    with pytest.raises(OomphError, match="evaluation runs out of memory"):
        job.step.evaluate(rows(4))
    job.most = 4
    assert job.model.training
    assert job.step(rows(4)).has_stepped


def test_other_errors_are_the_users() -> None:
    job = Job(mlp())
    with pytest.raises(ZeroDivisionError):
        job.step.evaluate(rows(4), lambda *_: 1 / 0)
    assert job.model.training


# ---- what numbers are a mean of ----------------------------------------------------------------


def of_each(model: Any, batch: Any) -> Any:
    """The mean over examples of their means over tokens."""
    losses = F.cross_entropy(model(batch["ids"]).mT, batch["labels"], reduction="none")
    counts = batch["labels"] != -100
    return ((losses * counts).sum(1) / counts.sum(1)).mean()


def full(num: int) -> Any:
    batch = padded(num)
    return {**batch, "labels": torch.randint(0, 5, batch["labels"].shape)}


def of_rare_classes(model: Any, batch: Any) -> Any:
    weights = torch.tensor([1.0, 1.0, 1.0, 10.0], dtype=torch.float64)
    return F.cross_entropy(model(batch[0]), batch[1], weight=weights)


def by_hand(model: Any, batch: Any) -> Any:
    """The same, of which torch's loss tells nothing."""
    weights = torch.tensor([1.0, 1.0, 1.0, 10.0], dtype=torch.float64)[batch[1]]
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return (losses * weights).sum() / weights.sum()


def figures(job: Job, batches: list[Any], function: Any, most: int) -> list[tuple[float, float]]:
    """Of each batch as a whole and in pieces, in their order."""
    wholes = [float(job.step.evaluate(batch, function)) for batch in batches]
    job.most = most
    return [
        (one, float(job.step.evaluate(batch, function)))
        for one, batch in zip(wholes, batches, strict=True)
    ]


@pytest.mark.parametrize("function", [None, of_tokens, of_each])
def test_what_a_number_is_a_mean_of_is_found_and_looked_at_again_where_batches_differ(
    function: Any,
) -> None:
    """Batches without padding do not tell one mean from the other; those after them do."""
    torch.manual_seed(0)
    job = Job(Tagger().double(), of_tokens)
    for whole, joined in figures(job, [full(8), full(7), padded(9), padded(5)], function, 3):
        assert joined == pytest.approx(whole, rel=1e-12)


def test_a_function_that_is_made_again_is_tried_again() -> None:
    """What it closes over may be another: these two have the same code."""

    def made(reduction: str) -> Any:
        return lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction=reduction)

    torch.manual_seed(0)
    job = Job(mlp().double())
    batch = (torch.randn(9, 8).double(), torch.randint(0, 4, (9,)))
    for reduction in ("mean", "sum", "mean"):
        job.most = 10**9
        ((whole, joined),) = figures(job, [batch], made(reduction), 3)
        assert joined == pytest.approx(whole, rel=1e-12)


def test_weights_of_classes_are_read_off_the_loss_though_the_trial_has_none_that_differ() -> None:
    torch.manual_seed(0)
    job = Job(mlp().double())
    batch = (torch.randn(8, 8).double(), torch.tensor([0, 1, 2, 1, 3, 3, 3, 3]))
    ((whole, joined),) = figures(job, [batch], of_rare_classes, 3)
    assert joined == pytest.approx(whole, rel=1e-12)


def test_a_mean_over_something_unknown_is_refused_though_two_examples_do_not_tell() -> None:
    torch.manual_seed(0)
    job = Job(mlp().double())
    batch = (torch.randn(8, 8).double(), torch.tensor([0, 1, 2, 3, 3, 3, 3, 3]))
    job.most = 5
    with pytest.raises(UsageError, match="would change the result"):
        job.step.evaluate(batch, by_hand)


def test_numbers_in_a_dict_are_refused_unless_it_is_said_what_they_are_a_mean_of() -> None:
    def both(model: Any, batch: Any) -> Any:
        return {"loss": of_rows(model, batch), "right": (model(batch[0]).argmax(1) == batch[1])}

    for weight in (None, "mean"):
        torch.manual_seed(0)
        job = Job(mlp(), weight=weight)
        batch = rows(8)
        whole = job.step.evaluate(batch, both)
        job.most = 3
        if weight is None:
            with pytest.raises(UsageError, match="a mean of"):
                job.step.evaluate(batch, both)
        else:
            found = job.step.evaluate(batch, both)
            assert torch.equal(found["right"], whole["right"])
            assert float(found["loss"]) == pytest.approx(float(whole["loss"]), rel=1e-5)


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(8, 8), nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(x)[0])


@pytest.mark.parametrize("function", [None, lambda m, b: m(b[0])])
def test_time_first_is_refused_or_right(function: Any) -> None:
    def of_steps(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())

    torch.manual_seed(0)
    batch = torch.randn(7, 6, 8).double() * 3, torch.randint(0, 4, (7, 6))
    job = Job(TimeFirst().double(), of_steps)
    job.most = 3
    with pytest.raises(UsageError):
        job.step.evaluate(batch, function)
    with pytest.raises(UsageError):  # it was not forgotten
        job.step.evaluate(batch, function)
    job = Job(TimeFirst().double(), of_steps, batch_dim=1)
    whole = job.step.evaluate(batch)
    job.model.register_forward_pre_hook(lambda _, args: _refuse(args[0].size(1) > 2))
    assert float(job.step.evaluate(batch)) == pytest.approx(float(whole), rel=1e-12)


def _refuse(is_too_large: bool) -> None:
    if is_too_large:
        raise torch.OutOfMemoryError(MESSAGE)


def test_where_one_example_fits_at_a_time_a_number_needs_a_weight_and_rows_do_not() -> None:
    torch.manual_seed(0)
    job = Job(mlp().double())
    batch = (torch.randn(5, 8).double(), torch.randint(0, 4, (5,)))
    whole = job.step.evaluate(batch, lambda m, b: m(b[0]))
    job.most = 1
    with pytest.raises(UsageError, match="do not fit into memory at once"):
        job.step.evaluate(batch)
    assert same(whole, job.step.evaluate(batch, lambda m, b: m(b[0])))
    assert any("Two do not fit at once" in text for text in job.said)


def test_a_piece_in_which_nothing_counts_is_no_reason_to_refuse() -> None:
    torch.manual_seed(0)
    job = Job(Tagger().double(), of_tokens)
    batch = padded(9)
    batch["labels"][:4] = -100
    ((whole, joined),) = figures(job, [batch], None, 3)
    assert joined == pytest.approx(whole, rel=1e-12)


def test_what_training_found_and_doubts_is_found_anew() -> None:
    """Batches without padding were trained on: a mean over examples, as far as they tell."""

    def masked(model: Any, batch: Any) -> Any:
        labels = batch["labels"]
        losses = F.cross_entropy(model(batch["ids"]).mT, labels.clamp(min=0), reduction="none")
        return (losses * (labels >= 0)).sum() / (labels >= 0).sum()

    torch.manual_seed(0)
    job = Job(Tagger().double(), masked, micro_batch=3)
    job.step(full(6))
    batch = padded(6)
    batch["labels"] = torch.tensor([[1] * 5 + [-100] * 4] * 2 + [[2] + [-100] * 8] * 4)
    ((whole, joined),) = figures(job, [batch], None, 2)
    assert joined == pytest.approx(whole, rel=1e-12)
