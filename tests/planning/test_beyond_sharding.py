"""Where nothing fits, FSDP on more GPUs is called useless only if it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from planning.test_offers import EXACT, TRAIN

# 268 MB of weights as in TRAIN, and examples of 2048 x 2048 numbers: 16 MiB for each activation of
# a block, four times that within it.
LONG = TRAIN.replace("torch.zeros(n, 2048)", "torch.zeros(n, 2048, 2048)")
UNSHARED = (*EXACT, "ddp", "hybrid", "fp16", "checkpointing", "sdpa", "channels-last")


def said_of(text: str, folder: Path, memory: str, max_gpus: int, batch_size: int) -> str | None:
    path = folder / "train.py"
    path.write_text(text)
    plans = oomph.plan(
        f"{path}:workload",
        gpu="a100-40gb",
        gpu_memory=memory,
        max_gpus=max_gpus,
        batch_size=batch_size,
        forbid=UNSHARED,
    )
    assert plans.best is None
    assert plans.shortfall is not None
    if plans.shortfall.beyond_sharding is not None:
        assert plans.shortfall.num_gpus is None
    return plans.shortfall.beyond_sharding


def test_one_example_that_is_too_large_needs_more_than_sharding(tmp_path: Path) -> None:
    said = said_of(LONG, tmp_path, "900MiB", max_gpus=4, batch_size=8)
    assert said is not None
    assert said.startswith("With FSDP on any number of GPUs, one example")
    assert "tensor parallelism" in said


def test_a_batch_of_too_few_examples_needs_more_than_sharding(tmp_path: Path) -> None:
    said = said_of(TRAIN, tmp_path, "900MiB", max_gpus=4, batch_size=2)
    assert said is not None
    assert said.startswith("No more than 2 GPUs can share a batch of 2 examples")


@pytest.mark.parametrize("max_gpus", [1, 4])
def test_where_more_gpus_may_do_nothing_else_is_named(max_gpus: int, tmp_path: Path) -> None:
    assert said_of(TRAIN, tmp_path, "950MiB", max_gpus=max_gpus, batch_size=64) is None
