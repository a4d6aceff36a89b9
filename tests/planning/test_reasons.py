"""What a search found, in words: why this one, what it costs here, and what would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomph.exporting.planned import Planned
from oomph.planning import reasons
from oomph.planning.choices import choices_for
from oomph.planning.ranking import Candidate, Checked, Found, varied
from oomph.records.workload import Variant
from oomph.tricks.batch_size import new_rate
from oomph.units import GIB
from planning.plans import plan_of, prediction_of, variant_of
from planning.test_choices import BERT, plain

CHOICES = choices_for(plain(batch_size=64), ())
FOUND = Found(
    choices=CHOICES,
    compared=(),
    best=None,
    best_s=None,
    is_certain=False,
    shown=(),
    smallest=variant_of(),
    fastest_s=2.0,
    num_candidates=1,
)


def planned(variant: Variant, seconds: float | None) -> Planned:
    prediction = prediction_of(variant)
    return reasons.plan_of(variant, prediction, seconds, "train.py:workload", FOUND, BERT)


def test_another_batch_changes_training_and_its_time_is_for_the_given_one() -> None:
    variant = variant_of(micro_batch=16, accumulation=1)
    plan = planned(variant, 1.0)
    assert plan.stability == "changes"
    assert plan.tricks[-1].name == "batch-size"
    assert plan.tricks[-1].caveat == new_rate(BERT.optimizer_class, 0.25).advice
    assert plan.relative_time == pytest.approx(2.0)  # four steps of 1 s to the fastest of 2 s


def test_the_first_is_recommended_and_the_others_are_held_against_it() -> None:
    best = plan_of()
    other = replace(plan_of(num_gpus=2, accumulation=8), relative_time=2.5, recommended=False)
    first, second = reasons.recommend([best, other], "balance")
    assert (first.recommended, second.recommended) == (True, False)
    assert "at least 4.0 GiB stay free" in first.why
    assert second.why == ("2.00 x the time, 1.00 x the memory of the recommended plan, on 2 GPUs")
    assert reasons.recommend([], "balance") == ()


def test_a_plan_whose_bar_reaches_beyond_the_gpu_says_what_that_means() -> None:
    plan = plan_of()
    full = replace(plan.prediction, high_bytes=17 * GIB)
    fits = replace(plan, prediction=full)
    assert "when torch frees its cache" in reasons.recommend([fits], "balance")[0].why
    uncertain = replace(plan, prediction=replace(full, fits="uncertain"))
    assert "is tight" in reasons.recommend([uncertain], "balance")[0].why


def test_a_plan_whose_time_nobody_knows_is_not_called_fast() -> None:
    untimed = replace(plan_of(num_gpus=16, accumulation=1), relative_time=None)
    timed = plan_of(num_gpus=8, accumulation=2)
    trick = planned(untimed.variant, None).tricks[0]
    alone = reasons.recommend([replace(untimed, tricks=(trick,)), timed], "balance")[0]
    assert "changes the least of what fits on 16 GPUs (its time is unknown)" in alone.why
    beside = reasons.recommend([replace(timed, tricks=(trick,)), untimed], "balance")[0]
    assert beside.why.startswith("the fastest that fits")


def test_caveats_are_answered_with_the_seconds_of_this_model() -> None:
    def seconds(variant: Variant) -> float:
        return (1.0 if variant.accumulation == 1 else 1.1) * (
            1.0 if variant.checkpointing == "none" else 1.3
        )

    plan = plan_of(checkpointing="blocks", precision="fp16")
    said = reasons.caveats(plan, CHOICES, BERT, seconds)
    assert "accumulation makes a step about 10% slower; there is no BatchNorm" in said[0]
    assert said[1] == "recomputation makes a step about 30% slower at this micro-batch"
    assert said[2].startswith("dropout masks differ")
    free = reasons.caveats(plan, CHOICES, BERT, lambda _: 1.0)
    assert free[0].startswith("accumulation makes a step hardly slower; ")
    normalised = replace(BERT, batch_norm_names=("a", "b"), has_dropout=False)
    layers = reasons.caveats(plan, CHOICES, normalised, seconds)
    assert "2 BatchNorm layers see 4 examples at a time" in layers[0]
    assert not any("dropout" in each for each in layers)


def test_the_shortfall_names_the_largest_part_and_the_smallest_gpu_that_would_do() -> None:
    short = replace(
        prediction_of(variant_of()),
        device_bytes=20 * GIB,
        reserved_bytes=19 * GIB,
        high_bytes=21 * GIB,
        by_category={"optimizer": 12 * GIB, "parameters": 6 * GIB},
    )
    found = reasons.shortfall(short, "enough", reasons.num_gpus_needed(short))
    assert found.missing_bytes == 4 * GIB
    assert found.largest_part == "optimizer 12.0 GiB"
    assert found.smallest_gpu == "enough"
    assert (found.variant, found.device_bytes) == (short.variant, 20 * GIB)
    assert found.num_gpus == 2  # 3 GiB that are not divided, and half of 18


def test_the_gpus_that_would_do_share_the_batch_and_are_more_than_were_compared() -> None:
    short = replace(
        prediction_of(variant_of()), high_bytes=31 * GIB, by_category={"optimizer": 30 * GIB}
    )
    assert reasons.num_gpus_needed(short) == 2
    assert reasons.num_gpus_needed(short, batch_size=24) == 2
    assert reasons.num_gpus_needed(short, batch_size=1) is None
    two = replace(short, variant=replace(short.variant, sharding="fsdp", num_gpus=2))
    assert reasons.num_gpus_needed(two) == 4  # 30 GiB are what each of the two holds
    assert reasons.num_gpus_needed(two, batch_size=2) is None


def test_the_gpus_that_would_do_fill_their_machines() -> None:
    short = replace(
        prediction_of(variant_of()), high_bytes=90 * GIB, by_category={"optimizer": 88 * GIB}
    )
    assert short.capacity_bytes == 16 * GIB
    assert reasons.num_gpus_needed(short) == 8
    assert reasons.num_gpus_needed(short, 6) == 12
    assert reasons.num_gpus_needed(short, 7) == 7


def test_no_number_of_gpus_will_do_for_what_cannot_be_divided() -> None:
    short = replace(
        prediction_of(variant_of()), high_bytes=21 * GIB, by_category={"activations": 20 * GIB}
    )
    assert reasons.num_gpus_needed(short) is None


# ---- a front of dozens ---------------------------------------------------------------------------


def placed(micro_batch: int, step_s: float, device: int, stability: Any = "rounding") -> Any:
    candidate = Candidate(
        variant=Variant(micro_batch=micro_batch),
        stability=stability,
        num_tricks=1,
        step_s=step_s,
        least_bytes=device,
    )
    return candidate, Checked(device_bytes=device, fits="yes")


def test_of_a_long_front_the_best_the_mildest_and_the_smallest_are_shown() -> None:
    front = [placed(n, 1 + n / 10, 1000 - 20 * n) for n in range(1, 40)]
    mild = placed(50, 9.0, 990, "same")
    best = front[2][0]
    shown = varied([*front, mild], best, 5)
    assert len(shown) == 5
    assert shown[0] is best
    assert mild[0] in shown
    assert front[-1][0] in shown
    assert shown[1:] == sorted(shown[1:], key=lambda one: one.step_s)


def test_a_best_that_is_not_on_the_front_is_shown_and_nothing_else_if_nothing_fits() -> None:
    best = placed(1, 1.0, 100)[0]
    assert varied([], best, 5) == [best]
    assert varied([placed(2, 1.0, 10)], None, 5) == []
