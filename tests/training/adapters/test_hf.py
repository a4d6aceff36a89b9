"""Hugging Face's Trainer with out-of-memory errors trains as it does without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tricks import language_models

import oomph
from oomph.errors import OomphError, UsageError
from training.adapters import jobs

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS = [jobs.Tagger, jobs.OfExamples, jobs.Taking, jobs.Dividing]


class Striking(transformers.TrainerCallback):  # type: ignore[misc]
    """Has errors strike in each step, and tells what was used."""

    def __init__(self, faults: jobs.Faults | None, used: jobs.Used) -> None:
        self._faults, self._used = faults, used
        self.trainer: Any = None

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        if self._faults:
            self._faults.begin_step()
            if self.trainer._oomph_window:
                self.trainer._oomph_window.forget_sizes()

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        if self._faults:
            self._faults.end_step()
        else:
            self._used.step()


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": jobs.BATCH,
            "num_train_epochs": 2,
            "learning_rate": 0.05,
            "optim": "sgd",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "disable_tqdm": True,
            "use_cpu": True,
            **options,
        }
    )


def trained(
    folder: Path,
    model: Any,
    *,
    kind: Any = None,
    faults: jobs.Faults | None = None,
    own: dict[str, Any] | None = None,
    resume: Any = None,
    data: Any = None,
    **options: Any,
) -> Any:
    striking = Striking(faults, model.used)
    striking.trainer = trainer = (kind or transformers.Trainer)(
        model=model,
        args=arguments(folder, **options),
        train_dataset=data or jobs.examples(),
        callbacks=[striking],
        **(own or {}),
    )
    torch.manual_seed(3)
    with faults.injector if faults else nullcontext(), jobs.undone(model.used):
        trainer.train(resume_from_checkpoint=resume)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def assert_same_training(one: Any, other: Any, within: float) -> None:
    assert one.state.global_step == other.state.global_step
    assert one.model.used.whole == other.model.used.whole  # each once, in order
    assert logged(one, "learning_rate") == logged(other, "learning_rate")
    for name in ("loss", "grad_norm"):
        # Logs are sums in fp32.
        assert logged(one, name) == pytest.approx(logged(other, name), rel=max(within, 1e-6))
    jobs.assert_close(jobs.weights_of(one.model), jobs.weights_of(other.model), within)


@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_training_with_errors_is_training_without(
    kind: Any, accumulated: int, tmp_path: Path
) -> None:
    options: Any = {"gradient_accumulation_steps": accumulated, "max_grad_norm": 0.3}
    whole = trained(tmp_path, jobs.make(kind), **options)
    model = jobs.make(kind)
    faults = jobs.Faults(model, batches=accumulated)
    recovered = trained(tmp_path, model, kind=oomph.hf.Trainer, faults=faults, **options)
    assert faults.num_raised >= 4
    assert len(recovered.model.used.whole) == 2 * jobs.NUM
    assert_same_training(recovered, whole, 1e-12)


def test_without_errors_it_is_bit_for_bit_the_trainer(tmp_path: Path) -> None:
    options: Any = {"gradient_accumulation_steps": 2, "optim": "adamw_torch"}
    whole = trained(tmp_path, jobs.make(dropout=0.2), **options)
    same = trained(tmp_path, jobs.make(dropout=0.2), kind=oomph.hf.Trainer, **options)
    jobs.assert_equal(jobs.weights_of(same.model), jobs.weights_of(whole.model))
    assert logged(same, "loss") == logged(whole, "loss")


@pytest.mark.parametrize("accumulated", [1, 2])
def test_dropout_is_that_of_the_same_pieces_without_errors(
    accumulated: int, tmp_path: Path
) -> None:
    """Errors in the middle of a window: batches that are run again have their random numbers."""
    options: Any = {"gradient_accumulation_steps": accumulated}

    def run(own: dict[str, Any], *strikes: int) -> Any:
        model = jobs.make(dropout=0.3)
        kind = type("Mine", (Once, oomph.hf.TrainerMixin, transformers.Trainer), {})
        # What is measured has ops of its own, in which an error is none of the step's.
        own = {**own, "noise_scale": "off", "strikes": strikes}
        own.update(weight="tokens", on_difference="ignore")
        return trained(tmp_path, model, kind=kind, own=own, **options)

    pieces = run({"micro_batch": 3})
    recovered = run({}, 5, 25)
    assert recovered._oomph_window.num_ooms == 2
    assert recovered._oomph_window.micro_batch == 3 == pieces._oomph_window.micro_batch
    jobs.assert_equal(jobs.weights_of(recovered.model), jobs.weights_of(pieces.model))
    assert logged(recovered, "loss") == logged(pieces, "loss")


class Once:
    """Errors strike in the first batch, at these ops, attempt by attempt."""

    def __init__(self, *args: Any, strikes: Any, **keywords: Any) -> None:
        self._strikes = strikes
        super().__init__(*args, **keywords)

    def training_step(self, *args: Any, **keywords: Any) -> Any:
        injector = jobs.OutOfMemoryAt()
        injector.arm(self._strikes)
        self._strikes = ()
        with injector:
            return super().training_step(*args, **keywords)  # type: ignore[misc]


def language_model() -> Any:
    return language_models.seeded(lambda: language_models.gpt2(), torch.float32)


def classifier() -> Any:
    config = transformers.BertConfig(
        vocab_size=96,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=4,
    )
    return language_models.seeded(lambda: transformers.BertForSequenceClassification(config))


@pytest.mark.parametrize("accumulated", [1, 2])
@pytest.mark.parametrize("make", [language_model, classifier])
def test_models_of_transformers_train_as_without_errors(
    make: Callable[[], Any], accumulated: int, tmp_path: Path
) -> None:
    """GPT-2 divides by the labels of the whole batch; BERT's classifier is told, and does not."""
    rows = jobs.examples()
    is_classifier = make is classifier
    data = [
        {"input_ids": row["ids"], "labels": row["number"] % 4 if is_classifier else row["labels"]}
        for row in rows
    ]
    options: Any = {"gradient_accumulation_steps": accumulated, "data": data}

    def run(kind: Any, *seeds: int) -> Any:
        model = make()
        model.used = jobs.Used()
        faults = [jobs.Faults(model, seed=s, batches=accumulated, row=data[0]) for s in seeds]
        return trained(tmp_path, model, kind=kind, faults=faults[0] if faults else None, **options)

    recovered = run(oomph.hf.Trainer, 1)
    assert recovered._oomph_window.num_ooms >= 4
    assert_same_training(recovered, run(transformers.Trainer), 1e-5)


def test_a_loss_of_ones_own_is_found_out_too(tmp_path: Path) -> None:
    class Summing(transformers.Trainer):  # type: ignore[misc]
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            labels = inputs.pop("labels")
            loss = model(labels=labels, **inputs)["loss"]
            return loss * (labels != -100).sum() / 50

    class Guarded(oomph.hf.TrainerMixin, Summing):
        pass

    model = jobs.make()
    recovered = trained(tmp_path, model, kind=Guarded, faults=jobs.Faults(model))
    assert recovered._oomph_window._division.weight == "sum"
    assert_same_training(recovered, trained(tmp_path, jobs.make(), kind=Summing), 1e-12)


def test_a_loss_over_pairs_is_not_split_in_silence(tmp_path: Path) -> None:
    model = jobs.make(jobs.Coupled)
    own: dict[str, Any] = {"micro_batch": 4}
    with pytest.raises(UsageError, match="every example is compared with every other") as caught:
        trained(tmp_path, model, kind=oomph.hf.Trainer, own=own)
    assert 'on_difference="warn"' in str(caught.value.attempt)
    with pytest.raises(UsageError, match="every example is compared with every other"):
        trained(tmp_path, model, kind=oomph.hf.Trainer, own={**own, "weight": "mean"})
    trained(tmp_path, model, kind=oomph.hf.Trainer, own={**own, "on_difference": "warn"})


def test_training_resumed_from_a_checkpoint_with_errors_ends_as_without(tmp_path: Path) -> None:
    options: Any = {"save_strategy": "steps", "save_steps": 3, "gradient_accumulation_steps": 2}
    whole = trained(tmp_path / "whole", jobs.make(), **options)
    first = jobs.make()
    trained(
        tmp_path / "resumed",
        first,
        kind=oomph.hf.Trainer,
        faults=jobs.Faults(first, batches=2),
        **options,
    )
    again = jobs.make()
    resumed = trained(
        tmp_path / "resumed",
        again,
        kind=oomph.hf.Trainer,
        faults=jobs.Faults(again, batches=2),
        resume=str(tmp_path / "resumed" / "checkpoint-3"),
        **options,
    )
    assert resumed.state.global_step == whole.state.global_step == 4
    assert again.used.whole == whole.model.used.whole[-len(again.used.whole) :]
    assert len(again.used.whole) == jobs.NUM - 2 * jobs.BATCH  # the second half of an epoch
    assert logged(resumed, "loss") == pytest.approx(logged(whole, "loss"), rel=1e-6)
    jobs.assert_close(jobs.weights_of(again), jobs.weights_of(whole.model), 1e-12)


def test_the_first_update_may_run_out_of_memory(tmp_path: Path) -> None:
    """AdamW makes its states there: set back, and done parameter by parameter."""

    class InUpdate(transformers.TrainerCallback):  # type: ignore[misc]
        def __init__(self) -> None:
            self.injector = jobs.OutOfMemoryAt()

        def on_train_begin(self, *_: Any, optimizer: Any, **__: Any) -> None:
            jobs.strike_in_update(optimizer.optimizer, self.injector)

    options: Any = {"optim": "adamw_torch", "learning_rate": 0.01}
    whole = trained(tmp_path, jobs.make(), **options)
    callback = InUpdate()
    with callback.injector:
        own = {"callbacks": [callback]}
        model = jobs.make()
        trainer = oomph.hf.Trainer(
            model=model,
            args=arguments(tmp_path, **options),
            train_dataset=jobs.examples(),
            **own,
        )
        torch.manual_seed(3)
        trainer.train()
    assert callback.injector.num_raised == 1
    assert trainer.optimizer.param_groups[0]["foreach"] is False  # one by one
    jobs.assert_close(jobs.weights_of(model), jobs.weights_of(whole.model), 1e-12)


def test_an_error_that_is_none_of_memory_leaves_the_last_whole_step(tmp_path: Path) -> None:
    class Interrupted(oomph.hf.TrainerMixin, transformers.Trainer):  # type: ignore[misc]
        num_steps = 0

        def compute_loss(self, *args: Any, **keywords: Any) -> Any:
            self.num_steps += 1
            if self.num_steps == 6:  # four pieces in each of the batches
                self.before = jobs.weights_of(self.model)
                raise KeyboardInterrupt
            return super().compute_loss(*args, **keywords)

    model = jobs.make()
    trainer = Interrupted(
        model=model,
        args=arguments(tmp_path),
        train_dataset=jobs.examples(),
        micro_batch=3,
        weight="tokens",
        on_difference="ignore",
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert trainer.state.global_step == 1
    assert all(parameter.grad is None for parameter in model.parameters())
    jobs.assert_equal(jobs.weights_of(model), trainer.before)


# ---- on an emulated GPU ------------------------------------------------------------------------


def on_gpu(folder: Path, kind: Any, own: Any = None, *, data: Any, **options: Any) -> Any:
    model = jobs.make(jobs.Wide, torch.float32)
    options = {"use_cpu": False, "num_train_epochs": 1, **options}
    with jobs.undone(model.used):
        return trained(folder, model, kind=kind, own=own, data=data, **options)


def test_on_a_gpu_that_is_too_small_training_is_that_of_a_large_one(tmp_path: Path) -> None:
    options: Any = {"per_device_train_batch_size": 32, "data": jobs.examples(80, 32)}
    with oomph.emulated_gpu("1GiB"):
        whole = on_gpu(tmp_path, transformers.Trainer, **options)
    with oomph.emulated_gpu("36MiB") as gpu:
        recovered = on_gpu(tmp_path, oomph.hf.Trainer, **options)
        assert gpu.num_out_of_memory == recovered._oomph_window.num_ooms == 1
        assert_same_training(recovered, whole, 1e-5)
    assert logged(recovered, "micro_batch") == [16, 16, 16]
    assert logged(recovered, "num_ooms") == [1, 1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_that_of_the_same_pieces(precision: str, tmp_path: Path) -> None:
    options: Any = {precision: True, "gradient_accumulation_steps": 2, "max_grad_norm": 0.1}
    options["data"] = jobs.examples(3 * jobs.BATCH, 64)
    with oomph.emulated_gpu("1GiB"):
        pieces = on_gpu(tmp_path, oomph.hf.Trainer, {"micro_batch": 6}, **options)
        expected = jobs.weights_of(pieces.model)
    with oomph.emulated_gpu("30MiB"):
        recovered = on_gpu(tmp_path, oomph.hf.Trainer, **options)
        assert recovered._oomph_window.num_ooms == 1
        assert recovered._oomph_window.micro_batch == 6
        jobs.assert_equal(jobs.weights_of(recovered.model), expected)
    assert recovered.state.global_step == 2
    assert logged(recovered, "loss") == logged(pieces, "loss")
    assert logged(recovered, "grad_norm") == logged(pieces, "grad_norm")


def test_what_does_not_fit_at_all_ends_with_what_was_tried(tmp_path: Path) -> None:
    with oomph.emulated_gpu("32MiB"):
        model = jobs.make(jobs.Wide, torch.float32)
        before = jobs.weights_of(model)
        trainer = oomph.hf.Trainer(
            model=model,
            args=arguments(tmp_path, use_cpu=False, auto_find_batch_size=True),
            train_dataset=jobs.examples(12, 4096),
        )
        with pytest.raises(OomphError, match="one step does not fit into memory") as caught:
            trainer.train()
        assert "1 of 12 examples at a time, recomputing 4 blocks" in str(caught.value)
        jobs.assert_equal(jobs.weights_of(model), before)
