"""The examples of docs/training.md train, on a GPU that is too small for their batches."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import accelerate
import pytest
import pytorch_lightning as pl
import torch
import transformers

import oomph
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")
DOCUMENT = Path(__file__).parents[3] / "docs" / "training.md"
SECTION = re.compile(r"## With Hugging Face Trainer.*?(?=\n## )", re.DOTALL)
BATCH, NUM = 32, 64


def example(containing: str) -> str:
    section = SECTION.search(DOCUMENT.read_text())
    assert section
    codes = re.findall(r"```python\n(.*?)```", section[0], re.DOTALL)
    (found,) = [code for code in codes if containing in code]
    return str(found)


def test_every_example_of_the_section_is_run_here() -> None:
    section = SECTION.search(DOCUMENT.read_text())
    assert section
    assert section[0].count("```python") == 4


class Wide(jobs.Wide):
    """Gives what models of transformers give."""

    def forward(self, ids: Any, labels: Any = None, number: Any = None) -> Any:
        if labels is not None:
            loss = super().forward(ids, labels, number)["loss"]
            return transformers.utils.ModelOutput(loss=loss)
        self.used.note(number)
        logits = self.head(self.body(self.table(ids))).mean(1)
        return transformers.utils.ModelOutput(logits=logits)


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.model = jobs.make(Wide, torch.float32)

    def training_step(self, batch: Any) -> Any:
        return self.model(**batch).loss

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.model.used.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def arguments(folder: Path) -> Any:
    return transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        num_train_epochs=1,
        optim="sgd",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )


def test_the_trainer_in_place_of_transformers(tmp_path: Path) -> None:
    with oomph.emulated_gpu("36MiB") as gpu:
        names = {
            "model": jobs.make(Wide, torch.float32),
            "args": arguments(tmp_path),
            "data": jobs.examples(NUM, 32),
        }
        exec(example("oomph.hf.Trainer("), names)  # noqa: S102
        assert gpu.num_out_of_memory == 1
        assert names["trainer"].state.global_step == NUM // BATCH


def test_the_mixin_before_a_trainer(tmp_path: Path) -> None:
    rows = jobs.examples(NUM, 32)
    with oomph.emulated_gpu("36MiB") as gpu:
        names = {
            "oomph": oomph,
            "torch": torch,
            "Trainer": transformers.Trainer,
            "model": jobs.make(Wide, torch.float32),
            "args": arguments(tmp_path),
            "data": [{**row, "labels": row["number"] % jobs.NUM_CLASSES} for row in rows],
        }
        exec(example("TrainerMixin"), names)  # noqa: S102
        trainer: Any = names["trainer"]
        assert gpu.num_out_of_memory == 0
        assert trainer._oomph_window.micro_batch == 8
        assert trainer.state.global_step == NUM // BATCH


def test_the_guard_of_lightning(tmp_path: Path) -> None:
    quiet = {"enable_checkpointing": False, "enable_model_summary": False, "logger": False}

    def trainer(**options: Any) -> Any:
        return pl.Trainer(enable_progress_bar=False, default_root_dir=tmp_path, **quiet, **options)

    module = Module()
    with oomph.emulated_gpu("36MiB"), jobs.undone(module.model.used):
        rows = jobs.loader(jobs.examples(NUM, 32), BATCH)
        names = {"oomph": oomph, "Trainer": trainer, "module": module, "loader": rows}
        exec(example("oomph.lightning.Guard"), names)  # noqa: S102
        assert names["guard"].num_ooms == 1
    assert module.model.used.whole == [*range(NUM)]


def test_the_guard_of_accelerate() -> None:
    model = jobs.make(Wide, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    with oomph.emulated_gpu("36MiB"), jobs.undone(model.used):
        names = {
            "oomph": oomph,
            "accelerator": accelerate.Accelerator(),
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1),
            "loader": jobs.loader(jobs.examples(NUM, 32), BATCH),
        }
        exec(example("oomph.accelerate.Guard"), names)  # noqa: S102
        assert names["guard"].num_ooms == 1
    assert model.used.since == [*range(NUM)]
