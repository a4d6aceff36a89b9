"""A search with a time limit: the best plan so far, and what was not compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import oomph
from oomph.cli import main
from oomph.errors import EXIT_UNCERTAIN, EXIT_YES, UsageError

TRAIN = """
import torch, oomph

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(256, 1024), torch.nn.Linear(1024, 256)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(Block(), Block()),
    batch=lambda n: torch.zeros(n, 512, 256),
    loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=64,
)
"""
AT_ONCE = 1e-6  # seconds: over before anything is rehearsed


@pytest.fixture(autouse=True)
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return "train.py:workload"


def test_a_search_that_is_cut_gives_a_true_plan_and_names_what_it_left_out(train: str) -> None:
    cut = oomph.plan(train, gpu_memory="700MiB", time_limit=AT_ONCE)
    assert cut.cut is not None
    assert "bf16" in cut.cut.left_out
    assert cut.best is not None
    assert {trick.name for trick in cut.best.tricks} <= {"accumulation", "tf32"}
    whole = oomph.plan(train, gpu_memory="700MiB")  # goes on from there, and leaves nothing out
    assert whole.cut is None
    assert whole.num_candidates > cut.num_candidates
    settings = cut.best.micro_batch, cut.best.precision
    same = oomph.predict(train, gpu_memory="700MiB", micro_batch=settings[0], precision=settings[1])
    assert same.device_bytes == cut.best.prediction.device_bytes
    again = oomph.plan(train, gpu_memory="700MiB", fresh=True)
    assert [plan.variant for plan in again] == [plan.variant for plan in whole]


def test_a_search_that_is_done_in_time_is_as_without_a_limit(train: str) -> None:
    limited = oomph.plan(train, gpu_memory="700MiB", time_limit="1h")
    assert limited.cut is None
    free = oomph.plan(train, gpu_memory="700MiB")
    assert [plan.variant for plan in limited] == [plan.variant for plan in free]


def test_nothing_that_fits_so_far_is_uncertain_not_no(
    train: str, capsys: pytest.CaptureFixture[str]
) -> None:
    tight = ["plan", train, "--gpu-memory", "80MiB"]
    assert main([*tight, "--time-limit", "0.000001"]) == EXIT_UNCERTAIN
    printed = capsys.readouterr().out
    assert "Nothing that was compared is certain to fit." in printed
    assert "The search was cut after 0 s; " in printed
    assert "A higher --time-limit goes on with them." in printed
    assert main([*tight, "--time-limit", "0.000001", "--json"]) == EXIT_UNCERTAIN
    answer = json.loads(capsys.readouterr().out)
    assert answer["cut"]["limit_s"] == AT_ONCE
    assert answer["cut"]["left_out"]


def test_a_script_is_cut_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "script.py").write_text(
        TRAIN.partition("workload =")[0]
        + """
model = torch.nn.Sequential(Block(), Block()).cuda()
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.TensorDataset(torch.zeros(256, 512, 256))
for (batch,) in torch.utils.data.DataLoader(data, batch_size=64):
    model(batch.cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
    )
    asked = ["plan", "script.py", "--gpu-memory", "700MiB", "--time-limit", "0.000001"]
    assert main(asked) in (EXIT_YES, EXIT_UNCERTAIN)
    assert "The search was cut after 0 s; " in capsys.readouterr().out


def test_a_time_limit_that_is_no_time_is_refused(train: str) -> None:
    with pytest.raises(UsageError, match="'soon' is not a time"):
        oomph.plan(train, gpu="rtx4090", time_limit="soon")
