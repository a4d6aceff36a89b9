"""What a script does is seen, whoever imported what before it."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
from torch.utils.checkpoint import checkpoint

from rehearsing.script import written_twice
from rehearsing.script.rehearsed import rehearsed


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_recomputing_is_seen_through_a_name_that_was_imported_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_reentrant: bool
) -> None:
    early = types.ModuleType("early")
    early.checkpoint = checkpoint  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early", early)
    plain = written_twice.script("net", "plain")
    text = "import early\n" + plain.replace(
        "for batch in loader:",
        "inner = model.forward\n"
        "model.forward = lambda x: early.checkpoint(\n"
        f"    inner, x.requires_grad_(), use_reentrant={is_reentrant})\n"
        "for batch in loader:",
    )
    _, seen = rehearsed(tmp_path, text)
    assert seen.checkpointing == "by the script"
    _, seen = rehearsed(tmp_path, plain)
    assert seen.checkpointing == "none"


def test_what_a_loop_keeps_of_the_outputs_until_the_next_batch_is_seen(tmp_path: Path) -> None:
    text = """
import torch
model = torch.nn.Linear(16, 1000).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(4):
    x = torch.randn(8, 16).cuda()
    LOSS
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
    _, seen = rehearsed(tmp_path, text.replace("LOSS", "out = model(x); loss = out.mean()"))
    assert seen.kept_bytes == 8 * 1000 * 4
    _, seen = rehearsed(tmp_path, text.replace("LOSS", "loss = model(x).mean()"))
    assert seen.kept_bytes == 0
    twice = "loss = (model(x) + model(x)).mean()"  # two calls for one backward
    _, seen = rehearsed(tmp_path, text.replace("LOSS", twice))
    assert seen.kept_bytes == 0
