"""Runs on real data with batch sizes and learning rates that are right, and that are not.

The thresholds of the watch were chosen by some of these.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.stability.watch import Watch

BASE, SMALLER, NUM_EXAMPLES = 256, (64, 16, 4), 12_000
RATES = (0.1, 0.3, 1.0)
Optimizer = Literal["sgd", "momentum", "adam"]


@dataclass(frozen=True)
class Task:
    name: str
    x: Tensor
    y: Tensor
    num_classes: int


@dataclass(frozen=True)
class Cell:
    """One run and how it ended."""

    task: str
    optimizer: Optimizer
    batch_size: int
    rule: Literal["base", "kept", "by rule"]
    start: float
    end: float  # of the loss of all examples
    base_end: float
    warned: bool  # of oscillation, or of values that are not finite

    @property
    def lost_ratio(self) -> float:
        """Return which part of what the base run learns this one did not."""
        if not math.isfinite(self.end):
            return math.inf
        return (self.end - self.base_end) / (self.start - self.base_end)

    @property
    def is_broken(self) -> bool:
        """Return whether a smaller batch with SGD's old learning rate learnt far less."""
        return self.rule == "kept" and self.optimizer != "adam" and self.lost_ratio > 1 / 3

    @property
    def is_healthy(self) -> bool:
        return self.lost_ratio < 0.1


def tasks() -> Iterator[Task]:
    """Digits, digits with wrong labels, and tumours with wrong labels, from scikit-learn."""
    from sklearn import datasets

    digits, tumours = datasets.load_digits(), datasets.load_breast_cancer()
    for name, data, wrong in (
        ("digits", digits, 0.0),
        ("noisy digits", digits, 0.4),
        ("noisy tumours", tumours, 0.2),
    ):
        x = torch.tensor(data.data, dtype=torch.float32)
        x = (x - x.mean(0)) / (x.std(0) + 1e-3)
        y, num = torch.tensor(data.target), int(data.target.max()) + 1
        generator = torch.Generator().manual_seed(5)
        is_wrong = torch.rand(len(y), generator=generator) < wrong
        y[is_wrong] = torch.randint(0, num, (int(is_wrong.sum()),), generator=generator)
        yield Task(name, x, y, num)


def trained(
    task: Task, optimizer: Optimizer, rate: float, size: int, *, is_scaled: bool
) -> tuple[float, float, bool]:
    """Return the loss of all examples before and after, and whether the watch has warned."""
    torch.manual_seed(11)
    model = nn.Sequential(
        nn.Linear(task.x.shape[1], 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()
    ).append(nn.Linear(64, task.num_classes))
    made: Any = (
        torch.optim.Adam(model.parameters(), lr=rate)
        if optimizer == "adam"
        else torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9 * (optimizer == "momentum"))
    )
    if is_scaled:
        oomph.scale_learning_rate(made, BASE, size)
    watch, told = Watch(), set()
    start = whole_loss(model, task)
    for _ in range(NUM_EXAMPLES // size):
        rows = torch.randint(len(task.x), (size,))
        loss = F.cross_entropy(model(task.x[rows]), task.y[rows])
        made.zero_grad()
        torch.autograd.backward(loss)
        made.step()
        value = float(loss.detach())
        told |= {each.kind for each in watch.step(value)}
        if not math.isfinite(value):
            return start, math.inf, True
    return start, whole_loss(model, task), "oscillation" in told


def whole_loss(model: nn.Module, task: Task) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model(task.x), task.y))


def cells() -> Iterator[Cell]:
    for task in tasks():
        for optimizer in ("sgd", "momentum", "adam"):
            factor = {"sgd": 1.0, "momentum": 0.1, "adam": 0.02}[optimizer]
            rates = [rate * factor for rate in RATES]
            tried = {rate: trained(task, optimizer, rate, BASE, is_scaled=False) for rate in rates}
            rate = min(tried, key=lambda rate: tried[rate][1])
            start, base_end, warned = tried[rate]
            known: Any = {"task": task.name, "optimizer": optimizer, "base_end": base_end}
            yield Cell(
                **known, batch_size=BASE, rule="base", start=start, end=base_end, warned=warned
            )
            for size in SMALLER:
                for rule in ("kept", "by rule"):
                    start, end, warned = trained(
                        task, optimizer, rate, size, is_scaled=rule == "by rule"
                    )
                    yield Cell(
                        **known, batch_size=size, rule=rule, start=start, end=end, warned=warned
                    )
