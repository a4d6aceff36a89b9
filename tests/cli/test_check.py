"""`oomph check`, as typed: the answer, its exit code, and one clear error for bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from oomph.cli import main

TRAIN = """
import torch, oomph

def loss(model, batch):
    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(16, 32), torch.nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.up(x).tanh())

workload = oomph.Workload(
    model=lambda: torch.nn.Sequential(
        Block(), Block(), torch.nn.Dropout(), torch.nn.Linear(16, 10)
    ),
    batch=lambda n: {"x": torch.randn(n, 16), "y": torch.randint(0, 10, (n,))},
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters),
    batch_size=64,
)

def make():
    return workload
"""


@pytest.fixture
def train(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


def check(train: Path, *flags: str) -> int:
    return main(["check", f"{train}:workload", *flags])


def changed(train: Path, before: str, after: str) -> None:
    assert before in TRAIN
    train.write_text(TRAIN.replace(before, after))


def test_a_model_that_all_tricks_leave_as_it_is_is_exit_0(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(train, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["schema"] == 1
    assert told["num_examples"] == 8
    assert told["accumulation"]["normaliser"] == "mean"
    assert told["accumulation"]["weights"] == pytest.approx([3 / 8, 5 / 8])
    assert told["fp16"]["loss_scale"] == 2**16
    assert told["bf16"]["gradient_error_ratio"] < 0.02
    assert told["checkpointing"]["num_blocks"] == 2
    for name in ("accumulation", "fp16", "bf16", "checkpointing"):
        assert told[name]["verdict"] == "passes"
        assert told[name]["confidence"] in ("high", "fair")


def test_what_couples_examples_is_exit_1_with_its_place_and_what_to_do(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(train, "torch.nn.Dropout()", "torch.nn.BatchNorm1d(16)")
    assert check(train, "--only", "accumulation") == 1
    told = capsys.readouterr().out
    assert told.startswith("accumulation fails: ")
    assert "in 2 (batch_norm): BatchNorm1d normalises by the statistics" in told
    assert "  do: " in told
    assert "fp16" not in told


def test_what_cannot_be_told_is_exit_3(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(
        train,
        'return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])',
        'return 0 * model(batch["x"]).sum()',
    )
    assert check(train, "--only", "accumulation") == 3
    assert capsys.readouterr().out.startswith("accumulation uncertain: ")


def test_a_batch_of_zeros_is_filled_with_values_and_that_is_said(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(
        train,
        '{"x": torch.randn(n, 16), "y": torch.randint(0, 10, (n,))}',
        '{"x": torch.zeros(n, 16), "y": torch.zeros(n, dtype=torch.long)}',
    )
    assert check(train, "--only", "accumulation") == 0
    assert "confidence low: the batch's examples are all alike" in capsys.readouterr().out


def test_one_batch_as_an_example_will_do(train: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed(
        train,
        'batch=lambda n: {"x": torch.randn(n, 16), "y": torch.randint(0, 10, (n,))}',
        'batch={"x": torch.randn(6, 16), "y": torch.randint(0, 10, (6,))}',
    )
    assert check(train, "--only", "accumulation,checkpointing", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["num_examples"] == 6
    assert told["accumulation"]["piece_sizes"] == [2, 4]
    assert told["fp16"] is None


def test_a_model_that_is_too_large_is_refused_before_memory_is_taken(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changed(train, "torch.nn.Linear(16, 10)", "torch.nn.Linear(16, 10**12, bias=False)")
    assert check(train) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert "too large to be checked on this machine" in told.err
    assert "because: " in told.err
    assert "try: a smaller configuration" in told.err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(("import torch", "import torch; 1 / 0"), "ZeroDivisionError", id="on import"),
        pytest.param(
            ("cross_entropy(model(batch", "cross_entropy(model.nope(batch"),
            "train.py:5",
            id="the user's line",
        ),
        pytest.param(
            ("return torch.nn", "with torch.no_grad(): return torch.nn"),
            "needs no gradient",
            id="no gradient",
        ),
    ],
)
def test_a_workload_that_is_wrong_is_one_clear_error(
    train: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], said: str
) -> None:
    changed(train, *change)
    assert check(train) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("oomph: ")
    assert said in told.err
    assert "Traceback" not in told.err


def test_a_check_that_does_not_exist_and_too_few_examples_are_refused(
    train: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check(train, "--only", "fp8") == 2
    assert "the checks are accumulation, fp16, bf16, checkpointing" in capsys.readouterr().err
    assert check(train, "--examples", "2") == 2
    assert "cannot be split unevenly" in capsys.readouterr().err
