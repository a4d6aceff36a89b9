"""A loop with accelerate and out-of-memory errors trains as it does without."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch

import oomph
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")


class Run:
    """A loop as accelerate's documentation has it, with a guard or without."""

    def __init__(self, job: Any, accumulated: int, **options: Any) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=accumulated, **options
        )
        optimizer = torch.optim.SGD(job.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        made = self.accelerator.prepare(job, optimizer, jobs.loader(), schedule)
        self.model, self.optimizer, self.loader, self.schedule = made
        self.losses: list[float] = []

    def epoch(self, guard: Any = None, faults: jobs.Faults | None = None) -> None:
        is_begin = True
        for batch in self.loader:
            with self.accelerator.accumulate(self.model):
                if faults and is_begin:
                    guard._window.forget_sizes()
                    faults.begin_step()
                self.losses.append(float(self.backward(batch, guard)))
                is_begin = self.accelerator.sync_gradients
                if is_begin:
                    faults.end_step() if faults else self.model.used.step()
                    self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()

    def backward(self, batch: Any, guard: Any) -> Any:
        if guard:
            return guard.backward(batch, lambda part: self.model(**part)["loss"])
        loss = self.model(**batch)["loss"]
        self.accelerator.backward(loss)
        return loss


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("kind", "weight"), [(jobs.Tagger, "tokens"), (jobs.OfExamples, "mean")], ids=["tokens", "mean"]
)
def test_training_with_errors_is_training_without(kind: Any, weight: Any, accumulated: int) -> None:
    whole = Run(jobs.make(kind), accumulated)
    whole.epoch()
    whole.epoch()
    run = Run(jobs.make(kind), accumulated)
    guard = oomph.accelerate.Guard(run.accelerator, run.model, run.optimizer, weight=weight)
    faults = jobs.Faults(run.model.used)
    with faults.injector:
        run.epoch(guard, faults)
        run.epoch(guard, faults)
    assert guard.num_ooms == faults.num_raised >= 4
    assert run.model.used.whole == [*range(jobs.NUM)] * 2
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    assert run.schedule.get_last_lr() == whole.schedule.get_last_lr()
    jobs.assert_close(jobs.weights_of(run.model), jobs.weights_of(whole.model), 1e-12)
