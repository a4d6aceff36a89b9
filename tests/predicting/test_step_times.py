"""The time of a step by running sums is that of the two clocks."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from oomph.predicting.combinations import without_accumulation
from oomph.predicting.footprint import Footprint
from oomph.predicting.links import links_among
from oomph.predicting.speed import (
    BEST,
    WORST,
    MicroSteps,
    PricedFootprint,
    estimate,
    prices_on,
    step_seconds,
)
from oomph.records.gpu_model import GpuModel
from oomph.records.workload import Variant
from oomph.sensing.catalog import find
from predicting.footprints import traced
from predicting.test_footprint import MANY, footprint


def step_times(
    footprint: Footprint, model: GpuModel, num_gpus: int = 1
) -> Callable[..., float | None]:
    """Of a footprint that has its optimizer's step."""
    priced = PricedFootprint(footprint, prices_on(model, "fp32", links_among(model, num_gpus)))
    return functools.partial(step_seconds, MicroSteps(priced, has_step=True), None)


A100, T4 = (find(name).model for name in ("a100-80gb", "t4"))


@pytest.mark.parametrize("model", [A100, T4], ids=lambda model: model.name)
@pytest.mark.parametrize("accumulation", [2, 3, 4, 32])
def test_it_is_the_estimate_at_any_micro_batch(model: GpuModel, accumulation: int) -> None:
    times = step_times(footprint("adamw", MANY), model)
    for micro_batch in (2, 7):
        ops = traced("adamw", Variant(micro_batch=micro_batch, accumulation=2)).ops
        expected = estimate(ops, model, num_micro_steps=accumulation)
        assert expected is not None
        assert times(micro_batch, accumulation) == pytest.approx(expected.step_s)


def test_at_any_pace_it_is_the_end_of_the_range_that_the_estimate_gives() -> None:
    times = step_times(footprint("adamw", MANY), T4)
    expected = estimate(traced("adamw", Variant(micro_batch=3, accumulation=2)).ops, T4)
    assert expected is not None
    assert times(3, 2, BEST) == pytest.approx(expected.low_s)
    assert times(3, 2, WORST) == pytest.approx(expected.high_s)
    assert times(3, 2) == pytest.approx(expected.step_s)  # and it is not kept


def test_without_accumulation_it_is_the_estimate_but_for_the_division() -> None:
    times = step_times(without_accumulation(footprint("adamw", MANY)), A100)
    expected = estimate(traced("adamw", Variant(micro_batch=5)).ops, A100)
    assert expected is not None
    assert times(5, 1) == pytest.approx(expected.step_s, rel=0.03)


def test_a_gpu_without_a_bandwidth_has_no_time() -> None:
    from dataclasses import replace

    unknown = replace(A100, memory_bandwidth_bytes_per_s=None)
    assert step_times(footprint("adamw", MANY), unknown)(2, 2) is None


def test_several_gpus_have_the_estimate_of_the_third_clock() -> None:
    times = step_times(footprint("adamw", MANY), A100, num_gpus=4)
    ops = traced("adamw", Variant(micro_batch=3, accumulation=2)).ops
    expected = estimate(ops, A100, links=links_among(A100, 4), num_micro_steps=4)
    assert expected is not None
    assert times(3, 4) == pytest.approx(expected.step_s)
