"""What short runs say: the smallest batch that trains as well, the largest that is useful."""

from __future__ import annotations

from typing import Any

import pytest

from oomph.records.stability_study import StabilityStudy, StudyRun
from oomph.stability.study_judging import judged

CALM = (2.0, 1.5, 1.2)


def run_of(size: int, rule: Any, end: float | None, seed: int = 0, **other: Any) -> StudyRun:
    losses = other.pop("losses", (*CALM, end))
    return StudyRun(
        batch_size=size,
        rule=rule,
        learning_rate=size / 64,
        seed=seed,
        num_steps=other.pop("num_steps", 1000),
        examples=tuple(range(len(losses))),
        losses=losses,
        noise_scale=other.pop("noise_scale", None),
        lasted_s=1.0,
    )


def study_of(*runs: StudyRun) -> StabilityStudy:
    return judged(
        runs,
        workload="w",
        batch_size=64,
        num_examples=1000,
        device="cpu",
        diverging_rate=None,
    )


OWN = (run_of(64, "as-is", 0.50), run_of(64, "as-is", 0.52, 1))


def test_the_smallest_and_the_largest_that_train_as_well_are_named() -> None:
    study = study_of(
        *OWN,
        run_of(16, "scaled", 0.51),
        run_of(32, "scaled", 0.50),
        run_of(128, "scaled", 0.53),
        run_of(256, "scaled", 0.90),
    )
    assert study.smallest is not None
    assert study.largest is not None
    assert (study.smallest.batch_size, study.largest.batch_size) == (16, 128)


def test_a_batch_beyond_one_that_does_not_train_as_well_is_not_recommended() -> None:
    study = study_of(*OWN, run_of(32, "scaled", 0.9), run_of(16, "scaled", 0.5))
    assert study.smallest is not None
    assert study.smallest.batch_size == 64


def test_the_kept_learning_rate_counts_where_the_rule_loses() -> None:
    study = study_of(*OWN, run_of(32, "scaled", 0.9), run_of(32, "kept", 0.4))
    assert study.smallest is not None
    assert (study.smallest.batch_size, study.smallest.rule) == (32, "kept")


@pytest.mark.parametrize("losses", [(2.0, 0.3, 1.9, 0.2, 1.9, 0.5), (2.0, None)])
def test_a_loss_that_oscillates_or_diverges_does_not_train_as_well(losses: Any) -> None:
    study = study_of(*OWN, run_of(32, "kept", None, losses=losses))
    assert [cell.trains_as_well for cell in study.cells] == [False, True]


def test_nothing_is_recommended_if_the_own_batch_diverges() -> None:
    study = study_of(run_of(64, "as-is", None), run_of(32, "scaled", 0.5))
    assert (study.smallest, study.largest, study.confidence) == (None, None, "low")


def test_confidence_needs_seeds_steps_and_progress() -> None:
    assert study_of(*OWN).confidence == "fair"
    assert study_of(OWN[0]).confidence == "low"
    few = run_of(128, "scaled", 0.5, num_steps=9)
    assert "the largest batch made 9 steps only" in study_of(*OWN, few).limits
    apart = run_of(64, "as-is", 1.9, 1)
    assert study_of(OWN[0], apart).confidence == "low"


def test_the_noise_scale_is_that_of_the_own_runs() -> None:
    own = run_of(64, "as-is", 0.5, noise_scale=100.0), run_of(64, "as-is", 0.5, 1, noise_scale=50.0)
    assert study_of(*own, run_of(32, "scaled", 0.5, noise_scale=9.0)).noise_scale == 75.0
