"""A batch of any kind of tree is put on the GPU as it is."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from oomph.errors import UsageError

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


OTHERWISE = """
import torch, oomph
from torch import nn

class Sees(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.embed, self.lstm = nn.Embedding(64, 64), nn.LSTM(64, 64)

    def forward(self, batch):
        if "nodes" in batch:
            return batch["nodes"].new_zeros(batch["num"], 64).index_add(
                0, batch["which"], batch["nodes"] @ self.embed.weight)
        if "words" in batch:
            return self.lstm(self.embed(batch["words"]))[0]
        return torch.stack([self.conv(image[None]).mean() for image in batch["images"]])

def graphs(n):
    return {"nodes": torch.zeros(7 * n, 64), "which": torch.arange(n).repeat(7), "num": n}

def images(n):
    return {"images": [torch.zeros(3, 64, 64) for _ in range(n)]}

def words(n):
    return {"words": torch.zeros(12, n, dtype=torch.long)}

workload = oomph.Workload(
    model=Sees,
    batch=BATCH,
    loss=lambda model, batch: model(batch).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters),
    batch_size=8,
)
"""


@pytest.mark.parametrize("kind", ["graphs", "images", "words"])
def test_a_function_may_make_its_examples_in_any_layout(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(OTHERWISE.replace("BATCH", kind))
    whole = oomph.predict(f"{path}:workload", gpu="t4")
    half = oomph.predict(f"{path}:workload", gpu="t4", micro_batch=4)
    inputs = {"graphs": 8 * 7 * (64 * 4 + 8), "images": 8 * 3 * 64 * 64 * 4, "words": 8 * 12 * 8}
    assert (whole.variant.micro_batch, whole.variant.accumulation) == (8, 1)
    assert (half.variant.micro_batch, half.variant.accumulation) == (4, 2)
    assert 0 <= whole.by_category["inputs"] - inputs[kind] < 8 * 512  # each is rounded up
    assert half.by_category["inputs"] < whole.by_category["inputs"]


@pytest.mark.parametrize(
    ("batch", "why"),
    [
        ("lambda n: {'words': torch.zeros(12, 5, dtype=torch.long)}", "is no larger"),
        ("{**graphs(8), 'y': torch.zeros(8)}", r"batch\['nodes'\] has 56 rows, and other"),
        ("{'images': [torch.zeros(3, 9, 9) for _ in range(8)]}", "it has a list of 8"),
        (
            "{'words': torch.zeros(8, 12, dtype=torch.long), 'mask': torch.zeros(12, 12)}",
            r"batch\['mask'\] has 12 rows, and other tensors have 8",
        ),
    ],
)
def test_a_batch_whose_examples_are_nowhere_certain_is_refused(
    batch: str, why: str, tmp_path: Path
) -> None:
    path = tmp_path / "train.py"
    path.write_text(OTHERWISE.replace("BATCH", batch))
    with pytest.raises(UsageError, match=why):
        oomph.predict(f"{path}:workload", gpu="t4")
