"""Edited scripts are run for real, on the CPU: they end with the weights of the unedited ones."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from exporting.script_stage import applied, loader_of, seen_of, split
from oomph.records.script import Line, ScriptChanges, Seen

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.slow

PLAIN = '''"""A classifier, as in many first scripts."""
import argparse
import os

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset


def train(args, model, device, loader, optimizer, scheduler):
    criterion = nn.CrossEntropyLoss()
    model.train()
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", "-b", type=int, default=64)
    parser.add_argument("--clip", type=float, default=1.0)
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = TensorDataset(torch.randn(160, 7), torch.randint(3, (160,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True, drop_last=True)
    model = nn.Sequential(nn.Linear(7, 16), nn.Tanh(), nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = OneCycleLR(optimizer, 0.05, total_steps=3 * len(loader))
    for _ in range(3):
        train(args, model, device, loader, optimizer, scheduler)
    torch.save([p.detach() for p in model.parameters()], os.environ["WEIGHTS"])


if __name__ == "__main__":
    main()
'''

LAST_IS_SMALLER = """import os
import torch
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
data = [(torch.randn(5), torch.randn(1)) for _ in range(48)]
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Linear(5, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu")
for epoch in range(4):
    total = 0.0
    for i, (x, y) in enumerate(loader):
        loss = (model(x) - y).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        total += loss.item()
    print(total / len(loader))
torch.save([p.detach() for p in model.parameters()], os.environ["WEIGHTS"])
"""

MADE = """import os
import torch
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
batch_size = 32
data = torch.randn(2000, 6)
place = 0


def get_batch():
    global place
    place += batch_size
    return data[place - batch_size : place]


class Trainer:
    def __init__(self):
        layers = [torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 6)]
        self.model = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)

    def run(self):
        for step in range(5):
            for group in self.optimizer.param_groups:
                group["lr"] = 0.01 / (step + 1)
            x = get_batch()
            out = self.model(x)
            self.loss = torch.nn.functional.mse_loss(out, x)
            self.optimizer.zero_grad()
            self.loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            print(step, self.loss.item())


trainer = Trainer()
trainer.run()
torch.save([p.detach() for p in trainer.model.parameters()], os.environ["WEIGHTS"])
"""

ACCELERATED = """import argparse
import os
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--bsz", type=int, default=32)
parser.add_argument("--grad_accum", type=int, default=1)
args = parser.parse_args()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=args.grad_accum)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
loader = DataLoader(TensorDataset(torch.randn(96, 4)), batch_size=args.bsz, shuffle=True)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=2 * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
for epoch in range(2):
    for (x,) in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - x).abs().mean()
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
torch.save([p.detach() for p in model.parameters()], os.environ["WEIGHTS"])
"""

LIGHTNING = """import os
import pytorch_lightning as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Lit(pl.LightningModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size
        self.layer = torch.nn.Linear(4, 4)

    def training_step(self, batch, _):
        return (self.layer(batch[0]) - batch[0]).square().mean()

    def train_dataloader(self):
        return DataLoader(self.data, self.batch_size)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
model = Lit()
model.data = TensorDataset(torch.randn(96, 4))
trainer = pl.Trainer(
    max_epochs=2,
    accelerator="cpu",  # no GPU here
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False
)
trainer.fit(model)
torch.save([p.detach() for p in model.parameters()], os.environ["WEIGHTS"])
"""

HUGGING_FACE = """import os
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

BATCH = 16
config = GPT2Config(
    vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=8,
    resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
)
torch.manual_seed(0)
model = GPT2LMHeadModel(config)
tokens = torch.randint(50, (64, 8))
data = [{"input_ids": one, "labels": one} for one in tokens]
training_args = TrainingArguments(
    output_dir=os.environ["WEIGHTS"] + ".out",
    per_device_train_batch_size=BATCH, num_train_epochs=2,
    report_to="none", save_strategy="no", use_cpu=True, max_grad_norm=1.0,
    learning_rate=1e-3)
Trainer(model=model, args=training_args, train_dataset=data).train()
torch.save([p.detach() for p in model.parameters()], os.environ["WEIGHTS"])
"""

CASES: dict[str, tuple[str, Seen, dict[str, Any]]] = {
    "plain": (
        PLAIN,
        seen_of(micro_batch=64, loader=loader_of(64)),
        {"micro_batch": 16, "optimizer": "for-loop", "expandable_segments": True},
    ),
    "the last batch is smaller": (
        LAST_IS_SMALLER,
        seen_of(loader=loader_of(32), uses_grad_scaler=True, optimizer="SGD"),
        {"optimizer": "fused"},
    ),
    "made": (MADE, seen_of(optimizer="Adam"), {"precision": "tf32"}),
    "accelerate": (ACCELERATED, seen_of(loader=loader_of(32)), {}),
    "lightning": (LIGHTNING, seen_of(loader=loader_of(32), optimizer="SGD"), {}),
    "hugging face": (HUGGING_FACE, seen_of(micro_batch=16), {"micro_batch": 4}),
}
NEEDS = {
    "accelerate": "accelerate",
    "lightning": "pytorch_lightning",
    "hugging face": "transformers",
}


# Imports what the scripts need once, and runs each in a process of its own.
RUNNER = """
import importlib, json, os, runpy, sys
modules, jobs = json.load(sys.stdin)
for name in modules:
    importlib.import_module(name)
failed = []
for place, script, arguments in jobs:
    if not os.fork():
        os.chdir(place)
        os.environ["WEIGHTS"] = script + ".pt"
        sys.argv = [script, *arguments]
        runpy.run_path(script, run_name="__main__")
        sys.stdout.flush()
        os._exit(0)
    failed += [script] if os.wait()[1] else []
sys.exit(", ".join(failed) or 0)
"""


class Runs:
    """Scripts that are to be run, all at once, and the weights that they end with."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.jobs: list[tuple[str, str, list[str]]] = []

    def add(self, name: str, text: str, changes: ScriptChanges) -> str:
        """The script as it is and as it would be; the text of the latter."""
        place = self.place / name.replace(" ", "-")
        place.mkdir()
        (place / "before.py").write_text(text)
        (place / "train.py").write_text(text)
        (place / "change.diff").write_text(changes.diff)
        if changes.diff:  # by git, as a user would
            subprocess.run(["git", "apply", "change.diff"], cwd=place, check=True)
        self.jobs.append((str(place), "before.py", []))
        self.jobs.append((str(place), "train.py", list(changes.arguments)))
        return (place / "train.py").read_text()

    def run(self, modules: list[str]) -> None:
        done = subprocess.run(
            [sys.executable, "-c", RUNNER],
            input=json.dumps([modules, self.jobs]),
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr

    def weights(self, name: str, script: str) -> list[Any]:
        return torch.load(self.place / name.replace(" ", "-") / f"{script}.pt")  # type: ignore[no-any-return]


def is_installed(name: str) -> bool:
    return name not in NEEDS or importlib.util.find_spec(NEEDS[name]) is not None


LOW = [(name, precision) for name in ("plain", "made") for precision in ("bf16", "fp16")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Every script of this file, as it is and as it would be."""
    runs = Runs(tmp_path_factory.mktemp("scripts"))
    names = [name for name in CASES if is_installed(name)]
    for name in names:
        text, seen, plan = CASES[name]
        changes = split(text, (), seen, **plan)
        assert changes.by_hand == ()
        after = runs.add(name, text, changes)
        assert (after, changes.arguments) != (text, ())
    for name, precision in LOW:
        text, seen, plan = CASES[name]
        changes = split(text, (), seen, **{**plan, "precision": precision})
        assert changes.by_hand == ()
        after = runs.add(f"{name} {precision}", text, changes)
        assert "torch.autocast(" in after
        assert ("GradScaler" in after) == (precision == "fp16")
    runs.run(["torch", *(NEEDS[name] for name in names if name in NEEDS)])
    return runs


# Without a GPU, autocast and scaler of CUDA switch themselves off: the update is the same.
@pytest.mark.parametrize("name", [*CASES, *(" ".join(one) for one in LOW)])
def test_an_edited_script_ends_with_the_same_weights(name: str, runs: Runs) -> None:
    if not is_installed(name):
        pytest.skip(f"{NEEDS[name]} is not installed")
    before, after = runs.weights(name, "before.py"), runs.weights(name, "train.py")
    tolerance = 1e-12 if before[0].dtype == torch.float64 else 1e-5
    for one, other in zip(before, after, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=tolerance)


def test_lines_that_a_rehearsal_saw_decide_between_two_loops() -> None:
    pretraining = PLAIN.replace("def train(", "def pretrain(").partition("def main")[0]
    text = pretraining + PLAIN.partition("TensorDataset\n")[2]
    lines = text.splitlines()
    line = len(lines) - next(n for n, one in enumerate(reversed(lines)) if "backward" in one)
    seen = seen_of(
        micro_batch=64,
        loader=loader_of(64),
        lines=(
            Line(what="backward", file="/home/me/train.py", line=line),
            Line(what="step", file="/home/me/train.py", line=line + 2),
        ),
    )
    changes = split(text, (), seen, micro_batch=16)
    assert changes.by_hand == ()
    assert changes.arguments == ("--batch-size", "16")
    added = [one for one in changes.diff.splitlines() if one.startswith("+")]
    assert sum("backward" in one for one in added) == 1
    after = applied(text, changes.diff)
    assert after.partition("def train(")[0] == text.partition("def train(")[0]
