"""A small model whose noise scale is known from all of its examples, and what a Stepper measures.

torchrun --nproc-per-node N noise_scales.py FOLDER: trains in DistributedDataParallel, writes what
was measured as FOLDER/RANK.json. By itself it asserts nothing.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F  # noqa: N812 - as torch names it
from torch.nn.parallel import DistributedDataParallel

import oomph
from oomph.stability.noise import NoiseEstimate, Sample
from oomph.training import noise_meter

NUM_EXAMPLES, BATCH = 512, 32
Pairs = tuple[Tensor, Tensor]


def examples() -> Pairs:
    torch.manual_seed(3)
    x = torch.randn(NUM_EXAMPLES, 12)
    noisy = x @ torch.randn(12, 4) + 2 * torch.randn(NUM_EXAMPLES, 4)
    return x, noisy.argmax(1)


def model_of() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4))


def loss_of(model: Any, batch: Pairs) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def direct() -> float:
    """The noise scale from the gradient of every single example."""
    model, (x, y) = model_of(), examples()
    parameters = list(model.parameters())
    gradients = []
    for n in range(NUM_EXAMPLES):
        found = torch.autograd.grad(loss_of(model, (x[n : n + 1], y[n : n + 1])), parameters)
        gradients.append(torch.cat([each.flatten() for each in found]).double())
    every = torch.stack(gradients)
    mean = every.mean(0)
    return float((every - mean).square().sum(1).mean() / mean.square().sum())


class Kept(NoiseEstimate):
    """Keeps all samples, beyond the horizon of the running average."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[float, float]] = []

    def add(self, sample: Sample) -> None:
        super().add(sample)
        if sample.noise_and_signal is not None:
            self.pairs.append(sample.noise_and_signal)


def measured(step: oomph.Stepper) -> float:
    """The ratio of the means of all samples."""
    assert step.noise_scale is not None
    kept = step._meter._estimate
    assert isinstance(kept, Kept)
    assert len(kept.pairs) > 50
    return sum(noise for noise, _ in kept.pairs) / sum(signal for _, signal in kept.pairs)


def train(step: oomph.Stepper, num_steps: int, num: int = BATCH, seed: int = 0) -> None:
    """With a learning rate of 0 the noise scale stays what it is."""
    if not isinstance(step._meter._estimate, Kept):
        step._meter._estimate = Kept()
    x, y = examples()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        drawn = torch.randint(0, NUM_EXAMPLES, (num,), generator=generator)
        step((x[drawn], y[drawn]))


def measure_every_step() -> None:
    noise_meter.EVERY = noise_meter.PROBE_EVERY = 1
    noise_meter.FIRST = 0


def main(folder: str) -> None:
    distributed.init_process_group("gloo")
    rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
    measure_every_step()
    found: dict[str, Any] = {}
    for name, micro_batch in (("whole", None), ("split", 4)):
        model = DistributedDataParallel(model_of())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        step = oomph.Stepper(model, optimizer, loss_of, weight="mean", micro_batch=micro_batch)
        train(step, 300, BATCH // num_ranks, seed=rank)
        found[name] = measured(step)
    # One rank measures and the other does not: all must raise, and none may wait.
    mode: noise_meter.NoiseScaleMode = "free" if rank == 0 else "off"
    model = DistributedDataParallel(model_of())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    step = oomph.Stepper(model, optimizer, loss_of, weight="mean", noise_scale=mode)
    try:
        train(step, 1, 8)
        found["apart"] = "trained"
    except oomph.OomphError as error:
        found["apart"] = str(error)
    (Path(folder) / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    main(sys.argv[1])
