"""A loop with accelerate and out-of-memory errors trains as it does without."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch

import oomph
from oomph.errors import OomphError, UsageError
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")


class Run:
    """A loop as accelerate's documentation has it, with a guard or without."""

    def __init__(
        self, job: Any, accumulated: int, *, rows: Any = None, cpu: bool = True, **options: Any
    ) -> None:
        self.accelerator = accelerate.Accelerator(
            cpu=cpu, gradient_accumulation_steps=accumulated, **options
        )
        optimizer = torch.optim.SGD(job.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        made = self.accelerator.prepare(job, optimizer, rows or jobs.loader(), schedule)
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


# Where errors are counted one by one: they strike in pieces alone.
UNCHECKED: dict[str, Any] = {"on_difference": "ignore"}


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("kind", "weight"), [(jobs.Tagger, "tokens"), (jobs.OfExamples, "mean")], ids=["tokens", "mean"]
)
def test_training_with_errors_is_training_without(kind: Any, weight: Any, accumulated: int) -> None:
    whole = Run(jobs.make(kind), accumulated)
    whole.epoch()
    whole.epoch()
    run = Run(jobs.make(kind), accumulated)
    guard = oomph.accelerate.Guard(
        run.accelerator, run.model, run.optimizer, weight=weight, **UNCHECKED
    )
    faults = jobs.Faults(run.model, batches=accumulated)
    with faults.injector:
        run.epoch(guard, faults)
        run.epoch(guard, faults)
    assert guard.num_ooms == faults.num_raised >= 4
    assert run.model.used.whole == [*range(jobs.NUM)] * 2
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    assert run.schedule.get_last_lr() == whole.schedule.get_last_lr()
    jobs.assert_close(jobs.weights_of(run.model), jobs.weights_of(whole.model), 1e-12)


def test_pieces_of_ones_own_forward_are_recovered_too() -> None:
    """In the middle of a window the batches before it come again, to the same loop."""
    whole = Run(jobs.make(), 3)
    whole.epoch()

    class ByPieces(Run):
        def backward(self, batch: Any, guard: Any) -> Any:
            total = 0.0
            for micro in guard.micro(batch):
                with micro:
                    loss = self.model(**micro.data)["loss"]
                    micro.backward(loss)
                    total += float(loss.detach()) * micro.share if not micro.is_again else 0.0
                if micro.has_failed:
                    total = 0.0
            return total

    run = ByPieces(jobs.make(), 3)
    guard = oomph.accelerate.Guard(
        run.accelerator, run.model, run.optimizer, weight="tokens", **UNCHECKED
    )
    faults = jobs.Faults(run.model, batches=3)
    with faults.injector:
        run.epoch(guard, faults)
    assert guard.num_ooms == faults.num_raised >= 2
    assert run.model.used.whole == [*range(jobs.NUM)]
    assert run.losses == pytest.approx(whole.losses, rel=1e-12)
    jobs.assert_close(jobs.weights_of(run.model), jobs.weights_of(whole.model), 1e-12)


def test_a_piece_without_backward_is_an_error_and_undone() -> None:
    run = Run(jobs.make(), 1)
    guard = oomph.accelerate.Guard(run.accelerator, run.model, run.optimizer, micro_batch=6)
    batch = next(iter(run.loader))

    def first_only() -> None:
        for micro in guard.micro(batch):
            with micro:
                if micro.is_first:
                    micro.backward(run.model(**micro.data)["loss"])

    with pytest.raises(UsageError, match="left out"):
        first_only()
    assert all(parameter.grad is None for parameter in run.model.parameters())


def test_gradients_that_were_there_before_come_back_after_an_error() -> None:
    """Somebody who accumulates without `accumulate`."""
    run, by_hand = Run(jobs.make(jobs.OfExamples), 1), Run(jobs.make(jobs.OfExamples), 1)
    guard = oomph.accelerate.Guard(run.accelerator, run.model, run.optimizer)
    faults = jobs.OutOfMemoryAt()
    with faults:
        for number, batch in enumerate(run.loader):
            faults.arm([20] if number == 2 else [])
            run.backward(batch, guard)
    for batch in by_hand.loader:
        by_hand.backward(batch, None)
    assert guard.num_ooms == 1
    for one, other in zip(run.model.parameters(), by_hand.model.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-12, atol=1e-15)


def test_a_window_that_was_given_up_is_not_run_again() -> None:
    run = Run(jobs.make(jobs.OfExamples), 3)
    guard = oomph.accelerate.Guard(run.accelerator, run.model, run.optimizer)
    first, second, *_ = run.loader
    with run.accelerator.accumulate(run.model):
        run.backward(first, guard)
    run.model.zero_grad()
    run.model.used.undo()
    faults = jobs.OutOfMemoryAt(run.model.used.undo)
    with run.accelerator.accumulate(run.model), faults, jobs.undone(run.model.used):
        faults.arm([20])
        run.backward(second, guard)
    assert guard.num_ooms == 1
    assert run.model.used.since == second["number"].tolist()


def test_several_processes_are_refused() -> None:
    run = Run(jobs.make(), 1)

    class OfTwo:
        num_processes = 2
        distributed_type = run.accelerator.distributed_type

    with pytest.raises(UsageError, match="2 processes"):
        oomph.accelerate.Guard(OfTwo(), run.model, run.optimizer)


# ---- on an emulated GPU ------------------------------------------------------------------------


class OnGpu(Run):
    def __init__(self, length: int = 32, **options: Any) -> None:
        job = jobs.make(jobs.Wide, torch.float32)
        rows = jobs.loader(jobs.examples(80, length), 32)
        super().__init__(job, 1, rows=rows, cpu=False, **options)


def test_on_a_gpu_that_is_too_small_training_is_that_of_a_large_one() -> None:
    with oomph.emulated_gpu("1GiB"):
        whole = OnGpu()
        whole.epoch()
        expected = jobs.weights_of(whole.model)
    forget_device()
    with oomph.emulated_gpu("36MiB") as gpu:
        run = OnGpu()
        guard = oomph.accelerate.Guard(run.accelerator, run.model, run.optimizer, weight="tokens")
        with jobs.undone(run.model.used):
            run.epoch(guard)
        assert gpu.num_out_of_memory == guard.num_ooms == 1
        assert guard.micro_batch == 16
        assert run.model.used.whole == [*range(80)]
        assert run.losses == pytest.approx(whole.losses, rel=1e-5)
        jobs.assert_close(jobs.weights_of(run.model), expected, 1e-5)


def test_the_first_update_may_run_out_of_memory_under_a_loss_scaler() -> None:
    """It is set back and done parameter by parameter, and does not count as skipped."""

    def trained(*, strikes: bool) -> Any:
        with oomph.emulated_gpu("1GiB"):
            run = OnGpu(8, mixed_precision="fp16")
            oomph.accelerate.Guard(run.accelerator, run.model, run.optimizer)
            injector = jobs.OutOfMemoryAt()
            if strikes:
                jobs.strike_in_update(run.optimizer.optimizer, injector)
            with injector:
                run.epoch()
            assert not run.accelerator.optimizer_step_was_skipped
            assert injector.num_raised == strikes
            assert (run.optimizer.param_groups[0]["foreach"] is False) == strikes  # one by one
            weights = jobs.weights_of(run.model)
        forget_device()
        return weights

    jobs.assert_equal(trained(strikes=True), trained(strikes=False))


def test_what_does_not_fit_at_all_ends_with_what_was_tried() -> None:
    with oomph.emulated_gpu("32MiB"):
        run = OnGpu(4096)
        guard = oomph.accelerate.Guard(
            run.accelerator, run.model, run.optimizer, last_resorts=("checkpointing",)
        )
        with pytest.raises(OomphError, match="one step does not fit into memory") as caught:
            run.epoch(guard)
        assert "1 of 32 examples at a time, recomputing 4 blocks" in str(caught.value)


def forget_device() -> None:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
