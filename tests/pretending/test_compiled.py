"""What is compiled is rehearsed as it was written, and that is told."""

from __future__ import annotations

from pathlib import Path

import pytest

import oomph
from oomph.pretending.branches import COMPILE

TRAIN = """
import torch, oomph, warnings

warnings.simplefilter("ignore")  # what torch's compiler imports is deprecated by torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return self.down(torch.nn.functional.gelu(self.up(x)))

def in_place():
    model = Model()
    model.compile()
    return model

def loss(model, batch):
    return model(batch).square().mean()

workload = oomph.Workload(
    model=MODEL,
    batch=lambda n: torch.zeros(n, 256),
    loss=LOSS,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=4096,
)
"""


def predicted(model: str, loss: str, directory: Path) -> oomph.Prediction:
    path = directory / "train.py"
    path.write_text(TRAIN.replace("MODEL", model).replace("LOSS", loss))
    return oomph.predict(f"{path}:workload", gpu="t4")


@pytest.mark.parametrize(
    ("model", "loss"),
    [
        ("lambda: torch.compile(Model(), mode='max-autotune')", "loss"),
        ("in_place", "loss"),
        ("Model", "torch.compile(loss)"),
        ("torch.compile(Model())", "loss"),
    ],
    ids=["when it is built", "in place", "its loss", "before"],
)
def test_what_is_compiled_takes_what_it_takes_as_it_was_written(
    model: str, loss: str, tmp_path: Path
) -> None:
    plain = predicted("Model", "loss", tmp_path)
    assert predicted(model, loss, tmp_path).allocated_bytes == plain.allocated_bytes


def test_it_is_told(tmp_path: Path) -> None:
    assert COMPILE in predicted("lambda: torch.compile(Model())", "loss", tmp_path).notes
    assert COMPILE in predicted("torch.compile(Model())", "loss", tmp_path).notes
    assert COMPILE not in predicted("Model", "loss", tmp_path).notes


def test_plans_tell_what_a_rehearsal_assumed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    compiled = "lambda: torch.compile(Model())"
    path.write_text(TRAIN.replace("MODEL", compiled).replace("LOSS", "loss"))
    assert COMPILE in oomph.plan(f"{path}:workload", gpu="t4").caveats
