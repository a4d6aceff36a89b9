"""The check of checkpointing: what is recomputed is what was computed, or which block is not."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from oomph.records.check import CheckpointingCheck
from oomph.records.workload import Workload
from oomph.stability.examples import take
from oomph.stability.recomputation import check_checkpointing
from stability.accumulations import CLASSES, WIDTH, cross_entropy, rows

Change = Callable[["Block", torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """Two layers, with something in between that recomputation may get wrong."""

    def __init__(self, change: Change, *parts: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.parts = nn.Sequential(*parts)
        self.register_buffer("count", torch.zeros(()))
        self.change = change
        self.seen: list[torch.Tensor] = []

    count: torch.Tensor

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.last(self.change(self, self.parts(self.first(x))).tanh())


class InPlace(Block):
    """Changes what it is given."""

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x.mul_(2))


class Stack(nn.Module):
    """Blocks of which the second may be of another kind."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(blocks), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def plain(_: Block, x: torch.Tensor) -> torch.Tensor:
    return x


def check(model: Callable[[], nn.Module]) -> CheckpointingCheck:
    workload = Workload(
        model=model,
        batch=rows,
        loss=cross_entropy(),
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        batch_size=32,
    )
    return check_checkpointing(workload, take(rows, 8))


def torch_noise(_: Block, x: torch.Tensor) -> torch.Tensor:
    return x + torch.randn_like(x)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        pytest.param(plain, [], id="nothing"),
        pytest.param(plain, [nn.Dropout], id="dropout"),
        pytest.param(plain, [lambda: nn.BatchNorm1d(WIDTH)], id="BatchNorm"),
        pytest.param(plain, [nn.Dropout, lambda: nn.BatchNorm1d(WIDTH)], id="both"),
        pytest.param(torch_noise, [], id="noise of torch"),
        pytest.param(lambda _, x: torch.rrelu(x, training=True), [], id="random slopes"),
    ],
)
def test_what_torch_draws_and_normalises_is_the_same_once_more(
    change: Change, parts: list[Callable[[], nn.Module]]
) -> None:
    found = check(lambda: Stack(*(Block(change, *(make() for make in parts)) for _ in range(3))))
    assert found.verdict == "passes", found
    assert found.num_blocks == 3
    assert found.gradient_error_ratio == 0


def python_noise(_: Block, x: torch.Tensor) -> torch.Tensor:
    return x * random.random()  # noqa: S311


def numpy_noise(_: Block, x: torch.Tensor) -> torch.Tensor:
    return x * float(np.random.rand())


def counts_in_a_buffer(block: Block, x: torch.Tensor) -> torch.Tensor:
    block.count += 1
    return x


def remembers(block: Block, x: torch.Tensor) -> torch.Tensor:
    """Adds what it saw in the last call of this step."""
    before = block.seen.pop() if block.seen else torch.zeros_like(x)
    if not block.seen and before.any():
        return x + before
    block.seen.append(x.detach())
    return x


@pytest.mark.parametrize(
    ("change", "said", "module"),
    [
        pytest.param(python_noise, "random numbers of Python or numpy", "blocks.1", id="Python"),
        pytest.param(numpy_noise, "random numbers of Python or numpy", "blocks.1", id="numpy"),
        pytest.param(counts_in_a_buffer, "count is updated a second time", "blocks.1", id="buffer"),
        pytest.param(remembers, "depends on state", "blocks.1", id="state"),
    ],
)
def test_the_block_that_does_not_give_the_same_is_named(
    change: Change, said: str, module: str
) -> None:
    found = check(lambda: Stack(Block(plain), Block(change), Block(plain)))
    assert found.verdict == "fails", found
    assert found.broken_blocks == ("blocks.1",)
    assert found.findings[0].module == module
    assert said in found.findings[0].what
    assert found.findings[0].do


def test_a_block_that_changes_its_input_in_place_is_named() -> None:
    found = check(lambda: Stack(Block(plain), InPlace(plain), InPlace(plain)))
    assert found.verdict == "fails"
    assert set(found.broken_blocks) <= {"blocks.1", "blocks.2"}
    assert found.broken_blocks


def test_a_model_without_blocks_has_nothing_to_check() -> None:
    found = check(lambda: nn.Linear(WIDTH, CLASSES))
    assert (found.verdict, found.num_blocks) == ("skipped", 0)


def test_a_model_that_no_seed_reaches_is_uncertain_and_not_blamed_on_recomputation() -> None:
    unseeded = np.random.default_rng()

    def noise(_: Block, x: torch.Tensor) -> torch.Tensor:
        return x * float(unseeded.random())

    found = check(lambda: Stack(Block(noise), Block(noise)))
    assert found.verdict == "uncertain"
    assert "even without recomputation" in found.conclusion
