"""`oomph stability` on data that the workload draws: the same with a seed, and resumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph import cli
from oomph.errors import UsageError
from oomph.records.stability_study import StabilityStudy
from oomph.records.stored import from_json_file
from oomph.training import branched_runs as runs
from oomph.verbs.stability import study_stability

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(600, 12, generator=GENERATOR)
Y = (X[:, :4] + torch.randn(600, 4, generator=GENERATOR)).argmax(1)


def draw(n: int) -> Any:
    rows = torch.randint(len(X), (n,))
    return {"x": X[rows], "y": Y[rows]}


WORKLOAD = oomph.Workload(
    model=lambda: nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 4)),
    batch=draw,
    loss=lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"]),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5),
    batch_size=32,
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def study(folder: Path, workload: Any = WORKLOAD, **options: Any) -> StabilityStudy:
    given = {"batch_sizes": [8], "num_examples": 640, "out": str(folder / "stability.json")}
    return study_stability(workload, **{**given, **options})


def without_times(found: StabilityStudy) -> StabilityStudy:
    return replace(found, runs=tuple(replace(run, lasted_s=0.0) for run in found.runs))


def test_a_study_compares_batches_after_the_same_examples_and_repeats_by_seed(
    tmp_path: Path,
) -> None:
    one, other = study(tmp_path), study(tmp_path)
    assert without_times(one) == without_times(other)
    assert [(cell.batch_size, cell.rule) for cell in one.cells] == [
        (8, "scaled"),
        (8, "kept"),
        (32, "as-is"),
    ]
    assert [cell.learning_rate for cell in one.cells] == [0.125, 0.5, 0.5]
    assert [cell.num_steps for cell in one.cells] == [80, 80, 20]
    assert all(cell.loss is not None and cell.loss < one.start_loss for cell in one.cells)
    assert one.diverging_rate is not None
    assert one.diverging_rate > 0.5
    kept = from_json_file(StabilityStudy, tmp_path / "stability.json", what="a study")
    assert kept == other
    assert study(tmp_path, seed=7).cells != one.cells


def test_an_interrupted_study_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = study(tmp_path)
    made: list[Any] = []
    run = runs.Bench.run

    def interrupted(self: Any, job: Any, num_examples: int) -> Any:
        made.append(job)
        if len(made) == 3:
            raise KeyboardInterrupt
        return run(self, job, num_examples)

    monkeypatch.setattr(runs.Bench, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        study(tmp_path)
    assert (tmp_path / "stability.json.part").exists()
    resumed = study(tmp_path)
    assert len(made) == 3 + 4  # of six runs, two were finished
    assert without_times(resumed) == without_times(whole)
    assert not (tmp_path / "stability.json.part").exists()


def test_another_question_begins_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(runs.Bench, "run", fails)
        with pytest.raises(KeyboardInterrupt):
            study(tmp_path)
    assert study(tmp_path, num_examples=320).num_examples == 320


@pytest.mark.parametrize(
    "batch",
    [draw(8), lambda n: {"x": torch.zeros(n, 12), "y": torch.zeros(n, dtype=torch.long)}],
    ids=["one batch", "zeros"],
)
def test_a_workload_without_data_is_refused(batch: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be trained on"):
        study(tmp_path, replace(WORKLOAD, batch=batch))


def test_minutes_decide_how_many_examples() -> None:
    todo = list(runs.jobs([8, 32], 32, [0, 1]))
    assert len(todo) == 6
    num = runs.examples_within(10.0, todo, lambda size: 0.001 * size, most=10**9)
    assert num == pytest.approx(10.0 / (6 * 0.001), abs=32)
    assert num % 32 == 0


def test_it_trains_on_an_emulated_gpu(tmp_path: Path) -> None:
    with oomph.emulated_gpu("256MiB"):
        found = study(tmp_path, num_examples=64, num_seeds=1)
    assert found.device == "cuda"


FILE = """
import torch
from torch import nn
import oomph

def draw(n):
    x = torch.randn(n, 4)
    return {"x": x, "y": x.sum(1, keepdim=True)}

workload = oomph.Workload(
    model=lambda: nn.Linear(4, 1),
    batch=draw,
    loss=lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(),
    optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
    batch_size=16,
)
"""


def test_the_command_prints_an_answer_a_table_and_a_plot(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(FILE)
    command = ["stability", "train.py:workload", "--batch-sizes", "4", "--examples", "1600"]
    code = cli.main(command)
    said = capsys.readouterr()
    assert code in (0, 3)
    assert "trains as well as your 16" in said.out.replace("\n", " ")
    assert "oscillation" in said.out
    assert "█" in said.out or "#" in said.out
    assert "larger batch" not in said.out  # none was tried
    assert cli.main([*command, "--json"]) in (0, 3)
    assert json.loads(capsys.readouterr().out)["batch_size"] == 16
