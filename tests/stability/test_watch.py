"""The watch warns of what goes wrong, names what to change, and is silent while all is well."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from oomph.records.stability import StabilityWarning
from oomph.stability.watch import UpdateSize, Watch, oscillation_of


def falling(num: int, seed: int = 0, spread: float = 0.2, end: float = 1.0) -> list[float]:
    """A loss that falls from 2.3, with noise."""
    generator = random.Random(seed)  # noqa: S311
    return [
        end + (2.3 - end) * math.exp(-4 * n / num) + generator.gauss(0, spread) for n in range(num)
    ]


def warnings_of(losses: list[float], **keywords: Any) -> list[StabilityWarning]:
    watch = Watch()
    return [
        each
        for number, loss in enumerate(losses)
        for each in watch.step(loss, **{name: values[number] for name, values in keywords.items()})
    ]


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("num", [10, 400, 5000])
@pytest.mark.parametrize("end", [0.1, 1.0, 2.2])
def test_a_loss_that_falls_is_met_with_silence(num: int, spread: float, end: float) -> None:
    assert warnings_of(falling(num, spread=spread, end=end)) == []


def test_a_fine_tuning_that_hardly_moves_is_met_with_silence() -> None:
    generator = random.Random(1)  # noqa: S311
    assert warnings_of([1.8 + generator.gauss(0, 0.3) for _ in range(4000)]) == []


def thrown_about(num: int) -> list[float]:
    """A loss that is thrown far up every 40 steps, and wins nothing."""
    generator = random.Random(2)  # noqa: S311
    return [2.3 * (1 + 5 * (n % 40 == 39)) - 0.8 * generator.random() for n in range(num)]


def test_a_loss_that_goes_up_and_down_is_told_once_with_what_to_change() -> None:
    found = [each for each in warnings_of(thrown_about(2000)) if each.kind == "oscillation"]
    assert len(found) == 1
    assert "up and down" in found[0].sentence
    assert "scale_learning_rate" in found[0].advice
    assert found[0].step < 500


def test_jumps_are_told_if_there_are_several() -> None:
    losses = falling(1000, spread=0.05)
    once = [*losses]
    once[500] = 40.0
    assert warnings_of(once) == []
    for at in (500, 540, 590):
        losses[at] = 40.0
    (found,) = [each for each in warnings_of(losses) if each.kind == "spikes"]
    assert (found.step, "to 40" in found.evidence) == (591, True)


def test_gradients_far_larger_than_the_others_are_told_unless_clipped() -> None:
    losses, norms = [1.0] * 300, [1.0] * 300
    for at in (100, 150, 200):
        norms[at] = 50.0
    (found,) = warnings_of(losses, grad_norm=norms)
    assert (found.kind, found.advice.split(",")[0]) == ("gradient-outliers", "clip_grad_norm=2")
    assert warnings_of(losses, grad_norm=norms, is_clipped=[True] * 300) == []


def test_a_loss_scaler_may_skip_at_the_start_but_not_all_the_time() -> None:
    losses = [1.0] * 600
    at_start = [float(n < 20) for n in range(600)]
    often = [float(n % 10 == 0) for n in range(600)]
    assert warnings_of(losses, is_skipped=at_start) == []
    (found,) = warnings_of(losses, is_skipped=often)
    assert (found.kind, "bf16" in found.advice) == ("scaler-skips", True)


def test_updates_out_of_proportion_name_the_weight() -> None:
    def of(ratio: float, lost: float | None = None) -> list[str]:
        watch = Watch()
        for _ in range(200):
            watch.step(1.0)
        found = watch.updates(
            [
                UpdateSize(name="a.weight", ratio=ratio / 2),
                UpdateSize(name="b.weight", ratio=ratio, lost_ratio=lost),
            ]
        )
        return [f"{each.kind}: {each.evidence}" for each in found]

    assert of(1e-3) == []
    assert of(0.3) == ["large-updates: a step changes b.weight by 30%"]
    assert of(1e-9) == ["small-updates: at most 1e-09 of a weight in a step"]
    assert of(1e-5, 0.84) == ["lost-updates: 84% of b.weight did not change"]


def test_the_way_of_a_loss_over_what_it_won() -> None:
    assert oscillation_of([2.0, 1.0, 0.5]) == 1.0
    assert oscillation_of([2.0, 1.0, 1.5, 1.0]) == 2.0
    assert oscillation_of([1.0, 2.0, 1.0]) == math.inf
    assert oscillation_of([1.0]) is None
