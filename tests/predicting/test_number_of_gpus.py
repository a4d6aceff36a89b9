"""What FSDP needs on a number of GPUs follows from fewer and from more: equal to a rehearsal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent

# A rehearsal patches torch, so that it has a process of its own.
COMPARED = """
import json
import numpy as np
import torch
from torch import nn
from oomph.planning.rehearsals import _footprint
from oomph.predicting.number_of_gpus import between
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.rehearse import prepare
from oomph.rehearsing.traces import Rehearser

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    def forward(self, x):
        return x + self.down(self.up(x).relu())

def workload(width):
    return Workload(
        model=lambda: nn.Sequential(*(Block(width) for _ in range(3))),
        batch=lambda n: torch.zeros(n, width),
        loss=lambda model, x: model(x).float().square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
        batch_size=64,
    )

prepare((8, 0))
for width in (64, 48, 100):
    rehearser = Rehearser(workload(width), (8, 0), None, set())
    for accumulation in (1, 2):
        few, itself, many = (
            _footprint(rehearser, Variant(
                micro_batch=2, accumulation=accumulation, precision="bf16", sharding="fsdp",
                num_gpus=number,
            ))
            for number in (2, 8, 32)
        )
        found = between(few, many, 2, 8, 32)
        print(json.dumps({
            "width": width,
            "found": found is not None,
            "is_equal": found is not None and bool(
                np.array_equal(found.fixed_bytes, itself.fixed_bytes)
                and np.array_equal(found.grown_bytes, itself.grown_bytes)
                and np.array_equal(found.event, itself.event)
                and [k.name for k in found.kernels] == [k.name for k in itself.kernels]
            ),
            "moved": [
                [one.name, one.fixed_moved_bytes, other.fixed_moved_bytes]
                for one, other in zip(found.kernels, itself.kernels)
            ] if found else [],
            "turned": between(many, few, 32, 8, 2) is None,
            "no_divisor": between(few, many, 2, 12, 32) is None,
        }))
"""


@pytest.fixture(scope="module")
def compared() -> list[dict[str, object]]:
    environment = {**os.environ, "PYTHONPATH": str(TESTS.parent / "src"), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", COMPARED]
    found = subprocess.run(run, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 0, found.stderr[-2000:]
    return [json.loads(line) for line in found.stdout.splitlines()]


def test_a_number_between_is_what_its_own_rehearsal_says(compared: list[dict[str, object]]) -> None:
    even = [one for one in compared if one["width"] == 64]
    assert len(even) == 2
    assert all(one["found"] and one["is_equal"] for one in even)
    for one in even:
        assert isinstance(one["moved"], list)
        for name, found, itself in one["moved"]:
            assert abs(found - itself) <= 1, name


def test_where_shards_are_padded_it_is_rehearsed(compared: list[dict[str, object]]) -> None:
    padded = [one for one in compared if one["width"] == 100]  # 100 rows on 32 GPUs are 128
    assert not any(one["found"] for one in padded)


def test_what_it_says_is_never_another_than_the_rehearsal(
    compared: list[dict[str, object]],
) -> None:
    assert all(one["is_equal"] for one in compared if one["found"])


def test_only_a_number_that_lies_between_is_told(compared: list[dict[str, object]]) -> None:
    assert all(one["turned"] and one["no_divisor"] for one in compared)
