"""A careful plan grows to what fits in each library, as with a Stepper, and trains the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from planning.plans import plan_of

import oomph
from oomph.training.adapters.window import Window
from training.adapters import jobs
from training.adapters.loops import (
    BATCH,
    make,
    optimizer_of,
    with_accelerate,
    with_hf,
    with_lightning,
)

pytestmark = pytest.mark.filterwarnings("ignore")
PLANNED = 2


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
    model = make()
    with oomph.emulated_gpu("64MiB") as gpu, jobs.undone(model.used):
        model, num_steps = train(tmp_path, model, data, plan=plan)
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
