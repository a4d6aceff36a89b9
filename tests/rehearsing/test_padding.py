"""An example batch tells how much of it is padding; a made-up one tells nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import oomph
from oomph.rehearsing.padding import note_of_padding

LENGTHS = torch.tensor([[8], [4], [4], [4]])
MASK = (torch.arange(8) < LENGTHS).long()  # 12 of 32 are padding
SHARE = "38% of the example batch is padding"
TRAIN = """
import torch, oomph
mask = (torch.arange(8) < torch.tensor([[8], [4], [4], [4]])).float()
workload = oomph.Workload(
    model=lambda: torch.nn.Linear(8, 8),
    batch={"x": torch.ones(4, 8), "attention_mask": mask},
    loss=lambda model, batch: (model(batch["x"]) * batch["attention_mask"]).mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    batch_size=4,
)
"""


@pytest.mark.parametrize(
    "batch",
    [
        {"attention_mask": MASK},
        {"attention_mask": MASK.bool()},
        {"src_key_padding_mask": MASK == 0},
        ({"attention_mask": MASK}, torch.ones(4)),
        {"attention_mask": torch.ones(4, 8), "decoder_attention_mask": MASK},
    ],
)
def test_the_share_of_padding_is_told(batch: Any) -> None:
    assert (note_of_padding(batch) or "").startswith(SHARE)


@pytest.mark.parametrize(
    "batch",
    [
        {"attention_mask": torch.ones(4, 8)},
        {"attention_mask": torch.ones(4, 1, 8, 8).tril()},  # causal, not padding
        {"input_ids": MASK},
        {"attention_mask": torch.ones(0, 8)},
        (torch.zeros(4, 8), torch.zeros(4)),
        lambda n: {"attention_mask": torch.zeros(n, 8)},
    ],
)
def test_what_is_no_padding_or_made_up_is_not_told(batch: Any) -> None:
    assert note_of_padding(batch) is None


def test_a_plan_and_a_prediction_have_the_advice(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    plans = oomph.plan(f"{path}:workload", gpu="v100-16gb")
    assert any(one.startswith(SHARE) for one in plans.caveats)
    found = oomph.predict(f"{path}:workload", gpu="v100-16gb")
    assert any(one.startswith(SHARE) for one in found.notes)
