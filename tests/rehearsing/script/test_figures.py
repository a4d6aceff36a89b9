"""Figures that came from the host unchanged are true on the GPU: labels above all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from oomph.pretending import values
from oomph.pretending.values import Shadows
from rehearsing.rehearsals import mistakes
from rehearsing.script.rehearsed import rehearsed

_HEAD = """
import numpy as np, torch, torch.nn as nn, torch.nn.functional as F
labels = [float(i % 3 == 0) for i in range(96)]
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1)).cuda()
optimizer = torch.optim.Adam(model.parameters())
"""
_CLICKS = """
x, y = torch.randn(96, 16).cuda(), torch.tensor(labels, dtype=torch.float32).cuda()
for step in range(3):
    batch = torch.randperm(96, device="cuda")[:48]
    given, wanted = x[batch], y[batch].unsqueeze(1)
    if not ((wanted >= 0) & (wanted <= 1)).all() or wanted.min().item() != 0.0:
        raise ValueError("Target values should be between 0 and 1")
    loss = F.binary_cross_entropy_with_logits(model(given), wanted)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if set(torch.cat([y, wanted[:, 0]]).cpu().numpy()) != {0.0, 1.0}:
        raise ValueError("Only one class present in y_true")
"""


def test_labels_that_are_figures_are_those_of_the_data(tmp_path: Path) -> None:
    trace, seen = rehearsed(tmp_path, _HEAD + _CLICKS)
    assert seen.has_stepped
    assert seen.invented == ()
    assert mistakes(trace) == []


@pytest.mark.parametrize(
    ("made", "read"),
    [
        ("torch.tensor(labels, device='cuda')", "y.double().tolist() == labels"),
        ("torch.as_tensor(np.array(labels)).cuda().float()", "y.long().sum().item() == 32"),
        (
            "torch.tensor(labels).cuda()",
            "y.view(8, 12)[1:].flatten().half().tolist() == labels[12:]",
        ),
        ("torch.tensor(labels).cuda()", "nn.Embedding(2, 4).cuda()(y.long()).shape == (96, 4)"),
        ("torch.tensor(labels).cuda()", "y[y == 1].shape == y.masked_select(y > 0).shape == (32,)"),
        ("torch.tensor(labels).cuda()", "y.masked_select(y > 0).tolist() == [1.0] * 32"),
        (
            "torch.tensor(labels).cuda()",
            "y.clone().mul_(3).tolist() == [3 * one for one in labels]",
        ),
        ("torch.tensor(labels).cuda()", "torch.stack([y, y]).cpu()[1].tolist() == labels"),
        ("torch.tensor(labels).cuda()", "y.cpu().cuda().numpy(force=True).sum() == 32"),
    ],
)  # fmt: skip - one thing a line
def test_they_stay_true_through_moves_views_casts_and_indexing(
    tmp_path: Path, made: str, read: str
) -> None:
    check = f"y = {made}\nassert y.is_cuda and {read}\n"
    step = "model(torch.randn(8, 16).cuda()).mean().backward(); optimizer.step()\n"
    _, seen = rehearsed(tmp_path, _HEAD + check + step)
    assert seen.num_optimizer_steps == 1
    assert seen.invented == ()


def test_what_is_reckoned_with_them_is_invented_and_said_to_be(tmp_path: Path) -> None:
    """A model's input is known, too; what the model or arithmetic makes of it is not."""
    reckons = """
y = torch.tensor(labels).cuda()
smooth = y * 0.9 + 0.05
assert smooth.tolist() == [1.0] * 96
out = model(torch.randn(96, 16).cuda())
y += out.detach()[:, 0]
assert y.tolist() == [1.0] * 96
out.mean().backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + reckons)
    assert len(seen.invented) == 2


def test_weights_that_are_loaded_are_not_kept(tmp_path: Path) -> None:
    loads = """
torch.save({k: torch.full(v.shape, 2.0) for k, v in model.state_dict().items()}, "weights.pt")
model.load_state_dict(torch.load("weights.pt"))
assert model[0].weight.cpu().detach().numpy().max() == 1.0  # invented
model(torch.randn(96, 16).cuda()).mean().backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, _HEAD + loads)
    assert seen.num_optimizer_steps == 1


def _pretended(num_elements: int) -> torch.Tensor:
    return torch.empty(num_elements, device="meta")


def test_no_more_than_so_much_is_kept_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "MOST_CARRIED_BYTES", 4 * 1000)
    known = Shadows()
    first, second = _pretended(600), _pretended(600)
    known.carry(first, torch.ones(600))
    known.carry(second, torch.ones(600))
    assert known.of(first) is not None
    assert known.of(second) is None
    del first
    known.carry(second, torch.ones(600))
    assert known.of(second) is not None
    known.forget(second)
    third = _pretended(1000)
    known.carry(third, torch.ones(1000))
    assert known.of(third) is not None


def test_a_large_input_is_not_copied() -> None:
    known = Shadows()
    large = _pretended(values.MOST_CARRIED + 1)
    known.carry(large, torch.ones(values.MOST_CARRIED + 1))
    assert known.of(large) is None
