"""A Stepper measures the gradient noise scale, and trains as if it did not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.errors import UsageError
from oomph.training import noise_meter
from training import noise_scales
from training.noise_scales import BATCH, direct, loss_of, measured, model_of, train

SCRIPT = Path(noise_scales.__file__)
# Sampling error of a few hundred steps; twice the pieces of a wrong weight would be far outside.
CLOSE = 0.2


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads take longer than such a small model."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise_meter, "EVERY", 1)
    monkeypatch.setattr(noise_meter, "PROBE_EVERY", 1)
    monkeypatch.setattr(noise_meter, "FIRST", 0)


def stepper(loss: Any = loss_of, **options: Any) -> oomph.Stepper:
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=options.pop("lr", 0.0))
    return oomph.Stepper(model, optimizer, loss, **{"weight": "mean", **options})


def sum_of(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum")


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ({"micro_batch": 8}, BATCH),
        ({"micro_batch": 12}, BATCH + 1),  # uneven pieces
        ({"accumulate": 4}, BATCH // 4),
        ({"micro_batch": 4, "accumulate": 2}, BATCH // 2),
        ({"micro_batch": 8, "clip_grad_norm": 1e-3}, BATCH),
        ({"micro_batch": 8, "loss": sum_of, "weight": "sum"}, BATCH),
        ({"noise_scale": "probe"}, BATCH),
        ({"noise_scale": "probe", "loss": sum_of, "weight": None}, BATCH),
    ],
    ids=[
        *("equal pieces", "uneven pieces", "batches", "pieces of batches", "clipped", "a sum"),
        *("halves", "halves of a sum"),
    ],
)
@pytest.mark.usefixtures("every_step")
def test_it_agrees_with_the_gradients_of_single_examples(options: dict[str, Any], num: int) -> None:
    step = stepper(**options)
    train(step, 400 * options.get("accumulate", 1), num)
    assert measured(step) == pytest.approx(direct(), rel=CLOSE)


@pytest.mark.usefixtures("every_step")
def test_a_step_that_ran_out_of_memory_is_measured_by_the_pieces_that_fitted() -> None:
    large = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal large
        found = loss_of(model, batch)
        if len(batch[0]) > 8:
            large += 1
            torch.autograd.backward(
                found, retain_graph=True
            )  # gradients of a piece that then fails
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return found

    step = stepper(loss)
    for seed in range(20):
        step.forget_sizes()
        train(step, 20, seed=seed)
    assert large >= 20
    assert measured(step) == pytest.approx(direct(), rel=CLOSE)


@pytest.mark.parametrize("op", ["zeros", "dot", "tensor", "zeros_like"])
@pytest.mark.usefixtures("every_step")
def test_memory_that_runs_out_in_measuring_ends_no_step(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, num_raised = getattr(torch, op), 0

    def without_memory(*arguments: Any, **options: Any) -> Any:
        nonlocal num_raised
        if sys._getframe(1).f_globals["__name__"] == noise_meter.__name__:
            num_raised += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return real(*arguments, **options)

    step, quiet = stepper(lr=0.1, micro_batch=8), stepper(lr=0.1, micro_batch=8, noise_scale="off")
    monkeypatch.setattr(torch, op, without_memory)
    train(step, 3)
    train(quiet, 3)
    assert num_raised > 0
    assert step.result is not None
    assert step.result.num_ooms == 0
    assert step.noise_scale is None
    pairs = zip(step.model.parameters(), quiet.model.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("num_ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_measure_the_noise_scale_of_the_whole_batch(num_ranks: int, tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(num_ranks)]
    for each in found:
        assert each["whole"] == pytest.approx(direct(), rel=CLOSE)
        assert each["split"] == pytest.approx(direct(), rel=CLOSE)
        assert "different points of the training loop" in each["apart"]
    assert len({each["whole"] for each in found}) == 1  # the same number on all ranks


class Noisy(nn.Module):
    """With dropout, running statistics, and a count of its own that nothing restores."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 4)
        )

    def forward(self, x: Any) -> Any:
        return self.body(x)


@pytest.mark.parametrize("mode", ["free", "probe"])
@pytest.mark.parametrize("micro_batch", [None, 8])
@pytest.mark.usefixtures("every_step")
def test_it_does_not_change_training_by_one_bit(mode: Any, micro_batch: int | None) -> None:
    def trained(noise_scale: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Noisy()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = oomph.Stepper(
            model,
            optimizer,
            loss_of,
            weight="mean",
            micro_batch=micro_batch,
            noise_scale=noise_scale,
            on_difference="ignore",
            clip_grad_norm=1.0,
        )
        train(step, 12)
        assert (step.noise_scale is None) is (noise_scale == "off" or step._meter.mode != mode) or (
            mode == "free" and micro_batch is None
        )
        return [each.clone() for each in model.state_dict().values()]

    for ours, theirs in zip(trained(mode), trained("off"), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.usefixtures("every_step")
def test_halves_that_do_not_run_end_the_probing_and_not_the_training() -> None:
    def only_whole(model: Any, batch: Any) -> Any:
        if len(batch[0]) < BATCH:
            raise ValueError("this loss wants 32 examples")
        return loss_of(model, batch)

    said: list[str] = []
    step = stepper(only_whole, noise_scale="probe", say=said.append)
    train(step, 5)
    assert step.noise_scale is None
    assert [text for text in said if "wants 32 examples" in text] == said[:1]
    assert len(said) == 1


@pytest.mark.usefixtures("every_step")
def test_it_takes_no_memory_that_grows_with_the_model() -> None:
    def peak(noise_scale: Any) -> int:
        with oomph.emulated_gpu("256MiB"):
            model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = oomph.Stepper(
                model,
                optimizer,
                lambda model, x: model(x).square().mean(),
                weight="mean",
                micro_batch=16,
                noise_scale=noise_scale,
            )
            for _ in range(3):
                step(torch.randn(64, 512).cuda())
            assert (not step._meter._num_rows) == (noise_scale == "off")
            return torch.cuda.max_memory_allocated()

    assert peak("free") - peak("off") <= 8192  # bytes


@pytest.mark.usefixtures("every_step")
def test_samples_that_nobody_asks_for_do_not_pile_up() -> None:
    step = stepper(micro_batch=8, watch_stability=False)
    train(step, 50)
    assert step._meter._num_rows < 16
    assert step.noise_scale is not None
    assert step.noise_scale.num_samples == 50


def test_one_step_in_fifty_is_measured() -> None:
    step = stepper(micro_batch=8, watch_stability=False)  # which reads them
    train(step, 150)
    assert step._meter._num_rows == 3


def test_a_mode_that_does_not_exist_is_refused() -> None:
    with pytest.raises(UsageError, match="noise_scale='always' is unknown"):
        stepper(noise_scale="always")
