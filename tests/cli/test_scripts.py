"""`oomph predict` and `oomph plan` on a training script as it is, as typed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import oomph
from oomph.cli import main
from oomph.sandbox.sandbox import protection

pytestmark = pytest.mark.skipif(
    protection().kind != "namespaces", reason="this kernel refuses user namespaces"
)
TRAIN = """
import argparse, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--batch-size", type=int, default=32)
options = parser.parse_args()

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

blocks = [Block(options.width) for _ in range(4)]
model = nn.Sequential(*blocks, nn.Linear(options.width, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = TensorDataset(torch.randn(256, 64, options.width), torch.randint(10, (256, 64)))
for epoch in range(2):
    for x, y in DataLoader(data, batch_size=options.batch_size, shuffle=True):
        loss = nn.functional.cross_entropy(model(x.cuda()).flatten(0, 1), y.cuda().flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if loss.item() != loss.item():
            raise SystemExit("no number")
    torch.save(model.state_dict(), "model.pt")
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(TRAIN)
    return tmp_path


def test_a_script_is_predicted_with_its_own_arguments(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", "train.py", "--gpu", "t4", "--json", "--", "--width", "128"]) == 0
    told = json.loads(capsys.readouterr().out)
    num_parameters = 4 * (2 * 4 * 128 * 128 + 5 * 128) + 128 * 10 + 10
    assert told["seen"]["num_parameters"] == num_parameters
    assert told["by_category"]["optimizer"] == 8 * num_parameters
    assert told["variant"]["micro_batch"] == told["seen"]["loader"]["batch_size"] == 32
    assert [one["line"] for one in told["seen"]["invented"]] == [29]
    assert list(train.iterdir()) == [train / "train.py"]


@pytest.mark.usefixtures("train")
def test_another_micro_batch_and_precision_are_put_around_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["--micro-batch", "8", "--precision", "bf16", "--checkpointing", "blocks"]
    assert main(["predict", "train.py", "--gpu", "rtx4090", "--json", *asked]) == 0
    told = json.loads(capsys.readouterr().out)
    variant = told["variant"]
    assert (variant["micro_batch"], variant["accumulation"]) == (8, 4)
    assert variant["precision"] == "bf16"
    assert main(["predict", "train.py", "--gpu", "rtx4090", "--json"]) == 0
    as_it_is = json.loads(capsys.readouterr().out)
    assert told["allocated_bytes"] < as_it_is["allocated_bytes"]


@pytest.mark.usefixtures("train")
def test_the_terminal_says_what_was_seen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", "train.py", "--gpu", "t4"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "fits on t4: micro-batch 32 x 1, fp32" in told
    assert "Sequential" in told
    assert "AdamW" in told
    assert "train.py:24" in told  # the loader
    assert "train.py:29 read a value that only real training would produce" in told


def test_a_plan_keeps_the_batch_of_the_script(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "train.py", "--gpu", "v100-16gb", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["fits_as_is"] == "yes"
    for plan in told["plans"]:
        assert plan["micro_batch"] * plan["accumulate"] * plan["gpus"] == 32
    reasons = {one["what"]: one["why"] for one in told["rejected"]}
    assert "before the script makes its optimizer" in reasons["lora"]
    assert list(train.iterdir()) == [train / "train.py"]


def test_a_second_question_needs_no_rehearsal(train: Path) -> None:
    told: list[str] = []
    time.sleep(0.05)  # what was written a moment ago counts as written meanwhile
    first = oomph.plan("train.py", gpu="v100-16gb", say=told.append)
    assert "rehearsing the script as it is" in told
    told.clear()
    again = oomph.plan("train.py", gpu="v100-16gb", target_memory=0.9, say=told.append)
    assert again.best is not None
    assert first.best is not None
    assert again.best.variant == first.best.variant
    assert "rehearsing the script as it is" not in told
    oomph.predict("train.py", gpu="v100-32gb", say=told.append)
    assert "rehearsing the script as it is" not in told
    oomph.predict("train.py", gpu="v100-32gb", say=told.append, fresh=True)
    assert told.count("rehearsing the script as it is") == 1
    (train / "train.py").write_text(TRAIN.replace("default=32", "default=16"))
    changed = oomph.predict("train.py", gpu="v100-32gb", say=told.append)
    assert told.count("rehearsing the script as it is") == 2
    assert changed.variant.micro_batch == 16
    assert list(train.iterdir()) == [train / "train.py"]


def test_a_script_that_fails_is_named_by_its_line(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (train / "train.py").write_text("import torch\n\nx = torch.zeros(2).cuda()\n1 / 0\n")
    assert main(["predict", "train.py", "--gpu", "t4"]) == 2
    told = capsys.readouterr().err
    assert "train.py:4" in told
    assert "ZeroDivisionError" in told


def test_a_script_that_stays_on_the_cpu_is_told_so(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (train / "train.py").write_text(TRAIN.replace(".cuda()", ""))
    for verb in ("predict", "plan"):
        assert main([verb, "train.py", "--gpu", "t4"]) == 2
        assert "put nothing on the GPU" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["predict", "absent.py", "--gpu", "t4"], "absent.py"),
        (["predict", "--gpu", "t4"], "nothing to train was given"),
        (["predict", "train.py", "-m", "train", "--gpu", "t4"], "both given"),
        (["predict", "train.py:model", "--gpu", "t4", "--", "--width", "8"], "takes no arguments"),
        (["predict", "-m", "absent.module", "--gpu", "t4"], "absent"),
        (["gpus", "--", "x"], "there is no -- x"),
        (["predict", "train.py", "--gpu", "t4", "--micro-batch", "7"], "does not divide"),
        (["predict", "train.py", "--gpu", "t4", "--adapters", "lora"], "adapters"),
    ],
)
@pytest.mark.usefixtures("train")
def test_what_makes_no_sense_is_one_clear_error(
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    assert main(arguments) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert "Traceback" not in told.err
    assert not told.out


@pytest.mark.usefixtures("train")
def test_without_torch_it_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torch" else find(name)
    )
    assert main(["predict", "train.py", "--gpu", "t4"]) == 2
    assert "pip install torch" in capsys.readouterr().err


def test_ctrl_c_leaves_nothing(train: Path) -> None:
    (train / "train.py").write_text(
        "import time\nprint('here', flush=True)\nwhile True:\n    time.sleep(0.1)\n"
    )
    command = [sys.executable, "-m", "oomph", "predict", "train.py", "--gpu", "t4"]
    program = subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True)
    while len(_descendants(program.pid)) < 4:  # the sandbox's own, and the script
        assert program.poll() is None
        time.sleep(0.05)
    others = _descendants(program.pid)
    os.kill(program.pid, signal.SIGINT)
    assert program.wait() == 130
    while any(Path(f"/proc/{pid}").exists() for pid in others):
        time.sleep(0.05)
    assert list(train.iterdir()) == [train / "train.py"]


def _descendants(pid: int) -> list[int]:
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:  # it has ended
        return []
    return [each for child in map(int, children) for each in (child, *_descendants(child))]


def test_the_diff_makes_the_script_what_was_planned(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--gpu", "rtx4090", "--forbid", "checkpointing,8-bit-optimizer", "--diff", "--verify"]
    assert main(["plan", "train.py", *asked, "--", "--width", "512"]) == 0
    told = capsys.readouterr().out
    assert "start it with" not in told  # its arguments stay as they are
    assert ", as planned." in told.partition("--- ")[0]
    diff = told[told.index("--- ") :]
    (train / "plan.diff").write_text(diff)
    before = (train / "train.py").read_text()
    subprocess.run(["git", "apply", "plan.diff"], cwd=train, check=True)
    after = (train / "train.py").read_text()
    assert before != after
    compile(after, "train.py", "exec")


def test_a_patch_that_is_only_a_part_of_the_plan_says_so_first(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (train / "train.py").read_text()
    twice = "loss.backward() if loss is not None else loss.backward()"
    (train / "train.py").write_text(text.replace("loss.backward()", twice))
    asked = ["--gpu", "rtx4090", "--forbid", "checkpointing,8-bit-optimizer,tf32", "--diff"]
    assert main(["plan", "train.py", *asked, "--verify"]) == 3
    told = capsys.readouterr().out.split("\n")
    place = next(n for n, line in enumerate(told) if line.startswith("These changes are only"))
    assert any("by hand: " in line for line in told[place:])
    assert not any("by hand: " in line for line in told[:place])


def test_verify_is_about_a_diff(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(train / "train.py"), "--gpu", "v100-16gb", "--verify"]) == 2
    assert "--diff --verify" in capsys.readouterr().err


# In the manner of nanoGPT, and as small: globals that arguments set, attention of its own.
NANO = """
import torch
from torch import nn
from torch.nn import functional as F
batch_size = 12
gradient_accumulation_steps = 5 * 8
n_embd = 512
dtype = "bfloat16"
exec(open("configurator.py").read())  # overrides from the command line

class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.flash = hasattr(torch.nn.functional, "scaled_dot_product_attention")

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = (one.view(B, T, 8, C // 8).transpose(1, 2) for one in self.c_attn(x).split(C, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True) if self.flash else v
        return x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))

def get_batch():
    x = torch.randint(5000, (batch_size, 512))
    return x.pin_memory().to("cuda", non_blocking=True)

layers = [CausalSelfAttention() for _ in range(4)]
model = nn.Sequential(nn.Embedding(5000, n_embd), *layers, nn.Linear(n_embd, 5000)).to("cuda")
scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")
optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, fused=True)
model = torch.compile(model)
X = get_batch()
for iter_num in range(100):
    for micro_step in range(gradient_accumulation_steps):
        with torch.amp.autocast("cuda", dtype=getattr(torch, dtype)):
            loss = F.cross_entropy(model(X).flatten(0, 1), X.flatten())
            loss = loss / gradient_accumulation_steps
        X = get_batch()
        scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
"""
CONFIGURATOR = """
import sys
for arg in sys.argv[1:]:
    key, val = arg.removeprefix("--").split("=")
    globals()[key] = type(globals()[key])(val)
"""


def test_a_script_in_the_manner_of_nanogpt_is_told_its_own_arguments(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (train / "train.py").write_text(NANO)
    (train / "configurator.py").write_text(CONFIGURATOR)
    own = ["--batch_size=64", "--n_embd=256", "--gradient_accumulation_steps=2"]
    asked = [
        "--gpu-memory",
        "2GiB",
        "--forbid",
        "checkpointing,8-bit-optimizer",
        "--diff",
        "--explain",
    ]
    assert main(["plan", "train.py", "--gpu", "v100-16gb", *asked, "--", *own]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "sdpa (the model already uses it)" in told
    assert "by hand:" not in told
    start = told[told.index("start it with these arguments: ") :]
    size, width, times = (int(word.partition("=")[2]) for word in start.split()[5:8])
    assert (size * times, width) == (128, 256)
    assert size < 64


FIXED = """
import torch
from torch import nn
x, y = torch.randn(48, 64, device="cuda"), torch.randint(10, (48,), device="cuda")
model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)).cuda()
optimizer = torch.optim.Adam(model.parameters())
for _ in range(5):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


def _planned(directory: Path, text: str, capsys: pytest.CaptureFixture[str]) -> Any:
    (directory / "train.py").write_text(text)
    assert main(["plan", "train.py", "--gpu", "v100-16gb", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_batch_that_cannot_be_another_is_planned_as_it_is(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _planned(train, FIXED, capsys)
    assert {(plan["micro_batch"], plan["accumulate"]) for plan in told["plans"]} == {(48, 1)}
    why = {one["what"]: one["why"] for one in told["rejected"]}
    assert "the micro-batch of 48 cannot change" in why["accumulation"]
    assert "train.py:9" in why["accumulation"]
    assert main(["plan", "train.py", "--gpu", "v100-16gb", "--batch-size", "32"]) == 2
    assert "could not be varied" in capsys.readouterr().err


def test_a_batch_of_three_that_cannot_be_another_is_planned_as_any(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    three = FIXED.replace("48", "3")
    told = _planned(train, three, capsys)
    assert {(plan["micro_batch"], plan["accumulate"]) for plan in told["plans"]} == {(3, 1)}
    why = {one["what"]: one["why"] for one in told["rejected"]}
    assert "the micro-batch of 3 cannot change" in why["accumulation"]


def test_a_batch_that_is_moved_once_before_training_is_planned_in_parts(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = "x, y = torch.randn(48, 64).cuda(), torch.randint(10, (48,)).cuda()"
    lines = [moved if line.startswith("x, y =") else line for line in FIXED.splitlines()]
    told = _planned(train, "\n".join(lines), capsys)
    assert told["plans"]
    assert "accumulation" not in {one["what"] for one in told["rejected"]}


REWARDS = """
import torch
from torch import nn
policy = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 2)).to("cuda")
optimizer = torch.optim.Adam(policy.parameters())
for episode in range(4):
    kept = [policy(torch.randn(4).to("cuda")).logsumexp(-1) for _ in range(5)]
    optimizer.zero_grad()
    torch.stack(kept).sum().backward()
    optimizer.step()
"""


def test_a_batch_that_is_not_known_is_not_divided_and_not_called_one(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _planned(train, REWARDS, capsys)
    assert told["seen"]["micro_batch"] is None
    why = {one["what"]: one["why"] for one in told["rejected"]}
    assert "the batch size is unknown" in why["accumulation"]
    for asked in (["plan", "train.py", "--diff"], ["predict", "train.py"]):
        assert main([*asked, "--gpu", "v100-16gb"]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert "the batch size is unknown" in said
        assert "the script's own batch" in said
        assert "1 x 1" not in said
        assert "the batch stays" not in said
        assert "samples a second" not in said
    assert main(["plan", "train.py", "--gpu", "v100-16gb", "--batch-size", "32"]) == 2
    assert "the batch size of the script is unknown" in capsys.readouterr().err


GRAPHS = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
class Graphs(Dataset):
    def __len__(self): return 256
    def __getitem__(self, i): return torch.randn(7, 16), torch.randint(3, ())
def collate(batch): return torch.cat([x for x, _ in batch]), torch.stack([y for _, y in batch])
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.head = nn.Linear(16, 2048), nn.Linear(2048, 3)
    def forward(self, nodes): return self.head(self.up(nodes).relu().view(-1, 7, 2048).mean(1))
model = Net().cuda()
optimizer = torch.optim.Adam(model.parameters())
for x, y in DataLoader(Graphs(), batch_size=64, collate_fn=collate):
    loss = nn.functional.cross_entropy(model(x.cuda()), y.cuda())
    optimizer.zero_grad(); loss.backward(); optimizer.step()
"""


def test_a_batch_of_graphs_is_divided_by_graphs(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _planned(train, GRAPHS, capsys)
    assert told["batch_size"] == told["seen"]["micro_batch"] == 64
    assert told["seen"]["num_rows"] == 64 * 7
    (train / "train.py").write_text(GRAPHS)
    tight = ["plan", "train.py", "--gpu", "v100-16gb", "--gpu-memory", "385MiB", "--json"]
    main([*tight, "--prefer", "memory"])
    plans = json.loads(capsys.readouterr().out)["plans"]
    assert plans
    assert all(plan["micro_batch"] * plan["accumulate"] == 64 for plan in plans)


def test_a_script_that_traces_or_stops_its_parent_is_rehearsed_all_the_same(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attack = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
libc.ptrace(16, os.getppid(), None, None)
libc.ptrace(0x4206, os.getppid(), None, None)
os.kill(os.getppid(), signal.SIGSTOP)
assert os.listdir("/proc/self/fd") and open("/proc/self/environ").read()  # it is like any other
"""
    (train / "train.py").write_text(attack + TRAIN)
    assert main(["predict", "train.py", "--gpu", "t4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seen"]["micro_batch"] == 32


def test_the_last_that_a_script_wrote_is_shown_where_it_fails(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = """
import os, subprocess, sys
print("epoch 0 begins")
os.write(2, b"a library in C says why\\n")
subprocess.run(["echo", "and so does a program"])
sys.stderr.write("  3%|###   | 3/100 [00:01<00:31]\\r")
print("\\x1b[31mthe disk\\x1b[0m")
raise RuntimeError("broken")
"""
    (train / "train.py").write_text(text)
    assert main(["predict", "train.py", "--gpu", "t4"]) == 2
    told = capsys.readouterr().err
    assert "RuntimeError: broken" in told
    shown = told[told.index("its last output:") :]
    for line in ("epoch 0 begins", "a library in C says why", "and so does a program", "the disk"):
        assert line in shown
    assert "3/100" not in shown
    assert "\x1b" not in shown
    (train / "train.py").write_text(text.replace("raise RuntimeError", "os._exit(3) #"))
    assert main(["predict", "train.py", "--gpu", "t4"]) == 2
    assert "a library in C says why" in capsys.readouterr().err
