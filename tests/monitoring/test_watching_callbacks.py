"""Hugging Face's Trainer and Lightning's, for real on the CPU, with oomph's callbacks."""

from __future__ import annotations

import csv
import dataclasses
import re
import time
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning
import torch
import transformers
from pytorch_lightning.loggers import CSVLogger
from torch.utils.data import DataLoader, Dataset

import oomph
from oomph.monitoring.step_log import StepLog
from oomph.records.run import Run
from oomph.sensing.ownership import RUN_DIRECTORY
from oomph.verbs.watch import load_run, runs

NUM_SAMPLES, SLEEP_S = 24, 0.01
MEASURED = {"time/step_s", "time/data_wait_ratio", "throughput/samples_s"}


@pytest.fixture(autouse=True)
def kept_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name in (RUN_DIRECTORY, "RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path / "runs"))
    return tmp_path / "runs"


def the_run() -> Run:
    (summary,) = runs()
    return load_run(summary.id)


def phases(run: Run) -> list[str]:
    return [event.text for event in run.events if event.kind == "phase"]


class Samples(Dataset[Any]):
    """Each takes its time."""

    def __init__(self, sleep_s: float = SLEEP_S) -> None:
        self._sleep_s = sleep_s

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        time.sleep(self._sleep_s)
        return {"x": torch.full((4,), number / 10), "labels": torch.tensor(0.0)}


def check_steps(run: Run, *, num_steps: int) -> None:
    """Two epochs of all samples, each of which was waited for."""
    spans = run.step_spans
    assert sum(span.num_steps for span in spans) == num_steps
    assert sum(span.num_samples or 0 for span in spans) == 2 * NUM_SAMPLES
    waited_s = sum(span.data_wait_s or 0 for span in spans)
    took_s = sum(span.step_s * span.num_steps for span in spans)
    assert 2 * NUM_SAMPLES * SLEEP_S <= waited_s < took_s


# ---- Hugging Face --------------------------------------------------------------------------------


class Model(torch.nn.Module):
    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 1)
        self._fails_at = fails_at
        self.num_calls = 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        self.num_calls += 1
        if self.num_calls == self._fails_at:
            torch.zeros(100 << 20, device="cuda")  # of a card with 64 MiB
        return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}


class Reported(transformers.TrainerCallback):  # type: ignore[misc]
    """Logs at once what it is given, as TensorBoard's and W&B's callbacks do."""

    def __init__(self) -> None:
        self.logs: list[dict[str, float]] = []

    def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
        self.logs.append(dict(logs))


def hf_trainer(tmp_path: Path, model: Any, callbacks: list[Any], **options: Any) -> Any:
    stated: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "logging_steps": 1,
        "report_to": [],
        "eval_strategy": "epoch",
        **options,
    }
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "hf"),
        per_device_train_batch_size=4,
        num_train_epochs=2,
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
        **stated,
    )
    return transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=Samples(),
        eval_dataset=Samples(0.0),
        callbacks=callbacks,
    )


def test_hugging_faces_trainer_tells_steps_waits_epochs_and_evaluations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hf_trainer(tmp_path, Model(), [oomph.hf.Watching()]).train()
    run = the_run()
    check_steps(run, num_steps=6)
    of_an_epoch = ["evaluation", "training"]
    assert phases(run) == [
        "start-up",
        "training",
        "epoch 1 ended",
        *of_an_epoch,
        "epoch 2 ended",
        *of_an_epoch,
    ]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch ")]
    assert [line.partition(" of ")[0] for line in lines] == ["epoch 1: 3 steps", "epoch 2: 3 steps"]
    assert run.ending is not None
    assert run.ending.exit_code == 0


def test_what_reports_before_it_in_the_trainers_list_gets_the_figures_beside_the_loss(
    tmp_path: Path,
) -> None:
    reported = Reported()
    hf_trainer(tmp_path, Model(), [reported, oomph.hf.Watching(prints=False)]).train()
    of_steps = [logs for logs in reported.logs if "loss" in logs]
    assert len(of_steps) == 6
    for logs in of_steps:
        assert logs.keys() >= MEASURED
        assert 0 < logs["time/data_wait_ratio"] < 1
    others = [logs for logs in reported.logs if "loss" not in logs]
    assert not any("time/" in name for logs in others for name in logs)


def test_the_wait_is_known_of_steps_whose_batch_was_fetched_in_the_one_before(
    tmp_path: Path,
) -> None:
    reported = Reported()
    callbacks = [reported, oomph.hf.Watching(prints=False)]
    hf_trainer(tmp_path, Model(), callbacks, gradient_accumulation_steps=1, logging_steps=3).train()
    of_steps = [logs for logs in reported.logs if "loss" in logs]
    assert len(of_steps) == 4
    for logs in of_steps:  # the second three of an epoch fetch only two batches
        assert logs.keys() >= MEASURED
        assert 0 < logs["time/data_wait_ratio"] < 1
    check_steps(the_run(), num_steps=12)


def test_tensorboard_gets_the_figures_at_the_trainers_steps_and_under_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    callbacks = [oomph.hf.Watching(prints=False)]
    hf_trainer(tmp_path, Model(), callbacks, logging_steps=2, report_to=["tensorboard"]).train()
    board = accumulator.EventAccumulator(str(tmp_path / "board")).Reload()
    ours = [name for name in board.Tags()["scalars"] if name.count("/") == 2]
    assert {name.removeprefix("train/") for name in ours} >= MEASURED
    assert len(ours) <= 8
    for name in MEASURED:
        assert [event.step for event in board.Scalars(f"train/{name}")] == [2, 4, 6]


def test_a_trainer_learns_the_same_with_the_callback_as_without(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [oomph.hf.Watching(prints=False)]):
        torch.manual_seed(1)
        model = Model()
        trainer = hf_trainer(tmp_path, model, callbacks)
        trainer.train()
        weights.append(model.linear.weight.detach().clone())
    assert torch.equal(*weights)


def test_a_trainer_that_stops_within_an_epoch_ends_none(tmp_path: Path) -> None:
    trainer = hf_trainer(tmp_path, Model(), [oomph.hf.Watching(prints=False)], max_steps=4)
    trainer.train()
    run = the_run()
    assert sum(span.num_steps for span in run.step_spans) == 4
    assert [text for text in phases(run) if text.endswith("ended")] == ["epoch 1 ended"]


def test_a_trainer_within_a_block_tells_the_blocks_run_also_that_memory_ran_out(
    tmp_path: Path,
) -> None:
    trainer = hf_trainer(tmp_path, Model(fails_at=5), [oomph.hf.Watching(prints=False)])
    with (
        oomph.emulated_gpu("64MiB"),
        pytest.raises(torch.OutOfMemoryError),
        oomph.watching(prints=False),
    ):
        trainer.train()
    run = the_run()
    assert run.ending is not None
    assert run.ending.out_of_memory == "gpu"
    assert [event.kind for event in run.events].count("out-of-memory") == 1
    assert sum(span.num_steps for span in run.step_spans) == 2


def test_a_trainer_that_is_started_again_after_an_error_begins_a_run_of_its_own(
    tmp_path: Path,
) -> None:
    trainer = hf_trainer(tmp_path, Model(fails_at=5), [oomph.hf.Watching(prints=False)])
    with oomph.emulated_gpu("64MiB"), pytest.raises(torch.OutOfMemoryError):
        trainer.train()
    trainer.train()
    kept = [load_run(summary.id) for summary in runs()]
    before, again = sorted(kept, key=lambda run: run.started_at)
    assert before.ending is not None
    check_steps(again, num_steps=6)


def test_a_fault_in_the_callback_does_not_reach_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("the log is broken")

    monkeypatch.setattr(StepLog, "steps", broken)
    trainer = hf_trainer(tmp_path, Model(), [oomph.hf.Watching()])
    trainer.train()
    assert trainer.state.global_step == 6
    told = [line for line in capsys.readouterr().err.splitlines() if "no longer" in line]
    assert told == ["oomph: the training is no longer watched (RuntimeError: the log is broken)"]


# ---- Lightning -----------------------------------------------------------------------------------


class Module(pytorch_lightning.LightningModule):  # type: ignore[misc]
    def __init__(self, *, fails_at: int | None = None) -> None:
        super().__init__()
        self.model = Model(fails_at=fails_at)

    def training_step(self, batch: Any, *_: Any) -> Any:
        return self.model(**batch)["loss"]

    def validation_step(self, batch: Any, *_: Any) -> None:
        self.log("val_loss", self.model(**batch)["loss"])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 1e-3)


def lightning_trainer(tmp_path: Path, **options: Any) -> Any:
    return pytorch_lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        accumulate_grad_batches=2,
        logger=CSVLogger(tmp_path / "logs"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        **options,
    )


def loaders() -> list[Any]:
    return [DataLoader(Samples(), 4), DataLoader(Samples(0.0), 4)]


# Lightning warns of loaders without workers, and uses what torch calls deprecated.
QUIET = pytest.mark.filterwarnings("ignore")


@QUIET
def test_lightning_tells_steps_waits_epochs_and_evaluations_and_logs_to_its_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = lightning_trainer(tmp_path, callbacks=[oomph.lightning.Watching()])
    trainer.fit(Module(), *loaders())
    run = the_run()
    check_steps(run, num_steps=6)
    assert phases(run).count("evaluation") == 2
    assert [text for text in phases(run) if text.endswith("ended")] == [
        "epoch 1 ended",
        "epoch 2 ended",
    ]
    with (Path(trainer.logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["time/step_s"]]
    assert [row["step"] for row in rows] == [str(number) for number in range(6)]
    assert all(0 < float(row["time/data_wait_ratio"]) < 1 for row in rows)
    assert rows[0].keys() >= MEASURED
    printed = capsys.readouterr().out
    assert "epoch 1: 3 steps of " in printed
    assert "epoch 2: 3 steps of " in printed


@QUIET
def test_lightnings_tensorboard_gets_the_figures_beside_the_modules_own(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from pytorch_lightning.loggers import TensorBoardLogger

    callback = oomph.lightning.Watching(prints=False)
    trainer = lightning_trainer(tmp_path, callbacks=[callback])
    trainer.loggers = [TensorBoardLogger(tmp_path)]
    trainer.fit(Module(), *loaders())
    board = accumulator.EventAccumulator(trainer.logger.log_dir).Reload()
    for name in MEASURED:
        assert [event.step for event in board.Scalars(name)] == list(range(6))


@QUIET
def test_memory_that_runs_out_in_lightning_is_noted_and_raised(tmp_path: Path) -> None:
    trainer = lightning_trainer(
        tmp_path, num_sanity_val_steps=0, callbacks=[oomph.lightning.Watching(prints=False)]
    )
    with oomph.emulated_gpu("64MiB"), pytest.raises(torch.OutOfMemoryError):
        trainer.fit(Module(fails_at=5), *loaders())
    run = the_run()
    assert run.ending is not None
    assert (run.ending.exit_code, run.ending.out_of_memory) == (1, "gpu")
    assert sum(span.num_steps for span in run.step_spans) == 2


@QUIET
def test_each_training_is_a_run_of_its_own_and_leaves_lightning_as_it_was(
    tmp_path: Path,
) -> None:
    for _ in range(2):
        callback = oomph.lightning.Watching(prints=False)
        trainer = lightning_trainer(tmp_path, callbacks=[callback])
        trainer.fit(Module(), *loaders())
        hooks = vars(trainer.fit_loop.epoch_loop)
        assert "_on_before_fetch" not in hooks
    assert len(runs()) == 2


# ---- the manual ----------------------------------------------------------------------------------

MANUAL = Path(__file__).parents[2] / "docs" / "watching.md"


def examples() -> list[str]:
    section = MANUAL.read_text().partition("\n## In the script\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


@QUIET
def test_the_examples_of_the_manual_train_and_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # where Lightning leaves its logs
    plain, of_hf, of_lightning = examples()
    linear = torch.nn.Linear(3, 1)
    exec(  # noqa: S102 - our own manual
        plain,
        {
            "loader": [torch.ones(8, 3)] * 5,
            "model": linear,
            "optimizer": torch.optim.SGD(linear.parameters(), 0.1),
            "evaluate": lambda _: None,
        },
    )
    assert capsys.readouterr().out.count(": 5 steps of ") == 3
    trainer = hf_trainer(tmp_path, Model(), [])
    exec(  # noqa: S102
        of_hf,
        {
            "oomph": oomph,
            "model": Model(),
            "args": dataclasses.replace(trainer.args, eval_strategy="no"),
            "data": Samples(0.0),
        },
    )
    assert capsys.readouterr().out.count(": 3 steps of ") == 2
    exec(  # noqa: S102
        of_lightning,
        {"oomph": oomph, "module": Module(), "loader": DataLoader(Samples(0.0), 4)},
    )
    assert "epoch 1: 6 steps of " in capsys.readouterr().out
    assert len(runs()) == 3
