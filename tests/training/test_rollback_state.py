"""What a forward writes is set back after an out-of-memory error, wherever it is, or refused."""

from __future__ import annotations

import copy
import functools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import oomph
from oomph.errors import OomphError
from oomph.training import rollback_state
from training.stepper_kinds import MESSAGE

NUM, STEPS = 8, 7
WIDTH = 4


class Codebook(nn.Module):
    """VQ-EMA, as most have it: buffers that are written through `.data`."""

    embed: torch.Tensor
    size: torch.Tensor
    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("embed", torch.randn(WIDTH, 5))
        self.register_buffer("size", torch.ones(5))
        self.register_buffer("mean", torch.randn(WIDTH, 5))

    def forward(self, x: Any) -> Any:
        x = self.project(x)
        nearest = torch.cdist(x, self.embed.t()).argmin(1)
        one_hot = nn.functional.one_hot(nearest, 5).to(x.dtype)
        self.size.data.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
        self.mean.data.mul_(0.9).add_(x.detach().t() @ one_hot, alpha=0.1)
        self.embed.data.copy_(self.mean / self.size)
        return x - self.embed.t()[nearest]


class ReplacedCodebook(nn.Module):
    """VQ-EMA of another school: parameters that are replaced by new ones."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.table = nn.Linear(WIDTH, WIDTH), nn.Embedding(5, WIDTH)
        self.mean = nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x: Any) -> Any:
        x = self.project(x)
        nearest = torch.cdist(x, self.table.weight).argmin(1)
        self.mean = nn.Parameter(self.mean * 0.9 + 0.1 * x.detach().mean(0))
        self.table.weight = nn.Parameter(self.mean * 0.99)
        return x - self.table(nearest).detach()


class Momentum(nn.Module):
    """MoCo: an encoder that follows the other, and a queue of what it said."""

    queue: torch.Tensor
    pointer: torch.Tensor

    def __init__(self, *, rebinds: bool) -> None:
        super().__init__()
        self.rebinds = rebinds
        self.query = nn.Linear(WIDTH, WIDTH)
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.register_buffer("queue", torch.randn(16, WIDTH))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            for q, k in zip(self.query.parameters(), self.key.parameters(), strict=True):
                if self.rebinds:
                    k.data = k.data * 0.9 + q.data * 0.1
                else:
                    k.data.mul_(0.9).add_(q.data, alpha=0.1)
            keys = self.key(x)
        logits = self.query(x) @ self.queue.clone().t()
        at = int(self.pointer)
        for row in keys:
            self.queue[at % 16] = row
            at += 1
        self.pointer[0] = at
        return logits + (self.query(x) * keys).sum(1, keepdim=True)


class Averaged(nn.Module):
    """An average of the model that is updated in forward, hidden from its parameters in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Linear(WIDTH, WIDTH).double()
        self.target = [torch.optim.swa_utils.AveragedModel(self.online)]

    def forward(self, x: Any) -> Any:
        self.target[0].update_parameters(self.online)
        with torch.no_grad():
            wanted = self.target[0](x * 2)
        return self.online(x) - wanted


class Late(nn.Module):
    """A buffer and a module that are made by the first forward, and an attribute."""

    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        if not hasattr(self, "scale"):
            self.register_buffer("scale", torch.rand(WIDTH, dtype=x.dtype))
            self.more = nn.Linear(WIDTH, WIDTH).to(x.dtype).requires_grad_(False)
            self.seen = 0
        self.scale.add_(x.detach().mean(0).abs())
        self.seen += len(x)
        return self.linear(x) * self.scale + self.more(x) / self.seen


class Plain(nn.Module):
    """State in plain attributes: numbers, tensors, lists, dicts, queues, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.count, self.total = 0, torch.zeros(())
        self.history: list[Any] = []
        self.table: dict[str, Any] = {"mean": torch.zeros(WIDTH), "calls": 0}
        self.recent: deque[float] = deque([0.0], maxlen=3)
        self.carried = torch.zeros(WIDTH)
        self.generator = torch.Generator().manual_seed(5)

    def forward(self, x: Any) -> Any:
        self.count += len(x)
        self.total += float(x.sum())
        self.table["mean"].lerp_(x.detach().mean(0).float(), 0.5)
        self.table["calls"] += 1
        self.recent.append(float(x.sum()))
        noise = torch.rand(x.shape, generator=self.generator, dtype=x.dtype)
        out = self.linear(x * noise) + self.carried + self.table["mean"] / self.table["calls"]
        self.carried = out.mean(0)  # with its graph
        self.history.append(float(out.detach().sum()))
        self.carried = self.carried.detach()
        return out * (1 + sum(self.recent) / 100) + self.total / self.count


class Normalised(nn.Module):
    """Trained weights that the forward sets to a norm, in place or where nobody sees it."""

    def __init__(self, *, is_seen: bool) -> None:
        super().__init__()
        self.is_seen, self.linear = is_seen, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            weight = self.linear.weight if self.is_seen else self.linear.weight.data
            weight.mul_(0.9)
        return self.linear(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "codebook written through data": Codebook,
    "codebook of new parameters": ReplacedCodebook,
    "momentum encoder, in place": lambda: Momentum(rebinds=False),
    "momentum encoder, rebound": lambda: Momentum(rebinds=True),
    "average in a list": Averaged,
    "late buffers and modules": Late,
    "plain attributes": Plain,
    "weights written in forward": lambda: Normalised(is_seen=True),
    "weights written through data": lambda: Normalised(is_seen=False),
    "spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm, parametrized": lambda: nn.utils.parametrizations.spectral_norm(
        nn.Linear(WIDTH, WIDTH)
    ),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)),
    "batch norm": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)),
}


class Job:
    """Training in pieces of four, with errors that strike after the forward of a piece."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = make().double()
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05, momentum=0.9)
        self.fails: list[int] = []
        self.pieces = 0

    def loss(self, model: Any, x: Any) -> Any:
        loss = model(x).square().mean()
        self.pieces += 1
        if self.fails and self.pieces == self.fails[0]:
            self.pieces = 0
            del self.fails[0]
            raise torch.OutOfMemoryError(MESSAGE)
        return loss

    def train(self, fails_at: dict[int, list[int]], **options: Any) -> Job:
        """fails_at: by the number of the step, after which piece of each attempt."""
        torch.manual_seed(1)
        step = oomph.Stepper(
            self.model,
            self.optimizer,
            self.loss,
            micro_batch=4,
            say=lambda _: None,
            on_difference="ignore",
            **options,
        )
        step._recovery.sizes.failed = lambda *_: 4  # type: ignore[method-assign]
        for number in range(1, STEPS + 1):
            self.pieces, self.fails = 0, list(fails_at.get(number, ()))
            x = torch.randn(NUM, WIDTH).double()
            assert step(x).num_ooms == len(fails_at.get(number, ()))
        return self

    def state(self) -> dict[str, Any]:
        found = dict(everything_in(self.model, ""))
        assert len(found) >= 2
        return found


def everything_in(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        yield f"{path}.{name}", tensor.detach().clone()
    for name, each in module.named_modules():
        for key in ("count", "total", "history", "table", "recent", "carried", "seen"):
            if key in vars(each):
                yield f"{path}.{name}.{key}", copy.deepcopy(vars(each)[key])
        if "target" in vars(each):
            yield from everything_in(each.target[0], f"{path}.target")


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for key, value in one.items():
        assert str(value) == str(other[key]), key
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, other[key]), key


@pytest.mark.parametrize(
    "fails_at",
    [{1: [1]}, {1: [2, 1]}, {2: [2]}, {3: [2]}, {1: [1], 2: [2, 2], 5: [1, 2], 7: [2]}],
    ids=str,
)
@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_writes_is_set_back(name: str, fails_at: dict[int, list[int]]) -> None:
    with torch.random.fork_rng():
        failed = Job(MODELS[name]).train(fails_at)
        drawn = torch.rand(1)
        expected = Job(MODELS[name]).train({})
        assert torch.equal(drawn, torch.rand(1))
    assert_equal(failed.state(), expected.state())


# ---- beside the model --------------------------------------------------------------------------


class Teacher:
    """A loss that is an object, and has a module of its own."""

    def __init__(self, job: Job) -> None:
        self.job, self.module = job, Codebook().double()

    def __call__(self, model: Any, x: Any) -> Any:
        return self.job.loss(model, x) + self.module(x).mean()

    def of(self, model: Any, x: Any) -> Any:
        return self(model, x)


def with_teacher(teacher: Teacher, model: Any, x: Any) -> Any:
    return teacher(model, x)


LOSSES: dict[str, Callable[[Teacher], Any]] = {
    "an object": lambda teacher: teacher,
    "a method": lambda teacher: teacher.of,
    "a closure": lambda teacher: lambda model, x: teacher(model, x),
    "a partial": lambda teacher: functools.partial(with_teacher, teacher),
    "in a list": lambda teacher: lambda model, x, all_of=(teacher,): all_of[0](model, x),
}


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("fails_at", [{}, {1: [2], 3: [2]}], ids=str)
def test_modules_that_the_loss_names_are_set_back_too(
    how: str, fails_at: dict[int, list[int]]
) -> None:
    found = []
    for each in ({}, fails_at):
        torch.manual_seed(2)
        job = Job(MODELS["batch norm"])
        teacher = Teacher(job)
        loss, job_loss = LOSSES[how](teacher), job.loss
        teacher.job = _Inner(job_loss)  # type: ignore[assignment]
        job.loss = loss  # type: ignore[method-assign]
        options = {"beside": [teacher.module]} if how == "in a list" else {}
        job.train(each, **options)
        found.append({**job.state(), **dict(everything_in(teacher.module, "teacher"))})
    assert_equal(*found)


class _Inner:
    def __init__(self, loss: Any) -> None:
        self.loss = loss


# ---- what cannot be set back -------------------------------------------------------------------


class Begins(nn.Module):
    """Writes from a certain step on."""

    def __init__(self, write: Callable[[Any], None], first: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.register_buffer("table", torch.zeros(3))
        self.write, self.first, self.calls = write, first, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        if self.calls > 2 * (self.first - 1):  # two pieces in each step
            with torch.no_grad():
                self.write(self)
        return self.linear(x) + self.frozen(x)


WRITES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a frozen weight": (lambda m: m.frozen.weight.mul_(0.9), "frozen.weight"),
    "a frozen weight, unseen": (lambda m: m.frozen.weight.data.mul_(0.9), "frozen.weight"),
    "a buffer, unseen": (lambda m: m.table.data.add_(1), "table"),
    "a weight, unseen": (lambda m: m.linear.bias.data.mul_(0.9), "linear.bias"),
}


@pytest.mark.parametrize("what", WRITES)
@pytest.mark.parametrize("fails", [[2], [2, 2]], ids=str)
def test_a_write_that_begins_late_and_cannot_be_undone_is_named(
    what: str, fails: list[int]
) -> None:
    write, name = WRITES[what]
    with pytest.raises(OomphError, match="cannot undo") as caught:
        Job(lambda: Begins(write, 3)).train({3: fails})
    assert f"changed {name}" in (caught.value.because or "")


@pytest.mark.parametrize("what", WRITES)
def test_once_a_write_has_been_observed_it_is_set_back(what: str) -> None:
    write, _ = WRITES[what]
    failed = Job(lambda: Begins(write, 3)).train({5: [2], 7: [1, 2]})
    assert_equal(failed.state(), Job(lambda: Begins(write, 3)).train({}).state())


def test_what_the_users_loop_writes_between_steps_is_no_reason_to_refuse() -> None:
    """An average that is updated after each step, through `.data`, and used by the loss."""
    found = []
    for fails_at in ((), (3, 6)):
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, WIDTH).double()
        average = copy.deepcopy(model)
        fails: list[int] = []

        def loss(model: Any, x: Any, average: Any = average, fails: list[int] = fails) -> Any:
            value = (model(x) - average(x)).square().mean() + model(x).square().mean()
            if fails:
                raise torch.OutOfMemoryError(MESSAGE + str(fails.pop()))
            return value

        step = oomph.Stepper(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            loss,
            say=lambda _: None,
            on_difference="ignore",
        )
        torch.manual_seed(1)
        for number in range(STEPS):
            if number in fails_at:
                fails.append(0)
            step(torch.randn(NUM, WIDTH).double())
            for p, q in zip(model.parameters(), average.parameters(), strict=True):
                q.data.mul_(0.5).add_(p.data, alpha=0.5)
        found.append(nn.utils.parameters_to_vector(average.parameters()))
    assert (found[0] - found[1]).abs().max() < 1e-12


def test_a_lazy_module_that_fails_while_it_is_made_is_named() -> None:
    model = nn.Sequential(nn.LazyLinear(WIDTH)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []

    def loss(model: Any, x: Any) -> Any:
        calls.append(model(x))
        if len(calls) == 1:
            raise torch.OutOfMemoryError(MESSAGE)
        return calls[-1].mean()

    step = oomph.Stepper(model, optimizer, loss, say=lambda _: None, on_difference="ignore")
    with pytest.raises(OomphError, match="cannot undo") as caught:
        step(torch.randn(NUM, WIDTH).double())
    assert "0.weight" in (caught.value.because or "")
    assert step(torch.randn(NUM, WIDTH).double()).has_stepped


class Activations(nn.Module):
    """Leaves what it computed in an attribute, for somebody to look at."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.last: Any = None

    def forward(self, x: Any) -> Any:
        self.last = self.linear(x)
        return self.last


def test_a_large_tensor_in_an_attribute_is_not_kept_alive_and_named_if_it_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollback_state, "_MOST_NEAR_BYTES", 64)
    monkeypatch.setattr(rollback_state, "_MOST_COUNTER_BYTES", 0)
    job = Job(Activations)
    with pytest.raises(OomphError, match="cannot undo") as caught:
        job.train({3: [1]})
    assert "last" in (caught.value.because or "")


class Counting(nn.Module):
    """Has a table beyond what is copied, and a counter after it, as metrics have."""

    def __init__(self, counts_in: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table, self.seen = torch.zeros(100), torch.zeros(1)
        self.counts_in = counts_in

    def forward(self, x: Any) -> Any:
        getattr(self, self.counts_in).add_(1)
        return self.linear(x)


def test_a_counter_is_set_back_beside_a_table_that_is_too_large(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollback_state, "_MOST_NEAR_BYTES", 64)
    monkeypatch.setattr(rollback_state, "_MOST_COUNTER_BYTES", 4)
    expected = Job(lambda: Counting("seen")).train({})
    assert_equal(Job(lambda: Counting("seen")).train({6: [1]}).state(), expected.state())
    with pytest.raises(OomphError, match="cannot undo") as caught:
        Job(lambda: Counting("table")).train({6: [1]})
    assert "table" in (caught.value.because or "")


def test_what_exceeds_the_copies_of_the_first_step_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rollback_state, "_MOST_FIRST_BYTES", 64)
    with pytest.raises(OomphError, match="cannot undo") as caught:
        Job(MODELS["momentum encoder, in place"]).train({1: [2]})
    assert "key.weight" in (caught.value.because or "")
    # From the second step on it is known what is written.
    failed = Job(MODELS["momentum encoder, in place"]).train({2: [2]})
    expected = Job(MODELS["momentum encoder, in place"]).train({})
    assert_equal(failed.state(), expected.state())


def test_an_error_of_the_users_is_raised_even_if_not_all_can_be_set_back() -> None:
    said: list[str] = []
    model = Begins(WRITES["a frozen weight"][0], 3).double()

    def loss(model: Any, x: Any) -> Any:
        value = model(x).mean()
        if model.calls == 5:
            raise ZeroDivisionError
        return value

    optimizer = torch.optim.SGD(model.linear.parameters(), 0.1)
    step = oomph.Stepper(
        model, optimizer, loss, micro_batch=4, say=said.append, on_difference="ignore"
    )
    x = torch.randn(NUM, WIDTH).double()
    step(x)
    step(x)
    with pytest.raises(ZeroDivisionError):
        step(x)
    assert any("frozen.weight" in each for each in said)


def test_tricks_that_are_switched_on_stay_on() -> None:
    """They are put on the model while it is set back."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(*blocks).double()
    most = [0]

    def loss(model: Any, x: Any) -> Any:
        if len(x) > most[0] and not is_recomputed(model):
            raise torch.OutOfMemoryError(MESSAGE)
        return model(x).mean()

    def is_recomputed(model: Any) -> bool:
        return all("forward" in vars(block) for block in model)

    step = oomph.Stepper(
        model, torch.optim.SGD(model.parameters()), loss, say=lambda _: None, on_difference="ignore"
    )
    step(torch.randn(NUM, WIDTH).double())
    assert is_recomputed(model)


# ---- between the batches of one step -------------------------------------------------------------


class Watched(nn.Module):
    """Written by its forward and by the loop around it, in the same places and in others."""

    marks: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.average = copy.deepcopy(self.linear).requires_grad_(False)
        self.register_buffer("marks", torch.zeros(2))
        self.log: list[int] = []
        self.at, self.calls = 0, 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.linear(x) + self.average(x)


@pytest.mark.parametrize("fails_at", [1, 2, 5, 8], ids=str)
@pytest.mark.parametrize("is_seen", [True, False])
def test_what_the_loop_writes_between_batches_of_a_step_stays(fails_at: int, is_seen: bool) -> None:
    found = []
    for fails in ([], [fails_at]):
        torch.manual_seed(0)
        model = Watched().double()

        def loss(model: Any, x: Any, fails: list[int] = fails) -> Any:
            value = model(x).square().mean()
            if fails and model.at == fails[0]:
                del fails[0]
                raise torch.OutOfMemoryError(MESSAGE)
            return value

        optimizer = torch.optim.SGD(model.linear.parameters(), 0.1)
        step = oomph.Stepper(
            model,
            optimizer,
            loss,
            accumulate=3,
            micro_batch=4,
            say=lambda _: None,
            on_difference="ignore",
        )
        step._recovery.sizes.failed = lambda *_: 4  # type: ignore[method-assign]
        torch.manual_seed(1)
        for number in range(9):
            step(torch.randn(NUM, WIDTH).double())
            model.at += 1
            model.log.append(number)
            with torch.no_grad():
                for p in (model.average.weight, model.marks):
                    (p if is_seen else p.data).add_(0.5)
        found.append({**dict(everything_in(model, "")), "at": model.at, "log": model.log})
        assert not fails
    # The average is used by batches that are run again: they see the newest.
    for each in found:
        del each[".linear.weight"], each[".linear.bias"]
    assert_equal(*found)
    assert found[0]["log"] == list(range(9))
