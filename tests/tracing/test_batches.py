"""A batch of any kind of tree is put on the GPU as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph

TRAIN = """
import torch, oomph, collections
from dataclasses import dataclass
from typing import NamedTuple

@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor
    names: tuple = ("a",)

@dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    y: torch.Tensor

class Plain:
    def __init__(self, x, y):
        self.x, self.y = x, y

class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor

class Encoding(collections.UserDict):
    def __init__(self, x, y):
        super().__init__({"x": x, "y": y})

    def __getattr__(self, name):
        return self.data[name]

def loss(model, batch):
    return torch.nn.functional.mse_loss(model(batch.x), batch.y)

workload = oomph.Workload(
    model=lambda: torch.nn.Linear(1024, 1024),
    batch=lambda n: KIND(torch.zeros(n, 1024), torch.zeros(n, 1024)),
    loss=loss,
    optimizer=lambda parameters: torch.optim.SGD(parameters),
    batch_size=1024,
)
"""


def predicted_bytes(kind: str, directory: Path) -> int:
    path = directory / "train.py"
    path.write_text(TRAIN.replace("KIND", kind))
    return oomph.predict(f"{path}:workload", gpu="t4").allocated_bytes


@pytest.mark.parametrize("kind", ["Frozen", "Slotted", "Plain", "Encoding"])
def test_any_kind_of_batch_takes_what_a_tuple_of_tensors_takes(kind: str, tmp_path: Path) -> None:
    assert predicted_bytes(kind, tmp_path) == predicted_bytes("Named", tmp_path)
