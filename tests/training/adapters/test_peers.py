"""What each library does by itself about the same shortage: another batch, or examples twice."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import accelerate
import pytest
import pytorch_lightning as pl
import torch
import transformers
from torch.utils.data import DataLoader, SequentialSampler

import oomph
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, NUM, BUDGET = 32, 160, "36MiB"
NUM_STEPS = NUM // BATCH


def rows() -> list[dict[str, torch.Tensor]]:
    """Two batches that fit, and three that are longer and do not."""
    short, long = jobs.examples(NUM, 8)[: 2 * BATCH], jobs.examples(NUM, 32)[2 * BATCH :]
    return [*short, *long]


def padded(some: Any) -> Any:
    def column(name: str, filling: int) -> Any:
        return torch.nn.utils.rnn.pad_sequence(
            [row[name] for row in some], batch_first=True, padding_value=filling
        )

    number = torch.stack([row["number"] for row in some])
    return {"ids": column("ids", 0), "labels": column("labels", -100), "number": number}


def loader(batch: int) -> Any:
    return DataLoader(rows(), batch, collate_fn=padded)  # type: ignore[arg-type]


def make() -> Any:
    return jobs.make(jobs.Wide, torch.float32)


# ---- Hugging Face ------------------------------------------------------------------------------


class InOrder:
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Stepping(transformers.TrainerCallback):  # type: ignore[misc]
    def __init__(self, used: jobs.Used) -> None:
        self._used = used

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self._used.step()


def hugging_face(folder: Path, kind: Any) -> Any:
    model = make()
    with oomph.emulated_gpu(BUDGET), jobs.undone(model.used):
        trainer = type("InOrderly", (InOrder, kind), {})(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=str(folder),
                per_device_train_batch_size=BATCH,
                num_train_epochs=1,
                auto_find_batch_size=True,
                optim="sgd",
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
            ),
            train_dataset=rows(),
            data_collator=padded,
            callbacks=[Stepping(model.used)],
        )
        trainer.train()
    return trainer


def test_auto_find_batch_size_trains_on_examples_twice_and_with_another_batch(
    tmp_path: Path,
) -> None:
    trainer = hugging_face(tmp_path, transformers.Trainer)
    assert trainer._train_batch_size < BATCH
    assert trainer.state.global_step > NUM_STEPS
    times = Counter(trainer.model.used.whole)
    assert max(times.values()) > 1
    assert len(times) == NUM


def test_with_oomph_it_finds_nothing_to_change(tmp_path: Path) -> None:
    trainer = hugging_face(tmp_path, oomph.hf.Trainer)
    assert trainer._oomph_window.micro_batch < BATCH  # longer examples are cut before they fail
    assert trainer._oomph_window.num_ooms <= 1
    assert trainer._train_batch_size == BATCH
    assert trainer.state.global_step == NUM_STEPS
    assert trainer.model.used.whole == [*range(NUM)]


# ---- Lightning ---------------------------------------------------------------------------------


class Module(pl.LightningModule):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__()
        self.job, self.batch_size = make(), BATCH

    def train_dataloader(self) -> Any:
        return loader(self.batch_size)

    def training_step(self, batch: Any) -> Any:
        return self.job(**batch)["loss"]

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.job.used.step()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def lightning(folder: Path, callback: Any) -> Any:
    module = Module()
    with oomph.emulated_gpu(BUDGET), jobs.undone(module.job.used):
        trainer = pl.Trainer(
            accelerator="gpu",
            devices=1,
            max_epochs=1,
            callbacks=[callback],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module)
    return trainer


def test_batch_size_finder_trains_with_another_batch(tmp_path: Path) -> None:
    finder = pl.callbacks.BatchSizeFinder(init_val=BATCH)
    trainer = lightning(tmp_path, finder)
    assert finder.optimal_batch_size < BATCH
    assert trainer.global_step > NUM_STEPS


def test_with_the_guard_lightning_keeps_the_batch(tmp_path: Path) -> None:
    guard = oomph.lightning.Guard(weight="tokens")
    trainer = lightning(tmp_path, guard)
    assert guard.micro_batch is not None
    assert guard.micro_batch < BATCH
    assert guard.num_ooms <= 1
    assert trainer.global_step == NUM_STEPS
    assert trainer.lightning_module.job.used.whole == [*range(NUM)]


# ---- accelerate --------------------------------------------------------------------------------


def by_accelerate(batch_size: int, model: Any, *, is_guarded: bool) -> int:
    """One epoch; the number of steps."""
    accelerator = accelerate.Accelerator()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    model, optimizer, batches = accelerator.prepare(model, optimizer, loader(batch_size))
    guard = oomph.accelerate.Guard(accelerator, model, optimizer, weight="tokens")
    for batch in batches:
        if is_guarded:
            guard.backward(batch, lambda part: model(**part)["loss"])
        else:
            accelerator.backward(model(**batch)["loss"])
        model.used.step()
        optimizer.step()
        optimizer.zero_grad()
    return len(batches)


def test_find_executable_batch_size_begins_again_with_another_batch() -> None:
    model, tried = make(), []

    def train(batch_size: int) -> int:
        model.used.undo()
        tried.append(batch_size)
        return by_accelerate(batch_size, model, is_guarded=False)

    with oomph.emulated_gpu(BUDGET):
        num_steps = accelerate.utils.find_executable_batch_size(train, BATCH)()
    assert tried[-1] < BATCH
    assert num_steps > NUM_STEPS
    assert max(Counter(model.used.whole).values()) == len(tried) > 1


def test_with_the_guard_accelerate_keeps_the_batch() -> None:
    model = make()
    with oomph.emulated_gpu(BUDGET), jobs.undone(model.used):
        num_steps = by_accelerate(BATCH, model, is_guarded=True)
    assert num_steps == NUM_STEPS
    assert model.used.whole == [*range(NUM)]
