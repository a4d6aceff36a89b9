"""An evaluation that runs out of memory gives what it gives with memory enough."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import transformers
from torchmetrics import MeanMetric

import oomph
from training.adapters import jobs
from training.stepper_kinds import MESSAGE

pytestmark = pytest.mark.filterwarnings("ignore")


class Telling:
    """Put before a model: it gives its logits, too."""

    def forward(self, ids: Any, labels: Any, number: Any, **said: Any) -> Any:
        said = said if isinstance(self, jobs.Dividing) else {}
        found = super().forward(ids, labels, number, **said)  # type: ignore[misc]
        logits = self.head(self.body(self.table(ids)))  # type: ignore[attr-defined]
        return {**found, "logits": logits}


class Tagger(Telling, jobs.Tagger):
    pass


class OfExamples(Telling, jobs.OfExamples):
    pass


class Dividing(Telling, jobs.Dividing):
    pass


def limited(job: Any, most: int | None) -> list[int]:
    """A model that has no memory for more; the sizes that it has run, in evaluation."""
    sizes: list[int] = []

    def check(module: Any, _: Any, keywords: Any) -> None:
        if module.training:
            return
        num = len(keywords["ids"])
        if most is not None and num > most:
            raise torch.OutOfMemoryError(MESSAGE)
        sizes.append(num)

    job.register_forward_pre_hook(check, with_kwargs=True)
    return sizes


# ---- Hugging Face ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Tagger, OfExamples, Dividing])
def test_the_trainers_evaluation(kind: Any, tmp_path: Path) -> None:
    found = []
    for most in (None, 5):
        job = jobs.make(kind)
        sizes = limited(job, most)
        trainer = oomph.hf.Trainer(
            model=job,
            args=transformers.TrainingArguments(
                str(tmp_path), per_device_eval_batch_size=12, report_to=[], disable_tqdm=True
            ),
            eval_dataset=jobs.examples(),
            data_collator=jobs.collate,
            compute_metrics=lambda p: {"sum": float(np.abs(p.predictions).sum())},
        )
        found.append((trainer.evaluate(), trainer.predict(jobs.examples()).predictions))
        assert (max(sizes) <= 5) == (most is not None)
    (whole, rows), (pieces, others) = found
    assert pieces["eval_loss"] == pytest.approx(whole["eval_loss"], rel=1e-6)
    assert pieces["eval_sum"] == pytest.approx(whole["eval_sum"], rel=1e-9)
    assert rows.shape == others.shape
    assert np.allclose(rows, others)


# ---- Lightning ---------------------------------------------------------------------------------


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, job: Any) -> None:
        super().__init__()
        self.job, self.seen, self.rows = job, MeanMetric(), list[Any]()

    def training_step(self, batch: Any) -> Any:
        return self.job(**batch)["loss"]

    def validation_step(self, batch: Any) -> Any:
        self.seen.update(batch["number"].double())
        out = self.job(**batch)
        self.log("val_loss", out["loss"], on_epoch=True)
        self.log("seen", self.seen, on_epoch=True)
        return {"loss": out["loss"], "rows": out["logits"]}

    def on_validation_batch_end(self, outputs: Any, *_: Any) -> None:
        self.rows.append(outputs["rows"].clone())

    def predict_step(self, batch: Any) -> Any:
        return self.job(**batch)["logits"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def test_the_validation_of_lightning(tmp_path: Path) -> None:
    found = []
    for most in (None, 5):
        job = jobs.make(Tagger)
        sizes = limited(job, most)
        guards = [oomph.lightning.Guard(weight="tokens")] if most else []
        trainer = pl.Trainer(
            accelerator="cpu",
            max_epochs=1,
            callbacks=guards,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        module = Module(job)
        torch.manual_seed(3)
        trainer.fit(module, jobs.loader(), jobs.loader())
        metrics = dict(trainer.callback_metrics)
        predicted = torch.cat(trainer.predict(module, jobs.loader()))
        assert (max(sizes) <= 5) == (most is not None)
        found.append((metrics, torch.cat(module.rows), predicted))
        assert "validation_step" not in vars(trainer.strategy)
    (whole, rows, predicted), (pieces, others, again) = found
    for name in ("val_loss", "seen"):
        assert float(pieces[name]) == pytest.approx(float(whole[name]), rel=1e-6), name
    assert torch.allclose(rows, others)
    assert torch.allclose(predicted, again)


# ---- accelerate --------------------------------------------------------------------------------


def forward(model: Any, part: Any) -> Any:
    return model(**part)


def test_the_evaluation_of_a_loop_with_accelerate() -> None:
    found = []
    for most in (None, 5):
        job = jobs.make(Tagger)
        limited(job, most)
        accelerator = accelerate.Accelerator(cpu=True)
        optimizer = torch.optim.SGD(job.parameters(), lr=0.05)
        model, optimizer, rows = accelerator.prepare(job, optimizer, jobs.loader())
        guard = oomph.accelerate.Guard(accelerator, model, optimizer, weight="tokens")
        results = [guard.evaluate(batch, functools.partial(forward, model)) for batch in rows]
        assert model.training
        assert guard.num_ooms == 0
        found.append(results)
    for one, other in zip(*found, strict=True):
        assert float(one["loss"]) == pytest.approx(float(other["loss"]), rel=1e-12)
        assert torch.allclose(one["logits"], other["logits"])
