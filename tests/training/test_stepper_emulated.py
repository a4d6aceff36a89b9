"""Steps on an emulated GPU, whose budget decides where it runs out of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from planning.plans import plan_of
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.errors import OomphError
from oomph.records.plan import MicroBatchLimits
from oomph.training.sizes import divisors
from oomph.verbs.planned import trick_names

pytestmark = pytest.mark.skipif(
    "emulated_gpu" not in oomph.__all__, reason="there is no emulated GPU yet"
)
WIDTH, NUM = 128, 32


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.second(F.gelu(self.first(x)))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several wait for each other longer than such small models take."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make() -> nn.Module:
    torch.manual_seed(0)
    blocks = nn.Sequential(*[Block() for _ in range(4)])
    return nn.Sequential(blocks, nn.Linear(WIDTH, 10))


def loss(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    return F.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def batches(count: int, length: int = 32) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [
        {"x": torch.randn(NUM, length, WIDTH), "y": torch.randint(0, 10, (NUM, length))}
        for _ in range(count)
    ]


def on_cpu(data: list[Any]) -> dict[str, torch.Tensor]:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in data:
        loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.clone() for name, value in model.state_dict().items()}


def stepper(**options: Any) -> tuple[nn.Module, Any]:
    model = make().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    quiet: dict[str, Any] = {"say": lambda _: None, "device": "cuda"}
    return model, oomph.Stepper(model, optimizer, loss, **quiet, **options)


def assert_close(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    for name, value in model.state_dict().items():
        difference = (value.cpu() - expected[name]).abs().max()
        assert difference <= 1e-5 * expected[name].abs().max(), name


@pytest.mark.parametrize("budget", ["32MiB", "40MiB", "64MiB"])
def test_weights_are_those_of_a_cpu_with_memory_enough(budget: str) -> None:
    data = batches(3)
    with oomph.emulated_gpu(budget):
        model, step = stepper()
        results = [step(batch) for batch in data]
        assert_close(model, on_cpu(data))
    assert results[-1].num_ooms == 0
    assert all(NUM % result.micro_batch == 0 for result in results)


def test_less_memory_gives_smaller_pieces() -> None:
    sizes = []
    for budget in ("32MiB", "40MiB", "64MiB"):
        with oomph.emulated_gpu(budget):
            _, step = stepper()
            sizes.append(step(batches(1)[0]).micro_batch)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == 3
    assert sizes[-1] == NUM


def test_longer_sequences_are_cut_finer_and_short_ones_stay_whole() -> None:
    with oomph.emulated_gpu("48MiB"):
        _, step = stepper()
        short = step(batches(1, 4)[0]).micro_batch
        long = step(batches(1, 64)[0]).micro_batch
        again = step(batches(1, 4)[0]).micro_batch
    assert short == again == NUM
    assert long < short


def test_a_careful_plan_grows_to_what_fits_and_longer_examples_are_cut_before_they_fail() -> None:
    plan = plan_of(micro_batch=2, accumulation=16)
    with oomph.emulated_gpu("96MiB") as gpu:
        model, step = stepper(plan=plan)
        data = [*batches(3, 32), *batches(3, 128)]
        sizes = [step(batch).micro_batch for batch in data]
        assert gpu.num_out_of_memory == 0
        assert_close(model, on_cpu(data))
    assert sizes[0] == 2
    assert sizes[1] == sizes[2] == NUM
    assert sizes[3] <= sizes[4] < NUM
    assert sizes[5] >= 4


def test_a_size_that_was_asked_for_is_never_exceeded() -> None:
    with oomph.emulated_gpu("96MiB"):
        _, step = stepper(micro_batch=2)
        assert [step(batch).micro_batch for batch in batches(3)] == [2, 2, 2]


def test_a_model_that_never_fits_ends_with_its_state_as_it_was() -> None:
    with oomph.emulated_gpu("32MiB"):
        model, step = stepper(last_resorts=("checkpointing",))
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(OomphError, match="does not fit"):
            step(batches(1, 2048)[0])
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.slow
def test_two_hundred_recoveries_leave_no_memory_behind() -> None:
    with oomph.emulated_gpu("40MiB") as gpu:
        _, step = stepper()
        (batch,) = [{"x": b["x"][:8], "y": b["y"][:8]} for b in batches(1, 160)]

        def recover() -> None:
            step.forget_sizes()
            assert step(batch).num_ooms >= 1

        for _ in range(3):
            recover()
        assert not step.stability_warnings  # reads the losses that wait, of 16 steps at most
        gc.collect()
        torch.cuda.empty_cache()
        before, reserved = gpu.allocated_bytes, gpu.reserved_bytes
        for _ in range(200):
            recover()
        assert not step.stability_warnings  # reads the losses that wait, of 16 steps at most
        gc.collect()
        torch.cuda.empty_cache()
        assert gpu.allocated_bytes <= before
        assert gpu.reserved_bytes <= reserved


# ---- with a plan ---------------------------------------------------------------------------------


def workload(length: int) -> Any:
    """As `batches` makes them, of examples of a length."""
    return oomph.Workload(
        model=make,
        batch=lambda num: {
            "x": torch.randn(num, length, WIDTH),
            "y": torch.randint(0, 10, (num, length)),
        },
        loss=loss,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        batch_size=NUM,
    )


def planned(length: int, memory: str) -> Any:
    """By accumulation alone."""
    others = [name for name in trick_names() if name != "accumulation"]
    best = oomph.plan(workload(length), gpu="emulated", gpu_memory=memory, forbid=others).best
    assert best is not None
    return best


@pytest.mark.parametrize("memory", ["100MiB", "170MiB"])
def test_with_a_plan_nothing_runs_out_of_memory_and_the_next_size_would(memory: str) -> None:
    plan = planned(256, memory)
    assert plan.reach is not None
    with oomph.emulated_gpu(memory) as gpu:
        _, step = stepper(plan=plan)
        sizes = [step(batch).micro_batch for batch in batches(3, 256)]
        assert gpu.num_out_of_memory == 0
    larger = min(size for size in divisors(NUM) if size > sizes[-1])
    with oomph.emulated_gpu(memory) as gpu:
        _, step = stepper(micro_batch=larger)
        step(batches(1, 256)[0])
        step(batches(1, 256)[0])
        assert gpu.num_out_of_memory > 0


def test_shorter_examples_than_were_planned_with_begin_with_more_at_a_time() -> None:
    plan = planned(256, "100MiB")
    with oomph.emulated_gpu("100MiB") as gpu:
        _, step = stepper(plan=plan)
        first = {length: step(batches(1, length)[0]).micro_batch for length in (128, 64, 256)}
        assert gpu.num_out_of_memory == 0
    assert first[256] < first[128] < first[64]


def test_batch_norm_is_shown_no_other_size_than_was_planned() -> None:
    plan = replace(
        plan_of(micro_batch=2, accumulation=16),
        reach=MicroBatchLimits(fit=30.0, too_many=40.0, elements=32 * WIDTH + 32),
    )
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(32), nn.Linear(WIDTH, 10))
    with oomph.emulated_gpu("96MiB"):
        model = model.cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = oomph.Stepper(model, optimizer, loss, plan=plan, device="cuda")
        assert [step(batch).micro_batch for batch in batches(2)] == [2, 2]
