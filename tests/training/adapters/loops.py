"""One epoch over a job's data, in order, by each library, with oomph or without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytorch_lightning as pl
import torch
import transformers
from pytorch_lightning.strategies import DDPStrategy
from torch import distributed
from torch.utils.data import SequentialSampler

import oomph
from training.adapters import jobs

BATCH = 32


def make() -> jobs.Wide:
    model: jobs.Wide = jobs.make(jobs.Wide, torch.float32)
    return model


def optimizer_of(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def with_hf(
    folder: Path,
    model: Any,
    data: Any,
    accumulated: int = 1,
    *,
    is_guarded: bool = True,
    **options: Any,
) -> tuple[Any, int]:
    kinds = (oomph.hf.TrainerMixin, transformers.Trainer) if is_guarded else (transformers.Trainer,)

    class InOrder(*kinds):  # type: ignore[misc]
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
            ddp_backend="gloo" if distributed.is_initialized() else None,
        ),
        train_dataset=data,
        optimizers=(optimizer, None),
        **({"weight": "tokens", **options} if is_guarded else {}),
    )
    trainer.train()
    return trainer.model, trainer.state.global_step


def with_lightning(
    folder: Path,
    model: Any,
    data: Any,
    accumulated: int = 1,
    *,
    is_guarded: bool = True,
    **options: Any,
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
        callbacks=[oomph.lightning.Guard(weight="tokens", **options)] if is_guarded else [],
        **_on_ranks(),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    trainer.fit(Module(), jobs.loader(data, BATCH))
    return model, trainer.global_step


def _on_ranks() -> dict[str, Any]:
    """Each rank is a machine with one GPU: emulated, each process has one."""
    if not distributed.is_initialized():
        return {}
    strategy = DDPStrategy(process_group_backend="gloo")
    return {"strategy": strategy, "num_nodes": distributed.get_world_size()}


def with_accelerate(
    _: Path,
    model: Any,
    data: Any,
    accumulated: int = 1,
    *,
    is_guarded: bool = True,
    **options: Any,
) -> tuple[Any, int]:
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=accumulated)
    made = accelerator.prepare(model, optimizer_of(model), jobs.loader(data, BATCH))
    model, optimizer, loader = made
    guard: Any = None
    if is_guarded:
        guard = oomph.accelerate.Guard(accelerator, model, optimizer, weight="tokens", **options)
    bare, num_steps = accelerator.unwrap_model(model), 0
    for batch in loader:
        with accelerator.accumulate(model):
            if guard:
                guard.backward(batch, lambda part: model(**part)["loss"])
            else:
                accelerator.backward(model(**batch)["loss"])
            if accelerator.sync_gradients:
                bare.used.step()
                num_steps += 1
            optimizer.step()
            optimizer.zero_grad()
    return bare, num_steps
