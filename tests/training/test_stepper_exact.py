"""Training with out-of-memory errors at random moments is training without them."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import oomph
from oomph.training import noise_meter
from training.stepper_kinds import IN_PIECES, KINDS, Kind, OutOfMemoryAt

pytestmark = pytest.mark.filterwarnings("ignore")
NUM_STEPS = 20
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5}
MOST_FAILURES = 3  # of one step: 12 at a time, 6, 3, and then 1
# Shrinking trains for minutes, and a failure is as clear without.
without_shrinking = settings(
    max_examples=2, deadline=None, derandomize=True, phases=[Phase.generate]
)

seeds = st.integers(0, 2**32 - 1)


def failures(seed: int) -> list[list[float]]:
    """Where it strikes, as a share of the ops of a step, attempt by attempt; for every step."""
    chance = random.Random(seed)  # noqa: S311
    return [
        [chance.uniform(0.02, 0.98) for _ in range(chance.randint(0, MOST_FAILURES))]
        for _ in range(NUM_STEPS)
    ]


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """Not Adam: of a gradient that is nothing but rounding it would make a whole step."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.SGD(trained, lr=0.05, momentum=0.9)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Each recovery collects garbage, and all that the tests have imported is none."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other longer than such small models take
    with OutOfMemoryAt():  # which imports a good deal, as the models do
        KINDS["gpt2"].make(torch.float32)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(num_threads)


@functools.cache
def uninterrupted(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights after whole batches, by hand."""
    kind = KINDS[name]
    model = kind.make(dtype)
    optimizer = make_optimizer(model)
    torch.manual_seed(2)
    for batch in kind.batches(dtype, NUM_STEPS):
        kind.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


class Run:
    """Twenty steps with errors, and what they used of each batch."""

    def __init__(self, kind: Kind, dtype: torch.dtype, *, is_measured: bool = False) -> None:
        self.kind, self.dtype, self.is_measured = kind, dtype, is_measured
        self.model = kind.make(dtype)
        self.optimizer = make_optimizer(self.model)
        self.used: list[int] = []
        self.injector = OutOfMemoryAt(self.used.clear)

    def loss(self, model: Any, batch: Any) -> Any:
        """With a column of numbers beside the batch, which tells what was used."""
        data, numbers = batch
        self.used += numbers.tolist()
        return self.kind.loss(model, data)

    def stepper(self, **options: Any) -> Any:
        weight = self.kind.weight
        stepper = oomph.Stepper(
            self.model,
            self.optimizer,
            self.loss,
            weight=(lambda b: weight(b[0])) if callable(weight) else self._named(weight),
            last_resorts=(),
            on_difference="ignore",  # what is used, and where errors strike, is noted
            # An error in measuring the noise is none of the step's: nothing is run again.
            noise_scale="free" if self.is_measured else "off",
            say=lambda _: None,
            **self.kind.options,
            **options,
        )
        update = stepper._attempts.update

        def updated() -> Any:  # what fails in it is tested elsewhere
            self.injector.disarm()
            return update()

        updated.finish, updated.scale = update.finish, update.scale  # type: ignore[attr-defined]
        stepper._attempts.update = updated  # type: ignore[assignment]
        return stepper

    def _named(self, weight: str) -> Any:
        if weight in ("mean", "sum"):
            return weight
        first = int(weight == "next-tokens")
        return lambda b: (b[0]["labels"][:, first:] != -100).sum()

    def train(self, points: list[list[float]]) -> list[int]:
        """The sizes that each step ended with."""
        stepper, num_ops = self.stepper(), self.num_ops
        sizes = []
        torch.manual_seed(2)
        with self.injector:
            for batch, shares in zip(self.batches(), points, strict=True):
                self.used.clear()
                stepper.forget_sizes()
                self.injector.arm([int(share * num_ops) + 1 for share in shares])
                sizes.append(stepper(batch).micro_batch)
                if not self.is_measured:
                    assert self.used == batch[1].tolist()  # each once, in order
        return sizes

    def batches(self) -> list[Any]:
        batches = self.kind.batches(self.dtype, NUM_STEPS)
        return [(each, torch.arange(12) + 100 * at) for at, each in enumerate(batches)]

    @property
    def num_ops(self) -> int:
        """Of forward and backward of a whole batch."""
        twin = Run(self.kind, self.dtype)
        with twin.injector:
            twin.loss(twin.model, twin.batches()[0]).backward()
        return twin.injector.num_ops


def assert_close(model: nn.Module, expected: dict[str, torch.Tensor], within: float) -> None:
    for name, value in model.state_dict().items():
        difference = (value - expected[name]).abs().max()
        assert difference <= within * max(float(expected[name].abs().max()), 1e-2), name


def assert_unchanged(
    name: str, dtype: torch.dtype, seed: int, *, is_measured: bool = False
) -> None:
    run = Run(KINDS[name], dtype, is_measured=is_measured)
    run.train(failures(seed))
    assert run.injector.num_raised > 0
    assert_close(run.model, uninterrupted(name, dtype), WITHIN[dtype])


@pytest.mark.parametrize("name", KINDS)
@without_shrinking
@given(seed=seeds)
def test_weights_are_those_of_whole_batches(name: str, seed: int) -> None:
    assert_unchanged(name, torch.float64, seed)


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_whole_batches_in_fp32(name: str) -> None:
    assert_unchanged(name, torch.float32, seed=2026)


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_the_same_if_memory_runs_out_while_the_noise_is_measured(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(noise_meter, "EVERY", 1)
    monkeypatch.setattr(noise_meter, "FIRST", 0)
    assert_unchanged(name, torch.float64, seed=2026, is_measured=True)


def in_given_pieces(kind: Kind, sizes: list[int], dtype: torch.dtype) -> Run:
    """Without errors, in these pieces."""
    run = Run(kind, dtype)
    stepper = run.stepper()
    torch.manual_seed(2)
    for batch, size in zip(run.batches(), sizes, strict=True):
        stepper._recovery.sizes._first = size
        stepper(batch)
    return run


@pytest.mark.parametrize("name", [*IN_PIECES, "gpt2", "lstm"])
@without_shrinking
@given(seed=seeds)
def test_weights_and_statistics_are_bit_for_bit_those_of_the_same_pieces(
    name: str, seed: int
) -> None:
    kind = {**KINDS, **IN_PIECES}[name]
    run = Run(kind, torch.float32)
    sizes = run.train(failures(seed))
    other = in_given_pieces(kind, sizes, torch.float32)
    for key, value in run.model.state_dict().items():
        assert torch.equal(value, other.model.state_dict()[key]), key
