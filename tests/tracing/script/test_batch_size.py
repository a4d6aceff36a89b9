"""A script that makes its batches on the GPU itself can be given another batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomph.errors import OomphError
from oomph.predicting.timeline import find_peak
from tracing.script.rehearsed import rehearsed

TRAIN = """
import torch
from torch import nn

B = 8
table = torch.randn(8, 3, device="cuda")  # of as many rows, and no batch
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 3)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(4):
    x = MAKES_X
    y = MAKES_Y
    loss = nn.functional.cross_entropy(model(x) + table.sum(), y[:, 0])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
WAYS = {
    "a size as numbers": (
        'torch.randn(B, 16, device="cuda")',
        'torch.randint(3, (B, 1), device="cuda")',
    ),
    "a size as one": (
        'torch.rand((B, 16), device="cuda")',
        'torch.zeros([B, 1], device="cuda").long()',
    ),
    "a size by name": (
        'torch.zeros(size=(B, 16), device="cuda")',
        'torch.randint(0, 3, size=(B, 1), device="cuda")',
    ),
    "a size like another": (
        "torch.ones(B, 16, device=0)",
        "torch.zeros_like(x[:, :1]).long()",
    ),
}


@pytest.mark.parametrize("way", list(WAYS))
def test_what_the_loop_makes_on_the_gpu_has_the_batch_asked_for(tmp_path: Path, way: str) -> None:
    makes_x, makes_y = WAYS[way]
    text = TRAIN.replace("MAKES_X", makes_x).replace("MAKES_Y", makes_y)
    _, as_it_is = rehearsed(tmp_path, text)
    assert as_it_is.micro_batch == 8
    trace, seen = rehearsed(tmp_path, text, micro_batch=3, first=as_it_is)
    assert seen.micro_batch == 3
    written, _ = rehearsed(tmp_path, text.replace("B = 8", "B = 3"))
    assert find_peak(trace).live_bytes == find_peak(written).live_bytes


def test_a_batch_that_is_made_once_and_met_by_another_of_its_size_is_named(tmp_path: Path) -> None:
    once = 'torch.randn(8, 16, device="cuda") if step == 0 else x'
    text = TRAIN.replace("MAKES_X", once).replace(
        "MAKES_Y", 'torch.arange(8, device="cuda").view(8, 1) % 3'
    )
    _, as_it_is = rehearsed(tmp_path, text)
    with pytest.raises(OomphError, match="could not be varied"):
        rehearsed(tmp_path, text, micro_batch=3, first=as_it_is)
