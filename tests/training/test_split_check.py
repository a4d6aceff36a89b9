"""The first split: pieces train as the whole, or it is said by name why they do not."""

from __future__ import annotations

import copy
import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from stability import accumulations
from stability.accumulations import CASES, Case
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.errors import OomphError, UsageError
from training.stepper_kinds import MESSAGE, OutOfMemoryAt, of_rows, rows

NUM = 12
# They draw other random numbers for pieces than for the whole: the same in the mean.
RANDOM = {"a variational autoencoder", "a diffusion step"}


@dataclass
class Outcome:
    """What became of some steps: how far off whole batches, and what was said."""

    apart: float
    said: list[str]
    refused: UsageError | None = None
    num_calls: int = 0

    @property
    def is_silent(self) -> bool:
        return self.refused is None and not any("differs" in text for text in self.said)


def train(
    model: nn.Module, loss: Any, data: list[Any], *, is_micro: bool = False, **options: Any
) -> Outcome:
    """Steps of SGD in pieces, beside the same steps of whole batches."""
    other, found = copy.deepcopy(model), Outcome(0.0, [])

    def counted(*args: Any) -> Any:
        found.num_calls += 1
        return loss(*args)

    options = {"micro_batch": 5, "say": found.said.append, **options}
    step = oomph.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), counted, **options)
    try:
        for batch in data:
            torch.manual_seed(7)
            if is_micro:
                for micro in step.micro(batch):
                    with micro:
                        micro.backward(counted(model, micro.data))
            else:
                step(batch)
    except UsageError as error:
        found.refused = error
        assert all(p.grad is None for p in model.parameters())
        return found
    by_hand = torch.optim.SGD(other.parameters(), 0.1)
    for batch in data:
        torch.manual_seed(7)
        loss(other, batch).backward()
        by_hand.step()
        by_hand.zero_grad()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    found.apart = max(float((one - two).detach().abs().max()) for one, two in pairs)
    return found


def doubled(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        return part.double() if part.is_floating_point() else part
    if isinstance(part, dict):
        return {name: doubled(each) for name, each in part.items()}
    return type(part)(map(doubled, part)) if isinstance(part, list | tuple) else part


@pytest.fixture(autouse=True)
def in_fp64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def still(model: nn.Module) -> nn.Module:
    """Without dropout, which draws other masks for pieces."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


def run(case: Case, seed: int = 0, num: int = NUM, **options: Any) -> Outcome:
    torch.manual_seed(seed)
    model = still(case.model().double())
    data = [doubled(case.batch(num)) for _ in range(3)]
    return train(model, case.loss, data, **options)


# ---- models and losses of many kinds -----------------------------------------------------------

SLOW = functools.partial(pytest.param, marks=pytest.mark.slow)
MICRO = SLOW(True)
# One of each kind: a mean, words that are ignored, one that a forward writes, one that is refused.
FEW = {
    "an MLP",
    "a mean over words that are not ignored",
    "BatchNorm",
    "two terms with different divisors",
}


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("is_micro", [False, MICRO], ids=["step", "micro"])
@pytest.mark.parametrize("name", [name if name in FEW else SLOW(name) for name in CASES])
def test_no_case_is_silently_different(name: str, is_micro: bool, monkeypatch: Any) -> None:
    case = CASES[name]
    monkeypatch.setattr(accumulations, "WEIGHTED", copy.deepcopy(accumulations.WEIGHTED).double())
    found = run(case, is_micro=is_micro)
    is_norm = name.startswith(("BatchNorm", "a spectral")) and "eval" not in name
    if is_norm:
        assert any("differs" in text for text in found.said)
    elif case.normaliser is None or name == "frames in one dimension":
        assert found.refused is not None
    else:
        assert found.refused is None
        assert name in RANDOM or found.apart < 1e-10
    if case.normaliser is None and not is_norm:
        assert found.refused is not None
        assert case.said in str(found.refused)
        assert 'on_difference="warn"' in str(found.refused)
    if found.refused is None:
        assert found.num_calls <= 9 + 16  # three pieces of three batches, and what was tried


# Two examples that go to the same expert do not meet; BatchNorm1d refuses pieces of one.
# A first batch of positives only does not tell that the loss divides by positives.
RARE = {
    "experts with a loss for balance",
    "BatchNorm1d deep inside",
    "focal loss per positive",
}


@pytest.mark.slow
# Of these three sentences the first has a third of the words: both divisors give the same share.
@example(name="two terms with different divisors", seed=1, num=3, size=1)
# Cut in halves, nobody's nearest is in the other half; cut elsewhere, one piece has no gradient.
@example(name="the hardest triplets of the batch", seed=294, num=4, size=1)
@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(sorted(CASES.keys() - RANDOM - RARE - {"frames in one dimension"})),
    seed=st.integers(0, 10**6),
    num=st.integers(3, 17),
    size=st.integers(1, 8),
)
@pytest.mark.filterwarnings("ignore:std")
def test_whatever_the_sizes_no_case_is_silently_different(
    name: str, seed: int, num: int, size: int
) -> None:
    before = accumulations.WEIGHTED
    accumulations.WEIGHTED = copy.deepcopy(before).double()
    try:
        found = run(CASES[name], seed, num, micro_batch=size)
    finally:
        accumulations.WEIGHTED = before
    assert found.apart < 1e-10 or not found.is_silent


@pytest.mark.parametrize(
    "name", ["an MLP", "class weights", SLOW("the next word with tied weights")]
)
def test_in_fp32_and_under_autocast_it_tells_the_same(name: str) -> None:
    torch.set_default_dtype(torch.float32)
    case = CASES[name]
    torch.manual_seed(0)
    model, data = case.model(), [case.batch(NUM) for _ in range(2)]
    found = train(copy.deepcopy(model), case.loss, data)
    assert found.refused is None
    assert found.apart < 1e-5
    assert train(copy.deepcopy(model), case.loss, data, precision="bf16").said == found.said

    def casting(model: Any, batch: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return case.loss(model, batch)

    assert train(copy.deepcopy(model), casting, data).said == found.said


# ---- what was given ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "weight"),
    [
        ("an MLP", "sum"),
        ("an MLP", lambda batch: batch["y"].sum() + 1),
        ("a mean over words that are not ignored", "mean"),
        ("a sum over words", "mean"),
        ("means of sentences", lambda batch: batch["mask"].sum()),
        ("class weights", "mean"),
    ],
)
def test_a_weight_that_is_wrong_is_refused_and_the_right_one_named(name: str, weight: Any) -> None:
    found = run(CASES[name], weight=weight)
    assert found.refused is not None
    assert "is wrong: the loss" in str(found.refused)
    assert "the loss is" in str(found.refused)
    warned = run(CASES[name], weight=weight, on_difference="warn")
    assert warned.refused is None
    assert any("training in pieces differs" in text for text in warned.said)


def test_a_weight_that_is_right_is_taken_without_a_word() -> None:
    words = CASES["a mean over words that are not ignored"]
    found = run(words, weight=lambda batch: (batch["y"] != -100).sum())
    assert (found.refused, found.said) == (None, [])
    assert found.apart < 1e-10


def words(lengths: list[int]) -> dict[str, torch.Tensor]:
    is_padding = torch.arange(7)[None] >= torch.tensor(lengths)[:, None]
    y = torch.randint(0, 5, (len(lengths), 7))
    x = torch.randint(1, 20, (len(lengths), 7))
    return {"x": x, "y": y.masked_fill(is_padding, -100), "mask": (~is_padding).long()}


@pytest.mark.parametrize("loss", ["torch's own", SLOW("by hand"), SLOW("means of sentences")])
def test_padding_that_only_comes_later_is_seen_when_it_comes(loss: str) -> None:
    """The first batch has none: there a mean over tokens is one over examples."""
    torch.manual_seed(0)
    model = still(accumulations.Tagger().double())
    data = [words([7] * 9), words([1, 2, 3, 7, 7, 5, 2, 6, 4]), words([3] * 8 + [7])]

    def of_means(model: Any, batch: Any) -> Any:
        lengths = (batch["y"] != -100).sum(1)
        return accumulations.mean_of_sentence_means(model, {**batch, "lengths": lengths})

    losses: dict[str, Any] = {
        "torch's own": accumulations.per_word(),
        "by hand": accumulations.by_hand_per_word,
        "means of sentences": of_means,
    }
    for weight in (None, "mean"):
        found = train(copy.deepcopy(model), losses[loss], data, weight=weight)
        if weight is None or loss == "means of sentences":
            assert found.refused is None
            assert found.apart < 1e-10
        else:
            assert found.refused is not None


def test_another_kind_of_batch_is_checked_again() -> None:
    """A mask of T x T that comes when T is the number of examples."""
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True).double()
    data: list[Any] = [{"x": torch.randn(6, 6, 8)} for _ in range(3)]
    data[1]["mask"] = nn.Transformer.generate_square_subsequent_mask(6)
    found = train(model, lambda m, b: m(b["x"], b.get("mask")).square().mean(), data)
    assert found.refused is None
    assert found.apart < 1e-10


# ---- the dimension of the examples -------------------------------------------------------------


class Recurrent(nn.Module):
    """A language model as nn.LSTM has it by default: time first."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn, self.head = nn.Embedding(20, 8), nn.LSTM(8, 8), nn.Linear(8, 20)

    def forward(self, x: Any) -> Any:
        return self.head(self.rnn(self.table(x))[0])


def of_next(model: Any, batch: Any) -> Any:
    source, target = batch.values() if isinstance(batch, dict) else batch
    return F.cross_entropy(model(source).flatten(0, 1), target.flatten())


def time_first(length: int, num: int) -> tuple[Any, Any]:
    return torch.randint(0, 20, (length, num)), torch.randint(0, 20, (length, num))


@pytest.mark.parametrize("length", [SLOW(9), 6])
@pytest.mark.parametrize("make", [dict, SLOW(tuple)])
def test_time_first_is_found_even_where_the_batch_is_square(make: Any, length: int) -> None:
    torch.manual_seed(0)
    data = [time_first(length, 6), time_first(7, 6), time_first(6, 4)]
    named = [dict(zip("st", each, strict=True)) if make is dict else each for each in data]
    found = train(Recurrent(), of_next, named, micro_batch=2)
    assert found.refused is None
    assert found.apart < 1e-10
    assert "along dimension 1" in found.said[0]
    told = train(Recurrent(), of_next, named, micro_batch=2, batch_dim=1)
    assert told.apart < 1e-10
    assert not any("dimension" in text for text in told.said)


def test_a_dimension_that_is_wrong_is_refused() -> None:
    torch.manual_seed(0)
    found = train(Recurrent(), of_next, [time_first(9, 6)], micro_batch=2, batch_dim=0)
    assert "in rnn, in LSTM, what comes out for an example depends" in str(found.refused)


class Masked(nn.Module):
    def __init__(self, *, is_batch_first: bool) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=is_batch_first)
        self.head, self.time = nn.Linear(8, 3), int(is_batch_first)

    def forward(self, x: Any, mask: Any) -> Any:
        return self.head(self.layer(x, src_mask=mask)).mean(self.time)


@pytest.mark.parametrize("dims", [None, SLOW(True)], ids=["found", "given"])
@pytest.mark.parametrize("length", [SLOW(5), 6])
@pytest.mark.parametrize("is_batch_first", [True, False])
def test_a_mask_of_time_by_time_is_given_whole(
    is_batch_first: bool, length: int, dims: Any
) -> None:
    torch.manual_seed(0)
    shape = (6, length, 8) if is_batch_first else (length, 6, 8)
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    data = [{"x": torch.randn(shape), "mask": mask, "y": torch.randint(0, 3, (6,))}] * 2
    given = dims and {"x": 0 if is_batch_first else 1, "mask": None}
    found = train(
        Masked(is_batch_first=is_batch_first),
        lambda m, b: F.cross_entropy(m(b["x"], b["mask"]), b["y"]),
        data,
        micro_batch=2,
        batch_dim=given,
    )
    assert found.refused is None
    assert found.apart < 1e-10
    assert dims or any("passes mask whole" in text for text in found.said)


def test_weights_of_classes_are_no_examples_though_there_are_as_many() -> None:
    torch.manual_seed(0)
    data = [
        {"x": torch.randn(4, 8), "w": torch.rand(4) + 0.1, "y": torch.randint(0, 4, (4,))}
        for _ in range(3)
    ]
    loss = lambda m, b: F.cross_entropy(m(b["x"]), b["y"], weight=b["w"])  # noqa: E731
    found = train(nn.Linear(8, 4), loss, data, micro_batch=2)
    assert found.refused is None
    assert found.apart < 1e-10


@pytest.mark.parametrize("shape", [(12, 8), (12, 4, 8)])
def test_a_cut_of_what_the_loss_does_not_use_is_no_split(shape: Any) -> None:
    """Each piece would be the whole batch."""

    def loss(model: Any, batch: Any) -> Any:
        means = model(batch["x"]).flatten(1, -2).mean(1) if len(shape) > 2 else model(batch["x"])
        return (means @ means.t()).logsumexp(1).mean()

    torch.manual_seed(0)
    data = [{"x": torch.randn(shape), "labels": torch.randint(0, 3, (12, 4))}]
    found = train(nn.Linear(8, 4), loss, data, micro_batch=4)
    assert found.refused is not None


def test_a_piece_without_any_of_what_the_loss_divides_by_is_refused() -> None:
    """Negatives add to a sum that is divided by the number of positives."""
    torch.manual_seed(0)
    data = [{"x": torch.randn(6, 12), "y": torch.tensor([1, 0, 2, 1, 0, 3])}]
    model = accumulations.mlp()().double()
    found = train(model, accumulations.focal_per_positive, data, micro_batch=1)
    assert found.refused is not None
    assert "has none of" in str(found.refused)


def test_graphs_are_refused_by_the_name_of_what_cannot_be_cut() -> None:
    class Graphs:
        def __init__(self) -> None:
            self.x, self.edge_index = torch.randn(7, 8), torch.randint(0, 7, (2, 9))
            self.batch, self.y = torch.tensor([0, 0, 1, 1, 1, 2, 2]), torch.randn(3)

    loss = lambda m, b: m(b.x)[b.edge_index[0]].sum() + b.y.sum()  # noqa: E731
    found = train(nn.Linear(8, 4), loss, [Graphs()], micro_batch=2)
    assert "edge_index of the batch cannot be split" in str(found.refused)


# ---- what is left behind -----------------------------------------------------------------------


def test_nothing_of_what_is_tried_remains() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3))
    batch, sizes = (torch.randn(12, 8), torch.randint(0, 3, (12,))), []
    states: list[Any] = []

    def loss(model: Any, part: Any) -> Any:
        sizes.append(len(part[0]))
        if len(sizes) in (1, 9):
            drawn = torch.get_rng_state(), random.getstate()
            states.append((drawn, copy.deepcopy(model.state_dict())))
        part[0].mul_(1)  # in place
        random.random()  # noqa: S311
        return F.cross_entropy(model(part[0]), part[1])

    said: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = oomph.Stepper(model, optimizer, loss, micro_batch=4, say=said.append)
    step(batch)
    step(batch)
    assert sizes == [4, 4, 1, 3, 4, 4, 1, 3, *[4] * 6]  # tried once, at two places
    assert str(states[0]) == str(states[1])
    assert len(said) == 1
    assert "BatchNorm (1)" in said[0]
    assert all(module.training for module in model.modules())


class Fitting:
    """As many examples as fit at a time, with and without what backward needs."""

    def __init__(self, most: int, most_forward: int) -> None:
        self._most, self._most_forward = most, most_forward

    def __call__(self, model: Any, batch: Any) -> Any:
        most = self._most if torch.is_grad_enabled() else self._most_forward
        if len(batch["x"]) > most:
            raise torch.OutOfMemoryError(MESSAGE)
        return accumulations.per_word()(model, batch)


@pytest.mark.parametrize("is_micro", [False, MICRO])
@pytest.mark.parametrize("most", [1, 2, SLOW(3), SLOW(5)])
def test_it_is_found_out_with_what_fits_into_memory(most: int, is_micro: bool) -> None:
    torch.manual_seed(0)
    model, data = still(accumulations.Tagger().double()), [words([1, 2, 3, 7, 7, 5])] * 2
    other = copy.deepcopy(model)
    found = train(model, accumulations.per_word(), data, micro_batch=1)
    said: list[str] = []
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    step = oomph.Stepper(other, optimizer, Fitting(most, 2), say=said.append, last_resorts=())
    for batch in data:
        if is_micro:
            for micro in step.micro(batch):
                with micro:
                    micro.backward(Fitting(most, 2)(other, micro.data))
        else:
            step(batch)
    assert sum("that are not -100" in text for text in said) == 1
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert found.refused is None
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-10


def test_where_not_even_two_examples_fit_it_asks() -> None:
    torch.manual_seed(0)
    data = [words([1, 2, 3, 7])]
    for weight in (None, lambda batch: (batch["y"] != -100).sum()):
        said: list[str] = []
        model = still(accumulations.Tagger().double())
        step = oomph.Stepper(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            Fitting(1, 1),
            weight=weight,
            say=said.append,
        )
        if weight is None:
            with pytest.raises(UsageError, match="two examples do not fit"):
                step(data[0])
        else:
            step(data[0])
            assert any("two examples do not fit" in text for text in said)


def test_a_batch_that_is_not_split_after_one_that_did_not_fit_is_trained_once() -> None:
    torch.manual_seed(0)
    model = still(accumulations.Tagger().double())
    other, fitting = copy.deepcopy(model), Fitting(0, 0)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options: dict[str, Any] = {"say": lambda _: None, "last_resorts": ()}
    step = oomph.Stepper(model, optimizer, fitting, **options)
    with pytest.raises(OomphError, match="one step does not fit"):
        step(words([1, 2, 3, 7]))
    fitting._most, batch = 1, words([4])
    step(batch)
    accumulations.per_word()(other, batch).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(points=st.lists(st.integers(1, 400), min_size=1, max_size=2))
def test_memory_that_runs_out_while_it_looks_changes_nothing(points: list[int]) -> None:
    torch.manual_seed(0)
    model = still(accumulations.Tagger().double())
    other, data = copy.deepcopy(model), [words([1, 2, 3, 7, 7, 5])] * 2
    whole = train(model, accumulations.per_word(), data, micro_batch=3)
    injector = OutOfMemoryAt()
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    options: dict[str, Any] = {"say": lambda _: None, "micro_batch": 3, "copies": "always"}
    step = oomph.Stepper(other, optimizer, accumulations.per_word(), **options)
    update = step._attempts.update

    def updated() -> Any:
        injector.disarm()
        return update()

    updated.finish, updated.scale = update.finish, update.scale  # type: ignore[attr-defined]
    step._attempts.update = updated  # type: ignore[assignment]
    with injector:
        for batch in data:
            injector.arm(points)
            step(batch)
    assert whole.refused is None
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-10


def test_batches_that_are_accumulated_are_weighted_by_what_they_count() -> None:
    """Though none of them is split."""
    torch.manual_seed(0)
    model = still(accumulations.Tagger().double())
    other = copy.deepcopy(model)
    data = [words([1, 2, 3]), words([7, 7, 6])]
    said: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = oomph.Stepper(model, optimizer, accumulations.per_word(), accumulate=2, say=said.append)
    for batch in data:
        step(batch)
    both = {name: torch.cat([each[name] for each in data]) for name in data[0]}
    accumulations.per_word()(other, both).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-10
    assert any("that are not -100" in text for text in said)


def of_masked(model: Any, batch: Any) -> Any:
    """A mean over what a mask has, written by hand."""
    errors = (model(batch["x"]).squeeze(-1) - batch["y"]).square() * batch["mask"]
    return errors.sum() / batch["mask"].sum()


def masked(lengths: list[int]) -> dict[str, torch.Tensor]:
    num, most = len(lengths), 5
    x, y = torch.randn(num, most, 3), torch.randn(num, most)
    mask = (torch.arange(most) < torch.tensor(lengths)[:, None]).double()
    return {"x": x.double(), "y": y.double(), "mask": mask}


def accumulated(data: list[Any], loss: Any, save_at: int | None = None) -> tuple[float, list[str]]:
    """How far one step of several batches is off that of all together, and what was said.

    save_at: the batch after which another Stepper goes on.
    """
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    other, said = copy.deepcopy(model), list[str]()

    def made() -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return oomph.Stepper(model, optimizer, loss, accumulate=9, say=said.append)

    step = made()
    for number, batch in enumerate(data, start=1):
        step(batch)
        if number == save_at:
            state = copy.deepcopy(step.state_dict())
            del step
            step = made()
            step.load_state_dict(state)
    step.flush()
    both = {name: torch.cat([each[name] for each in data]) for name in data[0]}
    loss(other, both).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs), said


def test_batches_that_are_accumulated_are_held_against_each_other() -> None:
    """None of them is split, and each by itself is a mean over examples."""
    torch.manual_seed(0)
    apart, said = accumulated([masked([5, 5, 5]), masked([2, 2, 2]), masked([1, 3, 2])], of_masked)
    assert apart < 1e-12
    assert any("batch['mask']" in text for text in said)
    apart, said = accumulated([masked([5, 5, 5]), masked([2, 2, 2])], of_masked)
    assert apart < 1e-12 or any("Pass weight= to set it" in text for text in said)


def test_weights_of_classes_that_are_alike_at_first_are_seen_when_they_differ() -> None:
    weights = torch.tensor([1.0, 1.0, 5.0, 9.0]).double()

    def of_classes(model: Any, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1], weight=weights)

    torch.manual_seed(0)
    data = [(torch.randn(4, 3).double(), torch.tensor(y)) for y in ([0, 1, 1, 0], [0, 2, 3, 3])]
    found = train(nn.Linear(3, 4).double(), of_classes, data, micro_batch=2)
    assert found.apart < 1e-12


def test_two_examples_that_fit_at_a_time_are_those_that_tell() -> None:
    """Neighbours have as many words, but for two in the middle."""

    def loss(model: Any, batch: Any) -> Any:
        if len(batch["x"]) > 2:
            raise torch.OutOfMemoryError(MESSAGE)
        return of_masked(model, batch)

    torch.manual_seed(0)
    batch = masked([3, 3, 3, 2, 2])
    batch["ids"] = torch.tensor([[1, 0], [1, 1], [1, 1], [1, 1], [1, 1]])
    model = nn.Linear(3, 1).double()
    other, said = copy.deepcopy(model), list[str]()
    step = oomph.Stepper(model, torch.optim.SGD(model.parameters(), 0.1), loss, say=said.append)
    step(batch)
    of_masked(other, batch).backward()
    torch.optim.SGD(other.parameters(), 0.1).step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12


def test_a_batch_of_one_example_does_not_end_the_looking() -> None:
    def summed(model: Any, batch: Any) -> Any:
        return (model(batch["x"]).squeeze(-1) - batch["y"]).square().sum()

    torch.manual_seed(0)
    apart, said = accumulated([masked([5]), masked([5, 5, 5, 5]), masked([5, 5])], summed)
    assert apart < 1e-12
    assert any("sum over examples" in text for text in said)


@pytest.mark.parametrize(
    "data",
    [
        [[1, 2, 3], [4, 5]],
        [[1, 2, 3], [5, 5, 5]],  # the second could be a mean over examples, too
    ],
)
def test_gradients_of_a_checkpoint_count_as_they_did(data: list[list[int]]) -> None:
    torch.manual_seed(0)
    apart, _ = accumulated([masked(each) for each in data], of_masked, save_at=1)
    assert apart < 1e-12


@pytest.mark.parametrize("data", [[[5, 5, 5], [1, 2, 3]], [[1, 2, 3], [2]]])
def test_gradients_of_a_checkpoint_that_count_otherwise_are_refused(data: list[list[int]]) -> None:
    torch.manual_seed(0)
    with pytest.raises(UsageError, match="gradients of the checkpoint"):
        accumulated([masked(each) for each in data], of_masked, save_at=1)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_a_check_that_is_interrupted_is_done_again(error: Any) -> None:
    """In the first batch all examples have as many words; the second tells, and is interrupted."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    other, num_calls, fails_at = copy.deepcopy(model), 0, 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == fails_at:
            raise error
        return of_masked(model, batch)

    def made(model: Any) -> Any:
        return torch.optim.SGD(model.parameters(), 0.1)

    data = [masked([2, 2, 2, 2]), masked([1, 2, 5, 4])]
    step = oomph.Stepper(model, made(model), loss, micro_batch=2, say=lambda _: None)
    step(data[0])
    fails_at = num_calls + 2
    with pytest.raises(error):
        step(data[1])
    step(data[1])
    optimizer = made(other)
    for batch in data:
        optimizer.zero_grad()
        of_masked(other, batch).backward()
        optimizer.step()
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) < 1e-12


def test_gradients_of_a_checkpoint_that_are_a_sum_are_flushed_as_a_sum() -> None:
    def summed(model: Any, batch: Any) -> Any:
        return (model(batch["x"]).squeeze(-1) - batch["y"]).square().sum()

    torch.manual_seed(0)
    for save_at in (1, 2):
        apart, _ = accumulated([masked([5, 5, 5]), masked([5, 5])], summed, save_at=save_at)
        assert apart < 1e-12


class Momentum(nn.Module):
    """An average of the weights that each forward moves, in one way or another."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.online, self.average = nn.Linear(8, 4), nn.Linear(8, 4).requires_grad_(False)
        self.way, self.num_calls = way, 0
        self.book: torch.Tensor
        self.register_buffer("book", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        new, old = self.online.weight, self.average.weight
        if self.way == "data":
            old.data = 0.5 * old.data + 0.5 * new.data
        elif self.way == "data in place":
            self.book.data.add_(x.mean())
        elif self.way == "in place":
            with torch.no_grad():
                old.lerp_(new, 0.5)
        else:
            self.num_calls += 1
        return self.online(x) + self.average(x) + self.book


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("data", "average.weight"),
        ("data in place", "book"),
        ("in place", "average.weight"),
        ("a number", "num_calls"),
    ],
)
def test_whatever_each_forward_writes_is_told(way: str, name: str) -> None:
    torch.manual_seed(0)
    model, said = Momentum(way), list[str]()
    optimizer = torch.optim.SGD(model.online.parameters(), 0.1)
    step = oomph.Stepper(model, optimizer, of_rows, micro_batch=2, say=said.append)
    step(rows(6))
    assert any(name in text and "changes in every forward" in text for text in said)


def test_to_ignore_is_not_to_look() -> None:
    found = run(CASES["InfoNCE"], on_difference="ignore")
    assert (found.refused, found.said, found.num_calls) == (None, [], 9)
    assert found.apart > 1e-3
    warned = run(CASES["InfoNCE"], on_difference="warn")
    assert "every example is compared with every other" in warned.said[0]


def test_packed_sequences_are_checked_and_cut_by_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 8), nn.Linear(8, 3)

        def forward(self, x: Any) -> Any:
            return self.head(self.rnn(x)[1][0][-1])

    torch.manual_seed(0)
    lengths = [3, 1, 5, 2, 4, 2, 3]
    data = [
        {
            "x": nn.utils.rnn.pack_sequence([torch.randn(n, 4) for n in lengths], False),
            "y": torch.randint(0, 3, (7,)),
        }
        for _ in range(2)
    ]
    found = train(Packed(), lambda m, b: F.cross_entropy(m(b["x"]), b["y"]), data, micro_batch=3)
    assert (found.refused, found.said) == (None, [])
    assert found.apart < 1e-10


def test_in_half_precision_what_cannot_be_told_from_rounding_is_said() -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)
    model = accumulations.mlp()().bfloat16()
    pairs = [x.bfloat16() for x in accumulations.pairs(NUM)]
    step = oomph.Stepper(
        model, torch.optim.SGD(model.parameters(), 0.1), accumulations.info_nce, micro_batch=5
    )
    with pytest.raises(UsageError, match="every example is compared"):
        step(tuple(pairs))
    rows = accumulations.rows(NUM)
    batch = {"x": rows["x"].bfloat16(), "y": rows["y"]}
    step = oomph.Stepper(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        accumulations.cross_entropy(),
        micro_batch=5,
    )
    assert step(batch).has_stepped
