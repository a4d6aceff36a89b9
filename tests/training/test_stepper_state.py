"""A Stepper that is saved and loaded goes on as if nothing had been."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import oomph
from oomph.errors import UsageError
from training.stepper_kinds import MESSAGE, of_rows, rows

STEPS = 10


def batches(dtype: torch.dtype = torch.float64) -> list[Any]:
    torch.manual_seed(1)
    made = [rows(12 if number % 3 else 7) for number in range(STEPS)]
    return [(x.to(dtype), y) for x, y in made]


class Job:
    """A model, an optimizer, a schedule and a Stepper, all of which a checkpoint has."""

    def __init__(self, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)]
        self.model = nn.Sequential(*blocks).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.rates = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, 0.9)
        self.most = 10**9
        self.said: list[str] = []
        self.step = oomph.Stepper(
            self.model,
            self.optimizer,
            self.loss,
            scheduler=self.rates,
            say=self.said.append,
            **options,
        )

    def loss(self, model: Any, batch: Any) -> Any:
        if len(batch[0]) > self.most:
            raise torch.OutOfMemoryError(MESSAGE)
        return of_rows(model, batch)

    def state(self) -> dict[str, Any]:
        parts = (self.model, self.optimizer, self.rates, self.step)
        return {"all": [part.state_dict() for part in parts], "rng": torch.get_rng_state()}

    def load(self, state: dict[str, Any]) -> None:
        parts: tuple[Any, ...] = (self.model, self.optimizer, self.rates, self.step)
        for part, each in zip(parts, state["all"], strict=True):
            part.load_state_dict(each)
        torch.set_rng_state(state["rng"])

    def weights(self) -> torch.Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach()


def saved(job: Job) -> Any:
    """Through a file, as torch's safe loader reads it."""
    file = io.BytesIO()
    torch.save(job.state(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("at", [1, 4, 5, 6])
def test_a_run_that_is_resumed_is_the_run_that_was_not(at: int, accumulate: int) -> None:
    """Also in the middle of what is accumulated, and with an error right after."""
    whole = Job(accumulate=accumulate, micro_batch=5)
    losses = [float(whole.step(batch).loss) for batch in batches()]
    first = Job(accumulate=accumulate, micro_batch=5)
    for batch in batches()[:at]:
        first.step(batch)
    for fails in (False, True):
        second = Job(accumulate=accumulate, micro_batch=5)
        second.load(saved(first))
        again = []
        for number, batch in enumerate(batches()[at:]):
            second.most = 3 if fails and number == 0 else 10**9
            second.step._recovery.sizes.forget()
            result = second.step(batch)
            assert number or result.num_ooms == fails
            again.append(float(result.loss))
        if not fails:
            assert torch.equal(second.weights(), whole.weights())
            assert again == losses[at:]
        assert (second.weights() - whole.weights()).abs().max() < 1e-12
        assert (second.step.flush() is None) == (STEPS % accumulate == 0)


def test_what_was_accumulated_before_a_checkpoint_can_be_flushed_or_given_up() -> None:
    data = batches()
    first = Job(accumulate=4)
    first.step(data[0])
    first.step(data[1])
    state = saved(first)
    first.step.flush()
    second = Job(accumulate=4)
    second.load(state)
    result = second.step.flush()
    assert result is not None
    assert result.has_stepped
    assert torch.equal(first.weights(), second.weights())
    third = Job(accumulate=4)
    third.load(state)
    before = third.weights().clone()
    with pytest.raises(ZeroDivisionError):
        _interrupted(third, data[2])
    assert torch.equal(third.weights(), before)
    assert all(p.grad is None for p in third.model.parameters())
    assert third.step.flush() is None


def _interrupted(job: Job, batch: Any) -> None:
    for micro in job.step.micro(batch):
        with micro:
            micro.backward(of_rows(job.model, micro.data))
            raise ZeroDivisionError


def test_the_scale_of_fp16_the_sizes_and_the_tricks_are_kept() -> None:
    first = Job(torch.float32, precision="fp16")
    data = batches(torch.float32)
    first.step((data[0][0] * float("inf"), data[0][1]))  # halves the scale
    assert first.step._attempts.scaler is not None
    scale = first.step._attempts.scaler.get_scale()
    first.most = 0
    switch_on = first.step._recovery.resorts.switch_on

    def freeing(memory: Any) -> str | None:
        first.most = 4
        return switch_on(memory)

    first.step._recovery.resorts.switch_on = freeing  # type: ignore[method-assign]
    for batch in data[1:4]:
        first.step(batch)
    second = Job(torch.float32, precision="fp16")
    second.load(saved(first))
    assert second.step._attempts.scaler is not None
    assert second.step._attempts.scaler.get_scale() == scale < 2.0**16
    assert second.step._recovery.resorts.variant.checkpointing == "blocks"
    assert second.step.num_ooms == first.step.num_ooms
    second.most = 4
    for batch in data[4:]:
        one, other = first.step(batch), second.step(batch)
        assert one.micro_batch == other.micro_batch <= 4
        assert one.num_ooms == other.num_ooms
    assert torch.equal(first.weights(), second.weights())


def test_what_was_measured_on_a_gpu_is_kept() -> None:
    with oomph.emulated_gpu("24MiB") as gpu:

        def job() -> Any:
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 4)).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            return model, oomph.Stepper(model, optimizer, of_rows, say=lambda _: None)

        x, y = rows(8192)
        batch = x.cuda(), y.cuda()
        model, first = job()
        sizes = [first(batch).micro_batch for _ in range(4)]
        assert gpu.num_out_of_memory > 0
        state, weights = first.state_dict(), model.state_dict()
        num_before = gpu.num_out_of_memory
        del model, first
        model, second = job()
        model.load_state_dict(weights)
        second.load_state_dict(state)
        assert second(batch).micro_batch == sizes[-1]
        assert gpu.num_out_of_memory == num_before


RESUMED = """
import sys, torch
from training.test_stepper_state import Job, batches
job = Job(accumulate=2, micro_batch=5)
if sys.argv[2] == "second":
    job.load(torch.load(sys.argv[1], weights_only=True))
half = batches()[:5] if sys.argv[2] == "first" else batches()[5:]
for batch in half:
    job.step(batch)
torch.save(job.state() if sys.argv[2] == "first" else job.weights(), sys.argv[1])
"""


def test_another_process_goes_on_bit_by_bit(tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.pt"
    for half in ("first", "second"):
        subprocess.run(
            [sys.executable, "-c", RESUMED, str(file), half],
            check=True,
            env={"PYTHONPATH": "tests", "OMP_NUM_THREADS": "1"},
            cwd=Path(__file__).parents[2],
        )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    whole = Job(accumulate=2, micro_batch=5)
    for batch in batches():
        whole.step(batch)
    torch.set_num_threads(threads)
    assert torch.equal(torch.load(file, weights_only=True), whole.weights())


def test_the_checkpoint_and_the_evaluation_of_the_document(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    codes = re.findall(r"```python\n(.*?)```", document, re.DOTALL)
    job, data = Job(), [{"x": x, 0: x, 1: y} for x, y in batches()]
    job.step(batches()[0])
    names: dict[str, Any] = {
        "torch": torch,
        "model": job.model,
        "optimizer": job.optimizer,
        "step": job.step,
        "path": tmp_path / "checkpoint.pt",
        "validation": data,
        "batch": data[0],
    }
    for code in [each for each in codes if "weights_only" in each or "step.evaluate" in each]:
        exec(code, names)  # noqa: S102
    assert len(names["losses"]) == STEPS
    assert names["logits"].shape == (7, 8)
    assert names["state"]["stepper"]["accumulated"] == (None,)


# ---- what is no state --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: None, "not the state of a Stepper"),
        (lambda state: {"scaler": state["scaler"]}, "not the state of a Stepper"),
        (lambda state: {**state, "format": 99}, "format 99"),
        (lambda state: {**state, "scaler": {"scale": 1.0}}, "saved with a loss scaler"),
        (lambda state: {**state, "sizes": {}}, "does not belong to this Stepper"),
        (lambda state: {**state, "tricks": None}, "does not belong to this Stepper"),
        (lambda state: {**state, "accumulated": {}}, "does not belong to this Stepper"),
    ],
)
def test_what_is_no_state_is_one_clear_error(change: Any, message: str) -> None:
    job = Job()
    with pytest.raises(UsageError, match=message):
        job.step.load_state_dict(change(job.step.state_dict()))
    job.step(batches()[0])


def test_a_state_of_the_first_format_is_loaded() -> None:
    """Its parts were not in tuples."""
    job, other = Job(), Job()
    job.most = 4
    job.step(batches()[0])
    state = job.step.state_dict()
    first = {k: v[0] if isinstance(v, tuple) else v for k, v in state.items()}
    other.step.load_state_dict({**first, "format": 1})
    assert other.step.state_dict() == state


def test_gradients_of_another_model_are_refused() -> None:
    job = Job(accumulate=2)
    job.step(batches()[0])
    state = job.step.state_dict()
    model = nn.Linear(8, 4).double()
    other = oomph.Stepper(model, torch.optim.SGD(model.parameters()), of_rows, accumulate=2)
    with pytest.raises(UsageError, match="does not belong to this Stepper"):
        other.load_state_dict(state)
    assert model.weight.grad is None


def test_a_state_is_not_changed_by_what_is_trained_after_it() -> None:
    """Neither where it was saved, nor where it was loaded: it may be loaded again."""
    job = Job(accumulate=3)
    first, second = batches()[:2]
    job.step(first)
    state = job.step.state_dict()
    before = [each.clone() for each in state["accumulated"][0]["gradients"]]
    job.step(second)
    other = Job(accumulate=3)
    other.step.load_state_dict(state)
    other.step(second)
    pairs = zip(before, state["accumulated"][0]["gradients"], strict=True)
    assert all(torch.equal(one, now) for one, now in pairs)


def test_a_stepper_that_takes_the_place_of_another_goes_on() -> None:
    job = Job(accumulate=2)
    first, second = batches()[:2]
    job.step(first)
    state, optimizer = job.step.state_dict(), job.optimizer
    del job.step
    step = oomph.Stepper(job.model, optimizer, job.loss, accumulate=2)
    step.load_state_dict(state)
    assert step(second).has_stepped


def test_in_the_middle_of_a_batch_there_is_no_state() -> None:
    job = Job(micro_batch=4)
    for micro in job.step.micro(batches()[1]):
        with micro:
            micro.backward(of_rows(job.model, micro.data))
        with pytest.raises(UsageError, match="in the middle of a batch"):
            job.step.state_dict()
    job.step.state_dict()


# ---- optimizers that want a closure ------------------------------------------------------------


class Wanting(torch.optim.SGD):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class Sharpness(torch.optim.SGD):
    def first_step(self) -> None: ...
    def second_step(self) -> None: ...


@pytest.mark.parametrize("kind", [torch.optim.LBFGS, Wanting, Sharpness])
def test_an_optimizer_that_wants_a_closure_is_refused_by_name(kind: Any) -> None:
    model = nn.Linear(8, 4)
    with pytest.raises(UsageError, match=kind.__name__):
        oomph.Stepper(model, [torch.optim.SGD([model.bias]), kind([model.weight])], of_rows)
