"""What a search found, in words: why this one, what it costs here, and what would do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oomph.planning import answers
from oomph.planning.planner import varied
from oomph.planning.search import Candidate, Checked
from oomph.records.workload import Variant
from oomph.units import GIB
from planning.plans import plan_of, prediction_of, variant_of


def facts(**changes: Any) -> answers.Facts:
    given: dict[str, Any] = {
        "workload": "train.py:workload",
        "as_is": prediction_of(variant_of()),
        "fastest_s": 2.0,
        "changing": frozenset(),
        "prefer": "balance",
        "batch_norm_names": (),
        "has_dropout": False,
        "block_names": (),
        "batch_size": 64,
        "rate_advice": lambda ratio: f"rate x {ratio}",
    }
    return answers.Facts(**{**given, **changes})


def test_another_batch_changes_training_and_its_time_is_for_the_given_one() -> None:
    variant = variant_of(micro_batch=16, accumulation=1)
    plan = answers.plan_of(variant, prediction_of(variant), 1.0, facts())
    assert plan.stability == "changes"
    assert plan.tricks[-1].name == "batch-size"
    assert plan.tricks[-1].caveat == "rate x 0.25"
    assert plan.relative_time == pytest.approx(2.0)  # four steps of 1 s to the fastest of 2 s


def test_the_first_is_recommended_and_the_others_are_held_against_it() -> None:
    best = plan_of()
    other = replace(plan_of(num_gpus=2, accumulation=8), relative_time=2.5, recommended=False)
    first, second = answers.told_apart([best, other], facts())
    assert (first.recommended, second.recommended) == (True, False)
    assert "leaves 4.0 GiB free at the worst" in first.why
    assert second.why == "2.00 x the time, 1.00 x the memory, 2 GPUs of the recommended one"
    assert answers.told_apart([], facts()) == ()


def test_a_plan_whose_bar_reaches_beyond_the_gpu_says_what_that_means() -> None:
    plan = plan_of()
    full = replace(plan.prediction, high_bytes=17 * GIB)
    fits = replace(plan, prediction=full)
    assert "torch gives back what it has cached" in answers.told_apart([fits], facts())[0].why
    uncertain = replace(plan, prediction=replace(full, fits="uncertain"))
    assert "is tight" in answers.told_apart([uncertain], facts())[0].why


def test_a_plan_whose_time_nobody_knows_is_not_called_fast() -> None:
    untimed = replace(plan_of(num_gpus=16, accumulation=1), relative_time=None)
    timed = plan_of(num_gpus=8, accumulation=2)
    trick = answers.plan_of(untimed.variant, untimed.prediction, None, facts()).tricks[0]
    alone = answers.told_apart([replace(untimed, tricks=(trick,)), timed], facts())[0]
    assert "changes least of what fits on 16 GPUs, whose time nobody knows" in alone.why
    beside = answers.told_apart([replace(timed, tricks=(trick,)), untimed], facts())[0]
    assert beside.why.startswith("the fastest that fits")


def test_caveats_are_answered_with_the_seconds_of_this_model() -> None:
    def seconds(variant: Variant) -> float:
        return (1.0 if variant.accumulation == 1 else 1.1) * (
            1.0 if variant.checkpointing == "none" else 1.3
        )

    plan = plan_of(checkpointing="blocks", precision="fp16")
    said = answers.caveats(plan, facts(has_dropout=True), seconds)
    assert "accumulation costs 10% more of time here, not 16 x; no BatchNorm" in said[0]
    assert said[1] == "recomputation costs 30% more of time at this micro-batch"
    assert said[2].startswith("fp16: whether every value")
    assert said[3].startswith("dropout draws other masks")
    layers = answers.caveats(plan, facts(batch_norm_names=("a", "b")), seconds)
    assert "2 BatchNorm layers see 4 examples at a time" in layers[0]
    assert answers.caveats(None, facts(), seconds) == ()


def test_the_shortfall_names_the_largest_part_and_the_smallest_gpu_that_would_do() -> None:
    short = replace(
        prediction_of(variant_of()),
        device_bytes=20 * GIB,
        reserved_bytes=19 * GIB,
        high_bytes=21 * GIB,
        by_category={"optimizer": 12 * GIB, "parameters": 6 * GIB},
    )
    gpus = [("small", 16 * GIB), ("huge", 80 * GIB), ("enough", 24 * GIB), ("tight", 20 * GIB)]
    found = answers.shortfall(short, gpus, answers.gpus_that_would_do(short))
    assert found.missing_bytes == 4 * GIB
    assert found.largest_part == "optimizer 12.0 GiB"
    assert found.smallest_gpu == "enough"
    assert found.num_gpus == 2  # 3 GiB that are not divided, and half of 18


def test_no_number_of_gpus_will_do_for_what_cannot_be_divided() -> None:
    short = replace(
        prediction_of(variant_of()), high_bytes=21 * GIB, by_category={"activations": 20 * GIB}
    )
    assert answers.gpus_that_would_do(short) is None
    assert answers.shortfall(short, [("small", GIB)], None).smallest_gpu is None


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
