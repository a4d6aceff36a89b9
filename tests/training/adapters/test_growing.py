"""A careful plan grows to what fits in each library, as with a Stepper, and trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import pytorch_lightning as pl
import torch
import transformers
from planning.plans import plan_of
from torch.utils.data import SequentialSampler

import oomph
from oomph.training.adapters.window import Window
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")
BATCH, PLANNED = 32, 2


class Noted:
    """How many examples were run at a time, of each batch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        close = Window.close

        def closed(window: Window) -> None:
            self.sizes += [opened.size for opened in window._opened]
            close(window)

        monkeypatch.setattr(Window, "close", closed)


def rows(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """A batch of examples of each length, numbered from 0."""
    made = [jobs.examples(BATCH, length) for length in lengths]
    every = [row for batch in made for row in batch]
    return [{**row, "number": torch.tensor(number)} for number, row in enumerate(every)]


def make() -> jobs.Wide:
    model: jobs.Wide = jobs.make(jobs.Wide, torch.float32)
    return model


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def with_hf(
    folder: Path, model: Any, data: Any, accumulated: int = 1, **options: Any
) -> tuple[Any, int]:
    class InOrder(oomph.hf.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        def _get_train_sampler(self, *_: Any) -> Any:
            return SequentialSampler(self.train_dataset)

    optimizer = optimizer_of(model)
    optimizer.register_step_pre_hook(lambda *_: model.used.step())
    trainer = InOrder(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=BATCH,
            gradient_accumulation_steps=accumulated,
            num_train_epochs=1,
            lr_scheduler_type="constant",
            max_grad_norm=0.0,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
        optimizers=(optimizer, None),
        weight="tokens",
        **options,
    )
    trainer.train()
    return trainer.model, trainer.state.global_step


def with_lightning(
    folder: Path, model: Any, data: Any, accumulated: int = 1, **options: Any
) -> tuple[Any, int]:
    class Module(pl.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.job = model

        def training_step(self, batch: Any) -> Any:
            return self.job(**batch)["loss"]

        def on_before_optimizer_step(self, _: Any) -> None:
            self.job.used.step()

        def configure_optimizers(self) -> Any:
            return optimizer_of(self)

    trainer = pl.Trainer(
        accelerator="gpu",
        devices=1,
        max_epochs=1,
        accumulate_grad_batches=accumulated,
        callbacks=[oomph.lightning.Guard(weight="tokens", **options)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), jobs.loader(data, BATCH))
    return model, trainer.global_step


def with_accelerate(
    _: Path, model: Any, data: Any, accumulated: int = 1, **options: Any
) -> tuple[Any, int]:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulated)
    made = accelerator.prepare(model, optimizer_of(model), jobs.loader(data, BATCH))
    model, optimizer, loader = made
    guard = oomph.accelerate.Guard(accelerator, model, optimizer, weight="tokens", **options)
    num_steps = 0
    for batch in loader:
        with accelerator.accumulate(model):
            guard.backward(batch, lambda part: model(**part)["loss"])
            if accelerator.sync_gradients:
                model.used.step()
                num_steps += 1
            optimizer.step()
            optimizer.zero_grad()
    return model, num_steps


def by_hand(data: Any, accumulated: int = 1) -> dict[str, torch.Tensor]:
    """On a CPU, which has memory enough."""
    model = make()
    optimizer = optimizer_of(model)
    for number, batch in enumerate(jobs.loader(data, BATCH), start=1):
        (model(**batch)["loss"] / accumulated).backward()
        if number % accumulated == 0:
            optimizer.step()
            optimizer.zero_grad()
    return jobs.weights_of(model)


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Noted:
    return Noted(monkeypatch)


LIBRARIES = pytest.mark.parametrize(
    "train", [with_hf, with_lightning, with_accelerate], ids=["hf", "lightning", "accelerate"]
)


@LIBRARIES
def test_a_careful_plan_grows_and_longer_examples_are_cut_before_they_fail(
    train: Any, noted: Noted, tmp_path: Path
) -> None:
    data = rows([32, 32, 32, 128, 128, 128])
    plan = plan_of(micro_batch=PLANNED, accumulation=BATCH // PLANNED)
    with oomph.emulated_gpu("64MiB") as gpu:
        model, num_steps = train(tmp_path, make(), data, plan=plan)
        weights = jobs.weights_of(model)
        assert gpu.num_out_of_memory == 0
    assert noted.sizes[0] == PLANNED
    assert noted.sizes[1] == noted.sizes[2] == BATCH
    assert noted.sizes[3] <= noted.sizes[4] == noted.sizes[5]
    assert PLANNED < noted.sizes[5] < BATCH, noted.sizes
    assert num_steps == 6
    assert model.used.whole == [*range(6 * BATCH)]
    jobs.assert_close(weights, by_hand(data), 1e-5)


@LIBRARIES
def test_lengths_that_vary_run_out_of_memory_once_at_most(
    train: Any, noted: Noted, tmp_path: Path
) -> None:
    """And an accumulation whose gradients are there already is no reason for smaller pieces."""
    lengths = [48, 16, 128, 96, 8, 160, 128, 160]
    data = rows(lengths)
    model = make()
    with oomph.emulated_gpu("64MiB") as gpu, jobs.undone(model.used):
        model, num_steps = train(tmp_path, model, data, accumulated=2)
        weights = jobs.weights_of(model)
        assert gpu.num_out_of_memory <= 1
    assert num_steps == len(lengths) // 2
    assert model.used.whole == [*range(len(lengths) * BATCH)]
    assert noted.sizes[-1] >= 4, noted.sizes
    jobs.assert_close(weights, by_hand(data, accumulated=2), 1e-5)


@LIBRARIES
def test_a_size_that_was_asked_for_is_never_exceeded(
    train: Any, noted: Noted, tmp_path: Path
) -> None:
    with oomph.emulated_gpu("96MiB"):
        train(tmp_path, make(), rows([32, 32, 32]), micro_batch=PLANNED)
    assert noted.sizes == [PLANNED] * 3
