"""Lightning with out-of-memory errors trains and logs as it does without."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torchmetrics import CatMetric, MeanMetric
from torchmetrics.classification import MulticlassConfusionMatrix

import oomph
from oomph.errors import OomphError, UsageError
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")


class Module(pl.LightningModule):  # type: ignore[misc]
    """Trains a job with momentum and a schedule, and logs in all ways."""

    def __init__(self, job: jobs.Tagger) -> None:
        super().__init__()
        self.job, self.seen = job, MeanMetric()
        self.steps: list[float] = []  # what is logged of each batch
        self.outputs: list[list[int]] = []

    def training_step(self, batch: Any) -> Any:
        loss = self.job(**batch)["loss"]
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("largest", batch["number"].max().double(), on_epoch=True, reduce_fx="max")
        self.seen.update(batch["number"].double())
        self.log("seen", self.seen, on_step=False, on_epoch=True)
        return {"loss": loss, "numbers": batch["number"]}

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        self.steps.append(float(self.trainer.callback_metrics["loss_step"]))
        self.outputs.append(outputs["numbers"].tolist())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Striking(pl.Callback):  # type: ignore[misc]
    """Has errors strike in each step, and tells what was used."""

    def __init__(self, faults: jobs.Faults | None, used: jobs.Used, guard: Any) -> None:
        self._faults, self._used, self._guard = faults, used, guard

    def on_train_batch_start(self, trainer: Any, _: Any, __: Any, number: int) -> None:
        if self._faults and number % trainer.accumulate_grad_batches == 0:
            self._guard._window.forget_sizes()
            self._faults.begin_step()

    def on_before_optimizer_step(self, *_: Any) -> None:
        if self._faults:
            self._faults.end_step()
        else:
            self._used.step()


def trained(
    folder: Path,
    job: Any,
    guard: Any = None,
    faults: jobs.Faults | None = None,
    *,
    resume: Any = None,
    callbacks: Any = (),
    rows: Any = None,
    module: Any = Module,
    **options: Any,
) -> Any:
    trained = module(job)
    guards = [guard] if guard else []
    trainer = pl.Trainer(
        **{
            "accelerator": "cpu",
            "max_epochs": 2,
            "callbacks": [*guards, Striking(faults, job.used, guard), *callbacks],
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "default_root_dir": folder,
            **options,
        }
    )
    torch.manual_seed(3)
    striking = jobs.only_in_pieces(faults.injector) if faults else nullcontext()
    with striking, jobs.undone(job.used):
        trainer.fit(trained, rows or jobs.loader(), ckpt_path=resume)
    return trainer


def assert_same_training(one: Any, other: Any, within: float) -> None:
    first, second = one.lightning_module, other.lightning_module
    assert one.global_step == other.global_step
    assert first.job.used.whole == second.job.used.whole  # each once, in order
    assert first.outputs == second.outputs
    assert first.steps == pytest.approx(second.steps, rel=max(within, 1e-6))
    assert one.optimizers[0].param_groups[0]["lr"] == other.optimizers[0].param_groups[0]["lr"]
    for name, value in other.callback_metrics.items():
        assert float(one.callback_metrics[name]) == pytest.approx(float(value), rel=1e-6), name
    jobs.assert_close(jobs.weights_of(first), jobs.weights_of(second), within)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize(
    ("kind", "weight"), [(jobs.Tagger, "tokens"), (jobs.OfExamples, "mean")], ids=["tokens", "mean"]
)
def test_training_with_errors_is_training_without(
    kind: Any, weight: Any, accumulated: int, tmp_path: Path
) -> None:
    options: Any = {"accumulate_grad_batches": accumulated, "gradient_clip_val": 0.3}
    whole = trained(tmp_path, jobs.make(kind), **options)
    job = jobs.make(kind)
    faults = jobs.Faults(job, batches=accumulated)
    guard = oomph.lightning.Guard(weight=weight, on_difference="ignore")
    recovered = trained(tmp_path, job, guard, faults, **options)
    assert guard.num_ooms == faults.num_raised >= 4
    assert len(job.used.whole) == 2 * jobs.NUM
    assert_same_training(recovered, whole, 1e-12)


def test_without_errors_it_is_bit_for_bit_lightning(tmp_path: Path) -> None:
    options: Any = {"accumulate_grad_batches": 2}
    whole = trained(tmp_path, jobs.make(dropout=0.2), **options)
    same = trained(tmp_path, jobs.make(dropout=0.2), oomph.lightning.Guard(), **options)
    jobs.assert_equal(
        jobs.weights_of(same.lightning_module), jobs.weights_of(whole.lightning_module)
    )
    assert same.lightning_module.steps == whole.lightning_module.steps
    assert same.callback_metrics.keys() == whole.callback_metrics.keys()


class Once(pl.Callback):  # type: ignore[misc]
    """Errors strike in one batch, at these ops, attempt by attempt."""

    def __init__(self, number: int = -1, *strikes: int) -> None:
        self.injector = jobs.OutOfMemoryAt()
        self._number, self._strikes = number, strikes

    def on_train_batch_start(self, _: Any, __: Any, ___: Any, number: int) -> None:
        self.injector.arm(self._strikes if number == self._number else ())

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.injector.disarm()


class Sized(pl.Callback):  # type: ignore[misc]
    """Notes the sizes of each batch, or has it trained in those of another run."""

    def __init__(self, guard: Any, sizes: list[int] | None = None) -> None:
        self._guard, self._given = guard, sizes
        self.sizes: list[int] = []

    def on_train_batch_start(self, _: Any, __: Any, ___: Any, number: int) -> None:
        if self._given is not None:
            self._guard._window._recovery.sizes._first = self._given[number]

    def on_train_batch_end(self, *_: Any) -> None:
        self.sizes.append(self._guard.micro_batch)
        torch.rand(3)  # as a loader does that augments


@pytest.mark.parametrize("accumulated", [1, 3])
def test_dropout_is_that_of_the_same_pieces_without_errors(
    accumulated: int, tmp_path: Path
) -> None:
    """Batches that are run again have the random numbers that they had."""
    options: Any = {"accumulate_grad_batches": accumulated, "max_epochs": 1}
    unchecked: Any = {"weight": "tokens", "on_difference": "ignore"}
    once, guard = Once(1, 5, 100), oomph.lightning.Guard(**unchecked)
    noted = Sized(guard)
    with jobs.only_in_pieces(once.injector):
        job = jobs.make(dropout=0.3)
        recovered = trained(tmp_path, job, guard, callbacks=[once, noted], **options)
    assert noted.sizes == [12, 3, 3, 3]
    other = oomph.lightning.Guard(**unchecked)
    given = Sized(other, noted.sizes)
    pieces = trained(tmp_path, jobs.make(dropout=0.3), other, callbacks=[given], **options)
    assert (other.num_ooms, given.sizes) == (0, noted.sizes)
    jobs.assert_equal(
        jobs.weights_of(recovered.lightning_module), jobs.weights_of(pieces.lightning_module)
    )
    assert recovered.lightning_module.steps == pieces.lightning_module.steps
    assert float(recovered.callback_metrics["micro_batch"]) == 3


def test_metrics_of_every_kind_count_an_example_once(tmp_path: Path) -> None:
    """A list of rows, and a table too large to be copied without a reason."""

    class Counting(Module):
        def __init__(self, job: jobs.Tagger) -> None:
            super().__init__(job)
            self.rows, self.table = CatMetric(), MulticlassConfusionMatrix(512)  # of 2 MiB

        def training_step(self, batch: Any) -> Any:
            self.rows.update(batch["number"].double())
            self.table(batch["number"] % 512, batch["number"] // 2 % 512)
            return super().training_step(batch)

    whole = trained(tmp_path, jobs.make(), module=Counting, max_epochs=1)
    once = Once(2, 40, 100)
    guard = oomph.lightning.Guard(weight="tokens", on_difference="ignore")
    with jobs.only_in_pieces(once.injector):
        recovered = trained(
            tmp_path, jobs.make(), guard, callbacks=[once], module=Counting, max_epochs=1
        )
    assert guard.num_ooms == 2
    for name in ("rows", "table"):
        one, other = (getattr(each.lightning_module, name) for each in (recovered, whole))
        assert torch.equal(one.compute(), other.compute()), name


def test_a_summed_loss_and_what_is_logged_beside_it_are_those_of_the_whole(tmp_path: Path) -> None:
    class Summing(Module):
        def training_step(self, batch: Any) -> Any:
            loss = self.job(**batch)["loss"] * (batch["labels"] != -100).sum() / 50
            self.log("loss", loss, on_step=True, on_epoch=True)
            size = len(batch["number"])
            self.log("number", batch["number"].double().mean(), batch_size=size, on_epoch=True)
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            self.steps.append(float(self.trainer.callback_metrics["loss_step"]))

    whole = trained(tmp_path, jobs.make(), module=Summing)
    guard = oomph.lightning.Guard(micro_batch=5, weight="sum")
    pieces = trained(tmp_path, jobs.make(), guard, module=Summing)
    assert guard.micro_batch == 5  # of 12: 4, 4 and 4; of 8: 4 and 4
    assert_same_training(pieces, whole, 1e-12)


def test_training_resumed_from_a_checkpoint_with_errors_ends_as_without(tmp_path: Path) -> None:
    def run(name: str, job: Any, guard: Any = None, faults: Any = None, resume: Any = None) -> Any:
        kept = pl.callbacks.ModelCheckpoint(tmp_path / name, every_n_train_steps=4, save_top_k=-1)
        more: Any = {"enable_checkpointing": True, "callbacks": [kept]}
        return trained(tmp_path, job, guard, faults, resume=resume, **more)

    whole = run("whole", jobs.make())
    first = jobs.make()
    run("resumed", first, oomph.lightning.Guard(weight="tokens"), jobs.Faults(first))
    again = jobs.make()
    faults = jobs.Faults(again)
    (checkpoint,) = (tmp_path / "resumed").glob("*step=4.ckpt")  # of 8
    guard = oomph.lightning.Guard(weight="tokens")
    resumed = run("resumed", again, guard, faults, str(checkpoint))
    assert guard.num_ooms >= 1
    assert resumed.global_step == whole.global_step == 8
    assert again.used.whole == whole.lightning_module.job.used.whole[-len(again.used.whole) :]
    assert resumed.lightning_module.steps == pytest.approx(
        whole.lightning_module.steps[4:], rel=1e-6
    )
    jobs.assert_close(
        jobs.weights_of(resumed.lightning_module), jobs.weights_of(whole.lightning_module), 1e-12
    )


def test_the_first_update_may_run_out_of_memory(tmp_path: Path) -> None:
    class InUpdate(Once):
        def on_train_start(self, trainer: Any, *_: Any) -> None:
            jobs.strike_in_update(trainer.optimizers[0], self.injector)

        def on_train_batch_start(self, *_: Any) -> None:
            pass

    whole = trained(tmp_path, jobs.make())
    once = InUpdate()
    with once.injector:
        recovered = trained(tmp_path, jobs.make(), oomph.lightning.Guard(), callbacks=[once])
    assert once.injector.num_raised == 1
    assert recovered.optimizers[0].param_groups[0]["foreach"] is False  # one by one
    assert_same_training(recovered, whole, 1e-12)


def test_a_module_that_optimizes_by_itself_is_refused(tmp_path: Path) -> None:
    class Manual(Module):
        def __init__(self, job: Any) -> None:
            super().__init__(job)
            self.automatic_optimization = False

    with pytest.raises(UsageError, match="manual optimization"):
        trained(tmp_path, jobs.make(), oomph.lightning.Guard(), module=Manual)


# ---- on an emulated GPU ------------------------------------------------------------------------


def on_gpu(folder: Path, guard: Any = None, length: int = 32, **options: Any) -> Any:
    job = jobs.make(jobs.Wide, torch.float32)
    rows = jobs.loader(jobs.examples(80, length), 32)
    more: Any = {"accelerator": "gpu", "devices": 1, "max_epochs": 1, **options}
    with jobs.undone(job.used):
        return trained(folder, job, guard, rows=rows, **more)


def test_on_a_gpu_that_is_too_small_training_is_that_of_a_large_one(tmp_path: Path) -> None:
    with oomph.emulated_gpu("1GiB"):
        whole = on_gpu(tmp_path)
    with oomph.emulated_gpu("36MiB") as gpu:
        guard = oomph.lightning.Guard(weight="tokens")
        recovered = on_gpu(tmp_path, guard)
        assert gpu.num_out_of_memory == guard.num_ooms == 1
        assert guard.micro_batch == 16
        assert_same_training(recovered, whole, 1e-5)


@pytest.mark.slow
def test_a_loss_scaler_is_that_of_the_same_pieces(tmp_path: Path) -> None:
    options: Any = {"precision": "16-mixed", "gradient_clip_val": 0.1, "limit_train_batches": 2}
    guard = oomph.lightning.Guard(weight="tokens")
    noted = Sized(guard)
    with oomph.emulated_gpu("30MiB"):
        recovered = on_gpu(tmp_path, guard, callbacks=[noted], **options).lightning_module
        weights = jobs.weights_of(recovered)
    assert guard.num_ooms >= 1
    assert noted.sizes[-1] < 32
    other = oomph.lightning.Guard(weight="tokens", micro_batch=32)  # and no growing
    given = Sized(other, noted.sizes)
    with oomph.emulated_gpu("1GiB"):
        expected = on_gpu(tmp_path, other, callbacks=[given], **options).lightning_module
        jobs.assert_equal(weights, jobs.weights_of(expected))
    assert other.num_ooms == 0
    assert given.sizes == noted.sizes
    assert recovered.steps == expected.steps


def test_what_does_not_fit_at_all_ends_with_what_was_tried(tmp_path: Path) -> None:
    with oomph.emulated_gpu("32MiB"):
        with pytest.raises(OomphError, match="one step does not fit into memory") as caught:
            on_gpu(tmp_path, oomph.lightning.Guard(last_resorts=("checkpointing",)), length=4096)
        assert "1 of 32 examples at a time, recomputing 4 blocks" in str(caught.value)
