"""Ways to find how many examples fit at a time, and what becomes of a job by each of them.

The searches are the libraries' own code; a trial is a real one, on an emulated GPU.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.job_trials import Job


@dataclass(frozen=True)
class Outcome:
    num_ooms: int
    shares: tuple[float, ...]  # of the largest size that fits, of each length
    keeps_batch: bool
    num_repeated: int = 0  # samples that were trained on twice, or from the beginning
    num_lost: int = 0  # samples that were not trained on


def by_stepper(job: Job, *, is_planned: bool = True) -> Outcome:
    import torch

    import oomph

    used: list[int] = []
    of_batch: list[int] = []
    sizes: dict[int, int] = {}
    trained = job.trained

    def loss(model: Any, batch: Any) -> Any:
        of_batch.extend(batch.pop("number").tolist())
        return trained.loss(model, batch)

    with oomph.emulated_gpu(job.budget_bytes) as gpu:
        model = trained.model().cuda()
        optimizer = trained.optimizer(model.parameters())
        stepper = oomph.Stepper(
            model,
            optimizer,
            loss,
            plan=job.plan if is_planned else None,
            device="cuda",
            say=lambda _: of_batch.clear(),
        )
        for at, length in enumerate(job.order):
            of_batch.clear()
            numbers = torch.arange(job.batch_size) + at * job.batch_size
            batch = {**trained.batch(job.batch_size, length), "number": numbers}
            sizes[length] = stepper(batch).micro_batch
            used += of_batch
    every = len(job.order) * job.batch_size
    return Outcome(
        num_ooms=gpu.num_out_of_memory,
        shares=tuple(_share(size, job.largest(length)) for length, size in sizes.items()),
        keeps_batch=True,
        num_repeated=len(used) - len(set(used)),
        num_lost=every - len(set(used)),
    )


def _share(size: int, largest: int) -> float:
    """No more than all: what began smaller may have left better segments than a fresh start has."""
    return min(size / max(largest, 1), 1.0)


class Restarted:
    """A training function that is called again with smaller batches, as these searches want it."""

    def __init__(self, job: Job) -> None:
        self.job, self.num_ooms, self.num_repeated = job, 0, 0

    def __call__(self, batch_size: int) -> int:
        for first in range(0, len(self.job.order) * self.job.batch_size, batch_size):
            if not self.fits(batch_size, first):
                self.num_repeated += first
                raise self.error()
        return batch_size

    def fits(self, size: int, sample: int) -> bool:
        job = self.job
        length = job.length_at(sample)
        return job.trials.fits(job.budget_bytes, size, length, is_split=False)

    def error(self) -> Exception:
        import torch

        self.num_ooms += 1
        return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")


def _outcome(job: Job, size: int, tried: Restarted, num_lost: int = 0) -> Outcome:
    longest = max(job.order)
    return Outcome(
        num_ooms=tried.num_ooms,
        shares=(_share(size, job.largest(longest)),),
        keeps_batch=size == job.batch_size,
        num_repeated=tried.num_repeated,
        num_lost=num_lost,
    )


def by_accelerate(job: Job) -> Outcome:
    from accelerate.utils import find_executable_batch_size

    train = Restarted(job)
    found = find_executable_batch_size(
        lambda batch_size: train(batch_size), starting_batch_size=job.batch_size
    )()
    return _outcome(job, found, train)


def by_hugging_face(job: Job) -> Outcome:
    from transformers.trainer_utils import find_executable_batch_size

    train = Restarted(job)
    found = find_executable_batch_size(
        lambda batch_size: train(batch_size),
        starting_batch_size=job.batch_size,
        auto_find_batch_size=True,
    )()
    return _outcome(job, found, train)


def by_lightning(job: Job) -> Outcome:
    """The search before training; what runs out of memory after it ends the training."""
    tried = Restarted(job)
    found = _scaled(tried)
    num_samples = len(job.order) * job.batch_size
    for first in range(0, num_samples, found):
        if not tried.fits(found, first):
            tried.error()
            return _outcome(job, found, tried, num_samples - first)
    return _outcome(job, found, tried)


def _scaled(tried: Restarted) -> int:
    import pytorch_lightning as lightning
    import torch
    from pytorch_lightning.tuner import Tuner

    num_samples = len(tried.job.order) * tried.job.batch_size

    class Module(lightning.LightningModule):  # type: ignore[misc, unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.batch_size = 2
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def train_dataloader(self) -> Any:
            samples: Any = range(num_samples)
            return torch.utils.data.DataLoader(samples, self.batch_size)

        def training_step(self, batch: Any, _: int) -> Any:
            if not tried.fits(len(batch), int(batch[0])):
                raise tried.error()
            return self.weight.sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=directory,
        )
        Tuner(trainer).scale_batch_size(module)
    return module.batch_size


WAYS: dict[str, Callable[[Job], Outcome]] = {
    "oomph.Stepper with a plan": by_stepper,
    "oomph.Stepper without one": functools.partial(by_stepper, is_planned=False),
    "accelerate find_executable_batch_size": by_accelerate,
    "transformers auto_find_batch_size": by_hugging_face,
    "Lightning BatchSizeFinder": by_lightning,
}
