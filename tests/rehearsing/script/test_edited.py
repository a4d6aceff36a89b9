"""A patch is rehearsed in memory: Python reads the edited text, the disk keeps its own."""

from __future__ import annotations

import py_compile
from pathlib import Path

from oomph.records.script import Overrides, Script
from oomph.rehearsing.script.run import rehearse_script
from rehearsing.script.rehearsed import GPU

_TRAIN = """
import json
import torch, torch.nn.functional as F
from net import make
batch = json.load(open("config.json"))["batch"]
model = make().cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(3):
    loss = F.cross_entropy(model(torch.randn(batch, 16).cuda()), torch.randint(4, (batch,)).cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""
_NET = "import torch\ndef make():\n    return torch.nn.Linear(16, 4)\n"
_CONFIG = '{"batch": 8}'


def _rehearsed(directory: Path, **edited: str):  # type: ignore[no-untyped-def]
    names = {"train": "train.py", "net": "net.py", "config": "config.json"}
    texts = {"train.py": _TRAIN, "net.py": _NET, "config.json": _CONFIG}
    for name, text in texts.items():
        (directory / name).write_text(text)
    py_compile.compile(str(directory / "net.py"))  # which Python would rather take
    instead = tuple((str(directory / names[name]), text) for name, text in edited.items())
    script = Script(path=str(directory / "train.py"), directory=str(directory), edited=instead)
    seen = rehearse_script(script, GPU, Overrides()).seen
    assert {name: (directory / name).read_text() for name in texts} == texts
    return seen


def test_without_edits_the_files_are_read_as_they_are(tmp_path: Path) -> None:
    seen = _rehearsed(tmp_path)
    assert (seen.micro_batch, seen.num_parameters, seen.learning_rate) == (8, 68, 1e-3)


def test_the_edited_script_runs_and_its_module_and_its_settings_are_the_edited_ones(
    tmp_path: Path,
) -> None:
    seen = _rehearsed(
        tmp_path,
        train=_TRAIN.replace("1e-3", "2e-3"),
        net=_NET.replace("Linear(16, 4)", "Linear(16, 4, bias=False)"),
        config=_CONFIG.replace("8", "4"),
    )
    assert (seen.micro_batch, seen.num_parameters, seen.learning_rate) == (4, 64, 2e-3)


def test_it_shows_what_the_loss_is_divided_by_and_whether_segments_expand(tmp_path: Path) -> None:
    plain = _rehearsed(tmp_path)
    assert (plain.loss_divisor, plain.expandable_segments) == (1.0, False)
    divided = _rehearsed(
        tmp_path,
        train="import os\nos.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\n"
        + _TRAIN.replace("loss.backward()", "torch.amp.GradScaler().scale(loss / 4).backward()"),
    )
    assert (divided.loss_divisor, divided.expandable_segments) == (4.0, True)
