"""What a Stepper costs on top of the loop that it stands for, beside accelerate, in the same run.

The loop by hand cuts the batch, divides the loss and steps. A small model shows the cost of the
code itself, one of some milliseconds for each micro-batch shows its share.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomph.rehearsing.child import in_a_child

NUM_PIECES = 4
MICRO_BATCH = 8
ROUNDS = 80


def measure() -> str:
    small, large = in_a_child(lambda: measured(16, 3)), in_a_child(lambda: measured(1024, 1))
    names = list(small)
    by_hand = small[names[0]], large[names[0]]
    width = max(map(len, names))
    title = f"{NUM_PIECES} micro-batches and a step, CPU"
    lines = [
        f"| {title:<{width}} | us each, 16 wide | more | us each, 1024 wide | more |",
        f"|{'-' * (width + 2)}|----------------:|-----:|------------------:|-----:|",
    ]
    for name in names:
        one, other = small[name], large[name]
        lines.append(
            f"| {name:<{width}} | {one:16.0f} | {one - by_hand[0]:4.0f} | {other:18.0f} |"
            f" {other / by_hand[1] - 1:4.1%} |"
        )
    return "\n".join(lines)


@dataclass(frozen=True)
class Job:
    """A model, and a batch of four micro-batches."""

    model: Any
    optimizer: Any
    batch: dict[str, Any]

    def loss(self, model: Any, batch: dict[str, Any]) -> Any:
        import torch

        return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def measured(width: int, times: int) -> dict[str, float]:
    """Microseconds of CPU for each micro-batch, of each way; the best of many rounds."""
    import torch

    torch.set_num_threads(1)
    ways = {name: make(job(width)) for name, make in WAYS.items()}
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(ROUNDS):  # in turns, so that a noisy moment hits all of them
        for name, step in ways.items():
            began_s = time.process_time()
            for _ in range(times):
                step()
            taken_s = time.process_time() - began_s
            best[name] = min(best[name], taken_s / times / NUM_PIECES * 1e6)
    return best


def job(width: int) -> Job:
    import torch
    from torch import nn

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
    num = NUM_PIECES * MICRO_BATCH
    batch = {"x": torch.randn(num, width), "y": torch.randint(0, width, (num,))}
    return Job(model, torch.optim.SGD(model.parameters(), lr=1e-3), batch)


def by_hand(work: Job) -> Callable[[], Any]:
    def step() -> None:
        columns = [tensor.split(MICRO_BATCH) for tensor in work.batch.values()]
        for row in zip(*columns, strict=True):
            piece = dict(zip(work.batch, row, strict=True))
            (work.loss(work.model, piece) / NUM_PIECES).backward()
        work.optimizer.step()
        work.optimizer.zero_grad()

    return step


def by_stepper(work: Job) -> Callable[[], Any]:
    import oomph

    stepper = oomph.Stepper(work.model, work.optimizer, work.loss, micro_batch=MICRO_BATCH)
    return lambda: stepper(work.batch)


def by_measured_step(work: Job) -> Callable[[], Any]:
    """Every step is one of those, one in `noise_meter.EVERY`, that measure the noise scale."""
    import oomph
    from oomph.training import noise_meter

    stepper = oomph.Stepper(work.model, work.optimizer, work.loss, micro_batch=MICRO_BATCH)

    def step() -> None:
        stepper._meter.num_steps = noise_meter.FIRST
        stepper(work.batch)

    return step


def by_unwatched(work: Job) -> Callable[[], Any]:
    import oomph

    stepper = oomph.Stepper(
        work.model,
        work.optimizer,
        work.loss,
        micro_batch=MICRO_BATCH,
        noise_scale="off",
        watch_stability=False,
    )
    return lambda: stepper(work.batch)


def by_micro(work: Job) -> Callable[[], Any]:
    import oomph

    stepper = oomph.Stepper(work.model, work.optimizer, micro_batch=MICRO_BATCH)

    def step() -> None:
        for micro in stepper.micro(work.batch):
            with micro:
                micro.backward(work.loss(work.model, micro.data))

    return step


def by_accelerate(work: Job) -> Callable[[], Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=NUM_PIECES, cpu=True)
    model, optimizer = accelerator.prepare(work.model, work.optimizer)

    def step() -> None:
        columns = [tensor.split(MICRO_BATCH) for tensor in work.batch.values()]
        for row in zip(*columns, strict=True):
            with accelerator.accumulate(model):
                loss = work.loss(model, dict(zip(work.batch, row, strict=True)))
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()

    return step


WAYS: dict[str, Callable[[Job], Callable[[], Any]]] = {
    "the loop by hand": by_hand,
    "oomph.Stepper, step(batch)": by_stepper,
    "the same, noise scale and watch off": by_unwatched,
    "the same, noise scale measured (1 step in 50)": by_measured_step,
    "oomph.Stepper, step.micro(batch)": by_micro,
    "accelerate, accumulate()": by_accelerate,
}
