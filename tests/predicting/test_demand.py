"""Stored peaks predict the same on any card as the trace itself."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import pytest

from oomph.predicting.allocator_settings import AllocatorSettings, settings_for
from oomph.predicting.demand import Demand, demand_from, demand_of, replay_trace, unlimited_peaks
from oomph.predicting.footprint import work_of
from oomph.predicting.overhead import Interval
from oomph.predicting.prediction import Card, assemble, assemble_demand, bus_bytes
from oomph.predicting.replay import Replayed, with_outputs_kept
from oomph.predicting.residuals import kind_of
from oomph.records.trace import Trace
from oomph.records.workload import Variant
from oomph.units import MIB
from predicting.footprints import traced

VARIANT = Variant(micro_batch=7, accumulation=2)


def card_of(size_bytes: int) -> Card:
    usable = Interval(size_bytes - 4 * MIB, size_bytes, size_bytes + 4 * MIB, "made up")
    return Card(name="some", usable=usable, context=Interval(1 * MIB, 2 * MIB, 3 * MIB, "made up"))


def demand(trace: Trace, *, expandable: bool) -> Demand:
    settings = AllocatorSettings(expandable_segments=expandable)
    return demand_of(trace, settings)


@pytest.mark.parametrize("expandable", [False, True])
def test_a_prediction_from_what_was_kept_is_that_of_the_trace(expandable: bool) -> None:
    trace = traced("adamw", VARIANT)
    kept = unlimited_peaks(demand(trace, expandable=expandable))
    variant = replace(VARIANT, expandable_segments=expandable)
    settings = settings_for(variant)
    sizes = [kept.allocated_bytes * share // 16 for share in range(6, 40, 2)]
    verdicts = set()
    for size in sizes:
        card = card_of(size)
        expected = assemble(trace, variant, card)
        found = assemble_demand(
            demand_from(
                kept,
                functools.partial(replay_trace, trace, settings),
                functools.partial(replay_trace, with_outputs_kept(trace), settings),
            ),
            variant,
            card,
            kind=kind_of(trace.ops),
            host_bytes=trace.host_peak_bytes,
            bus_bytes=bus_bytes(work_of(trace.ops), VARIANT.accumulation),
            notes=trace.notes,
            doubt=trace.doubt,
        )
        # How often the allocator tries again before it fails is not kept.
        retries = found.num_retries if expected.fits == "no" else expected.num_retries
        assert found == replace(expected, num_retries=retries)
        verdicts.add(found.fits)
    assert {"yes", "no"} <= verdicts


def test_a_model_without_convolutions_leaves_cudnn_nothing_to_measure() -> None:
    trace = traced("adamw", VARIANT)
    measured = replace(trace, measures_convolutions=True)  # torch.backends.cudnn.benchmark
    card = card_of(1 << 30)
    assert assemble(measured, VARIANT, card) == assemble(trace, VARIANT, card)


def test_far_from_the_limit_nothing_is_replayed() -> None:
    trace = traced("adamw", VARIANT)
    kept = unlimited_peaks(demand(trace, expandable=False))

    def under(limit_bytes: int) -> Replayed:
        raise AssertionError(f"a replay in {limit_bytes} was asked for")

    roomy = card_of(4 * kept.reserved_with_outputs_bytes + 1000 * MIB)
    assert (
        assemble_demand(demand_from(kept, under, under), VARIANT, roomy, kind="transformer").fits
        == "yes"
    )
    narrow = card_of(kept.allocated_bytes // 2)
    assert (
        assemble_demand(demand_from(kept, under, under), VARIANT, narrow, kind="transformer").fits
        == "no"
    )


def test_more_micro_steps_carry_more_over_the_bus() -> None:
    ops = traced("adamw", VARIANT).ops
    assert bus_bytes(work_of(ops), 2) == 0
    copied = [
        op
        if op.phase != "forward"
        else type(op)(
            name="copy_to_host",
            phase=op.phase,
            flops=0,
            moved_bytes=10,
            dtype=op.dtype,
        )
        for op in ops
    ]
    for few, many in product((2, 3), (5, 9)):
        once = bus_bytes(work_of(copied), 3) - bus_bytes(work_of(copied), 2)
        more = bus_bytes(work_of(copied), many) - bus_bytes(work_of(copied), few)
        assert more == (many - few) * once > 0
