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


SPEECH = """
import torch, oomph
from torch.nn.utils import rnn

class Listener(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.GRU(80, 256, batch_first=True)

    def forward(self, x, lengths):
        packed = rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return rnn.pad_packed_sequence(self.layers(packed)[0], batch_first=True)[0]

workload = oomph.Workload(
    model=Listener,
    batch=lambda n: {"x": torch.zeros(n, 400, 80), "lengths": torch.full((n,), 300)},
    loss=lambda model, batch: model(batch["x"], LENGTHS).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters),
    batch_size=32,
)
"""


@pytest.mark.parametrize(
    "lengths",
    [
        "batch['lengths'].cpu()",
        "batch['lengths'].to('cpu')",
        "torch.tensor(batch['lengths'].tolist())",
    ],
)
def test_whole_numbers_that_come_back_from_the_gpu_are_those_that_went(
    lengths: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(SPEECH.replace("LENGTHS", lengths))
    there = oomph.predict(f"{path}:workload", gpu="t4").allocated_bytes
    path.write_text(SPEECH.replace("LENGTHS", "torch.full((len(batch['x']),), 300)"))
    assert there == oomph.predict(f"{path}:workload", gpu="t4").allocated_bytes
