"""Training on an emulated GPU whose memory runs out anywhere is training on one that has enough."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import oomph
from oomph.units import MIB
from training.budget_kinds import IN_PIECES, KINDS
from training.stepper_kinds import NUM, Kind

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
NUM_STEPS = 20
RATE = 0.01
WITHIN = {torch.float64: 1e-12, torch.float32: 1e-5}
AMPLE_BYTES = 512 * MIB
# As a large GPU: whose segments are small beside the tensors.
FINE = "expandable_segments:True,large_segment_size_mb:12"
without_shrinking = settings(
    max_examples=1, deadline=None, derandomize=True, phases=[Phase.generate]
)
Budgets = tuple[int, int]
seeds = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True, scope="module")
def quick() -> Iterator[None]:
    """Each recovery collects garbage, and all that the tests have imported is none."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for make in (KINDS["gpt2"].make, KINDS["lora"].make):
        make(torch.float32)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(num_threads)


@dataclass
class Job:
    """A kind on an emulated GPU, and what it has used of its batches."""

    kind: Kind
    dtype: torch.dtype
    used: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = self.kind.make(self.dtype).cuda()
        trained = [p for p in self.model.parameters() if p.requires_grad]
        # Not Adam: of a gradient that is nothing but rounding it would make a whole step.
        self.optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)

    def loss(self, model: Any, batch: Any) -> Any:
        self.used += batch["number"].tolist()
        return self.kind.loss(model, batch)

    def stepper(self, **options: Any) -> Any:
        return oomph.Stepper(
            self.model,
            self.optimizer,
            self.loss,
            weight=self.kind.weight,
            device="cuda",
            last_resorts=(),
            say=lambda _: self.used.clear(),  # the batch begins again
            on_difference="ignore",  # the check of the first split would use examples, too
            **self.kind.options,
            **options,
        )

    def batches(self) -> list[Any]:
        made = self.kind.batches(self.dtype, NUM_STEPS)
        return [{**each, "number": torch.arange(NUM) + NUM * at} for at, each in enumerate(made)]


@functools.cache
def uninterrupted(name: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The weights after whole batches, by hand, on the CPU."""
    kind = KINDS[name]
    model = kind.make(dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=RATE, momentum=0.9)
    for batch in kind.batches(dtype, NUM_STEPS):
        kind.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {key: value.clone() for key, value in model.state_dict().items()}


@functools.cache
def budgets_for(name: str, dtype: torch.dtype) -> Budgets:
    """From what one example at a time surely fits into to what is too little for all at once."""
    kind = {**KINDS, **IN_PIECES}[name]
    least = _peaks(kind, dtype, 1)[1] + 12 * MIB  # a page more: larger attempts leave holes
    most, _ = _peaks(kind, dtype, NUM)
    assert least < most
    return least, most


def _peaks(kind: Kind, dtype: torch.dtype, micro_batch: int) -> tuple[int, int]:
    """Bytes allocated and reserved, at most, in two steps."""
    with oomph.emulated_gpu(AMPLE_BYTES, allocator=FINE) as gpu:
        job = Job(kind, dtype)
        step = job.stepper(micro_batch=micro_batch)
        for batch in job.batches()[:2]:
            step(batch)
        return gpu.peak_allocated_bytes, gpu.peak_reserved_bytes


class Squeezed(Job):
    """Each step has another budget: somebody else takes and gives back a part of it."""

    def train(self, spare_bytes: int, seed: int) -> list[int]:
        """The sizes that the steps ended with."""
        chance, step, sizes = random.Random(seed), self.stepper(), []  # noqa: S311
        torch.manual_seed(2)
        for batch in self.batches():
            step.forget_sizes()
            self.used.clear()
            others = taken(int(chance.uniform(0, spare_bytes)))
            sizes.append(step(batch).micro_batch)
            del others
            assert self.used == batch["number"].tolist()  # each once, in order
        return sizes


def drawn(least: int, most: int, seed: int) -> int:
    return int(random.Random(seed).uniform(least, most))  # noqa: S311


def taken(size_bytes: int) -> torch.Tensor | None:
    """What somebody else holds of the GPU; None where it has no piece as large."""
    try:
        return torch.empty(size_bytes, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError:
        return None


def assert_close(model: nn.Module, expected: dict[str, torch.Tensor], within: float) -> None:
    for name, value in model.state_dict().items():
        difference = (value.cpu() - expected[name]).abs().max()
        assert difference <= within * max(float(expected[name].abs().max()), 1e-2), name


def assert_unchanged(name: str, dtype: torch.dtype, seed: int) -> None:
    (least, most), expected = budgets_for(name, dtype), uninterrupted(name, dtype)
    budget_bytes = drawn(least, most, seed)
    with oomph.emulated_gpu(budget_bytes, allocator=FINE) as gpu:
        job = Squeezed(KINDS[name], dtype)
        sizes = job.train((budget_bytes - least) // 3, seed)
        assert gpu.num_out_of_memory >= NUM_STEPS  # no budget was enough for the whole
        assert NUM not in sizes
        assert_close(job.model, expected, WITHIN[dtype])


@pytest.mark.parametrize("name", KINDS)
@without_shrinking
@given(seed=seeds)
def test_weights_are_those_of_whole_batches(name: str, seed: int) -> None:
    assert_unchanged(name, torch.float64, seed)


@pytest.mark.parametrize("name", KINDS)
def test_weights_are_those_of_whole_batches_in_fp32(name: str) -> None:
    assert_unchanged(name, torch.float32, seed=2026)


@pytest.mark.parametrize("name", IN_PIECES)
@without_shrinking
@given(seed=seeds)
def test_weights_and_statistics_are_bit_for_bit_those_of_the_same_pieces(
    name: str, seed: int
) -> None:
    kind, (least, most) = IN_PIECES[name], budgets_for(name, torch.float32)
    budget_bytes = drawn(least, most, seed)
    with oomph.emulated_gpu(budget_bytes, allocator=FINE) as gpu:
        job = Squeezed(kind, torch.float32)
        sizes = job.train((budget_bytes - least) // 3, seed)
        assert gpu.num_out_of_memory >= NUM_STEPS
        weights = {key: value.cpu() for key, value in job.model.state_dict().items()}
    with oomph.emulated_gpu(AMPLE_BYTES):
        other = Job(kind, torch.float32)
        step = other.stepper()
        torch.manual_seed(2)
        for batch, size in zip(other.batches(), sizes, strict=True):
            step.forget_sizes()
            step._recovery.sizes._first = size
            step(batch)
        for key, value in other.model.state_dict().items():
            assert torch.equal(weights[key], value.cpu()), key
