"""A Stepper warns of a training that goes wrong, in words, in its run, and changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

import oomph
from oomph.explaining.diagnose import diagnose
from oomph.monitoring.diary_reader import read_run


class Model(nn.Module):
    """Its middle layer gives infinite values once it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.last(self.middle(self.first(x)))


def loss_of(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch() -> Any:
    x = torch.randn(16, 8)
    return x, x[:, :3].argmax(1)


def stepper(lr: float = 0.1, model: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    model = model or Model()
    said: list[str] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    step = oomph.Stepper(model, optimizer, loss_of, weight="mean", say=said.append, **options)
    return step, model, said


def test_a_healthy_training_is_met_with_silence() -> None:
    step, _, said = stepper()
    for _ in range(300):
        step(batch())
    assert (step.stability_warnings, said) == ((), [])


def test_values_that_are_not_finite_name_the_first_module_that_made_them() -> None:
    step, model, said = stepper()
    for _ in range(20):
        step(batch())
    with torch.no_grad():
        model.last.weight[0, 0] = torch.nan
    for _ in range(40):
        step(batch())
    (found,) = step.stability_warnings
    assert found.kind == "not-finite"
    # The gradient has carried it to every weight by the time that it is noticed.
    assert found.evidence == "first in the output of first (weight is not finite)"
    assert said == [f"oomph, step {found.step}: {found}"]


def test_updates_larger_than_their_weights_are_told() -> None:
    step, _, _ = stepper(lr=1000.0)
    for _ in range(120):
        step(batch())
    assert "large-updates" in {each.kind for each in step.stability_warnings}


def test_updates_lost_in_half_precision_are_told() -> None:
    torch.manual_seed(0)
    model = Model().bfloat16()
    step, _, _ = stepper(lr=1e-6, model=model)
    for _ in range(120):
        x, y = batch()
        step((x.bfloat16(), y))
    assert "lost-updates" in {each.kind for each in step.stability_warnings}


def test_it_changes_nothing_and_can_be_switched_off() -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        step, model, _ = stepper(**options)
        for _ in range(130):
            step(batch())
        return [each.clone() for each in model.parameters()]

    ours, theirs = trained(), trained(watch_stability=False)
    assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


def test_a_watched_run_and_its_report_tell_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    monkeypatch.delenv("OOMPH_RUN_DIR", raising=False)
    with oomph.watching(prints=False) as run:
        directory = run._run.directory
        step, _, _ = stepper(lr=1000.0, micro_batch=8)
        for _ in range(120):
            step(batch())
            run.step(16)
    report = diagnose(read_run(directory))
    (found,) = [each for each in report.findings if each.kind == "unstable"]
    assert "updates are large beside their weights" in " ".join((found.sentence, *found.evidence))
    assert any("smaller learning rate" in each for each in found.advice)
    step(batch())  # after the run: nothing is written any more


def test_a_loop_without_a_stepper_observes_its_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OOMPH_RUNS", str(tmp_path))
    monkeypatch.delenv("OOMPH_RUN_DIR", raising=False)
    with oomph.watching(prints=False) as run:
        directory = run._run.directory
        for number in range(400):
            run.observe(loss=50.0 if number % 40 == 39 else 1.0)
    assert "the loss jumped" in capsys.readouterr().err
    events = [event.kind for event in read_run(directory).events]
    assert "unstable" in events
