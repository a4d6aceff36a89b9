"""Scripts as they are and with their changes, run for real on the CPU: they end alike."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from oomph.planning.changes import find_changes
from oomph.records.script import Script
from oomph.rehearsing.script.sandboxed import rehearser_of
from oomph.sensing.target import find_target
from planning.plans import plan_of

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "scripts" / "more"
# In 64 bits, so that Adam does not make steps of what is only rounding.
_RUNNER = """
import runpy, sys, torch
torch.set_default_dtype(torch.float64)
made, init = [], torch.optim.Optimizer.__init__
def keeping(self, *args, **kwargs):
    init(self, *args, **kwargs)
    made.append(self)
torch.optim.Optimizer.__init__ = keeping
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
torch.save([p.detach() for group in made[0].param_groups for p in group["params"]], "weights.pt")
"""
_HALVED = {"micro_batch": 4, "accumulation": 2, "checkpointing": "blocks"}
CASES: dict[str, str] = {
    "bert_classifier.py": "--train_batch_size 8 --max_seq_length 8 --dim 16 --layers 2"
    " --examples 48 --learning_rate 1e-2",
    "image_trainer.py": "-b 8 --img-size 32 --dim 16 --depth 2 --num-images 32 --lr 1e-2",
    "lora_by_hand.py": "--micro_batch_size 8 --cutoff_len 8 --hidden 16 --layers 2"
    " --num_examples 32 --lora_r 2 --num_epochs 2",
}


def _weights(script: str, arguments: tuple[str, ...], directory: Path) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", _RUNNER, "-", script, *arguments],
        cwd=directory,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return torch.load(directory / "weights.pt")


@pytest.mark.parametrize("name", CASES)
def test_a_script_with_its_changes_ends_with_the_same_weights(name: str, tmp_path: Path) -> None:
    place = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, place)
    given = tuple(CASES[name].split())
    script = Script(path=name, arguments=given, directory=str(place))
    target, plan = find_target("rtx4090", None, None), plan_of(**_HALVED)
    with rehearser_of(script, target, lambda _: None) as rehearser:
        changes = find_changes(
            script,
            rehearser,
            plan,
            target,
            lambda _: None,
            effort="rehearsed",
            is_unprotected=False,
        )
    assert changes.by_hand == ()
    assert changes.patched is not None
    assert changes.patched.differences == ()
    on_cpu = ("--device", "cpu") if name == "image_trainer.py" else ()
    before = _weights(name, given + on_cpu, place)
    if changes.diff:
        subprocess.run(
            ["git", "apply", "-"],
            cwd=place,
            input=changes.diff,
            text=True,
            check=True,
        )
    assert changes.changes_anything(given)
    after = _weights(name, changes.arguments + on_cpu, place)
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-9)
