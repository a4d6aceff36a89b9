"""What to change in a script, found by trying where its text leaves it open."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from oomph.planning.changes import find_changes
from oomph.records.script import Script, ScriptChanges
from oomph.rehearsing.script.sandboxed import rehearser_of
from oomph.sensing.target import find_target
from planning.plans import plan_of

pytest.importorskip("torch")

_HEAD = """
import argparse, json, os, sys
import torch, torch.nn as nn, torch.nn.functional as F
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(16, 64), nn.Linear(64, 16)
    def forward(self, x):
        return x + self.two(torch.relu(self.one(x)))
class Net(nn.Module):
    def __init__(self, recompute=False):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block() for _ in range(3)]), nn.Linear(16, 4)
        self.recompute = recompute
    def forward(self, x):
        for block in self.blocks:
            if self.recompute:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x)
"""
# A batch of the size `n`, `times` of them for a step, and the learning rate `lr`.
_LOOP = """
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
for step in range(5):
    for micro in range(times):
        x, y = torch.randn(n, 16).cuda(), torch.randint(4, (n,)).cuda()
        (F.cross_entropy(model(x), y) / times).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def _changes(
    directory: Path, text: str, arguments: str = "", *, files: Any = None, **variant: Any
) -> ScriptChanges:
    for name, content in {"train.py": text, **(files or {})}.items():
        (directory / name).write_text(content)
    script = Script(path="train.py", arguments=tuple(arguments.split()), directory=str(directory))
    target, plan = find_target("rtx4090", None, None), plan_of(**variant)
    with rehearser_of(script, target, lambda _: None) as rehearser:
        return find_changes(
            script,
            rehearser,
            plan,
            target,
            lambda _: None,
            effort="rehearsed",
            is_unprotected=False,
        )


# As nanoGPT has it: an executed file sets globals, and the number of processes divides one of them.
_GLOBALS = """
batch_size = 8
gradient_accumulation_steps = 2 * 2
lr = 1e-3
exec(open("configurator.py").read())
if "WORLD_SIZE" in os.environ:
    gradient_accumulation_steps //= int(os.environ["WORLD_SIZE"])
n, times = batch_size, gradient_accumulation_steps
"""
_CONFIGURATOR = """
for word in sys.argv[1:]:
    key, value = word.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(value)
"""
# As llm.c has it: the batch is given in all, and accumulation follows.
_TOTAL = """
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--total_batch_size", type=int, default=16)
args = parser.parse_args()
n, lr = args.batch_size, 1e-3
assert args.total_batch_size % n == 0
times = args.total_batch_size // n
"""
# As the first BERT examples have it: the batch is divided by the script.
_DIVIDED = """
parser = argparse.ArgumentParser()
parser.add_argument("--train_batch_size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
args = parser.parse_args()
args.train_batch_size = args.train_batch_size // args.accumulate
n, times, lr = args.train_batch_size, args.accumulate, 1e-3
"""


@pytest.mark.parametrize(
    ("text", "given", "split", "expected"),
    [
        (_GLOBALS, "--lr=0.1", (4, 8), "--lr=0.1 --batch_size=4 --gradient_accumulation_steps=8"),
        pytest.param(_TOTAL, "", (4, 4), "--batch_size 4", marks=pytest.mark.slow),
        pytest.param(_DIVIDED, "", (4, 2), "--accumulate 2", marks=pytest.mark.slow),
    ],
)
def test_a_batch_size_behind_arguments_is_found_by_trying(
    tmp_path: Path, text: str, given: str, split: tuple[int, int], expected: str
) -> None:
    size, times = split
    changes = _changes(
        tmp_path,
        _HEAD + text + _LOOP,
        given,
        files={"configurator.py": _CONFIGURATOR},
        micro_batch=size,
        accumulation=times,
    )
    assert (changes.by_hand, changes.diff) == ((), "")
    assert shlex.join(changes.arguments) == expected
    assert f"batches of {size}, {times} for each step" in changes.tried[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        ("F.cross_entropy(model(x), y) / times", "F.cross_entropy(model(x), y)"),
        ("lr=lr", "lr=lr * n"),
        ("nn.Linear(16, 4)", "nn.Linear(16, 4 if times == 2 else 5)"),
    ],
    ids=["the loss is not divided", "the rate follows the batch", "another model"],
)
def test_an_argument_that_would_train_otherwise_is_not_taken(
    tmp_path: Path, changed: tuple[str, str]
) -> None:
    text = (
        "times = 2\n"
        + _HEAD
        + _DIVIDED.replace("default=1", "default=2").replace("default=8", "default=16")
    )
    text = (text + _LOOP).replace(*changed)
    changes = _changes(tmp_path, text, micro_batch=4, accumulation=4)
    assert (changes.arguments, changes.tried, changes.diff) == ((), (), "")
    assert len(changes.by_hand) == 1
    assert changes.patched is not None  # it says what the script needs without it


@pytest.mark.slow
def test_a_batch_size_in_a_configuration_file_is_changed_there(tmp_path: Path) -> None:
    text = """
config = json.load(open(sys.argv[1]))
n, times, lr = config["train"]["batch_size"], config["train"]["accumulate_steps"], 1e-3
"""
    config = json.dumps({"seed": 8, "train": {"batch_size": 8, "accumulate_steps": 1}}, indent=2)
    changes = _changes(
        tmp_path,
        _HEAD + text + _LOOP,
        "config.json",
        files={"config.json": config},
        micro_batch=2,
        accumulation=4,
    )
    assert changes.by_hand == ()
    assert '-    "batch_size": 8,\n-    "accumulate_steps": 1\n' in changes.diff
    assert '+    "batch_size": 2,\n+    "accumulate_steps": 4\n' in changes.diff
    assert (tmp_path / "config.json").read_text() == config


_SWITCHES = """
parser = argparse.ArgumentParser()
parser.add_argument("--amp", action="store_true")
parser.add_argument("--amp-dtype", default="float16", choices=["float16", "bfloat16"])
parser.add_argument("--gradient_checkpointing", action="store_true")
args = parser.parse_args()
kind = torch.bfloat16 if args.amp_dtype == "bfloat16" else torch.float16
model = Net(args.gradient_checkpointing).cuda()
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.utils.data.DataLoader(torch.randn(64, 16), 8)
for x in loader:
    with torch.autocast("cuda", kind, enabled=args.amp and not os.environ.get("OFF")):
        loss = model(x.cuda()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_number_in_the_text_that_decides_the_split_is_found_by_trying(tmp_path: Path) -> None:
    text = """
MAX_BATCH_SIZE = 64
config = {"seed": 64, "batch_size": 64}
n, times, lr = int(config["batch_size"]), 1, 1e-3
if n > MAX_BATCH_SIZE:
    times, n = n // MAX_BATCH_SIZE, MAX_BATCH_SIZE
"""
    changes = _changes(tmp_path, _HEAD + text + _LOOP, micro_batch=16, accumulation=4)
    assert (changes.by_hand, changes.arguments) == ((), ())
    lines = [line for line in changes.diff.splitlines() if line[0] in "+-"]
    assert lines[2:] == ["-MAX_BATCH_SIZE = 64", "+MAX_BATCH_SIZE = 16"]


@pytest.mark.slow
def test_the_scripts_own_switches_are_used_before_an_edit(tmp_path: Path) -> None:
    changes = _changes(
        tmp_path,
        _HEAD + _SWITCHES,
        precision="bf16",
        checkpointing="blocks",
        micro_batch=8,
        accumulation=1,
    )
    assert (changes.by_hand, changes.diff) == ((), "")
    assert shlex.join(changes.arguments) == "--gradient_checkpointing --amp --amp-dtype bfloat16"


def test_what_is_only_a_part_of_the_plan_is_rehearsed_alone(tmp_path: Path) -> None:
    changes = _changes(
        tmp_path,
        _HEAD + _SWITCHES,
        precision="bf16",
        optimizer="8-bit",
        micro_batch=8,
        accumulation=1,
    )
    assert not changes.is_whole
    assert changes.patched is not None
    assert changes.patched.device_bytes
