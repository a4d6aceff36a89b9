"""A footprint says in columns what the traces say, and what other ways to train would take."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomph.predicting.combinations import NotSpliceable, with_step_of, without_accumulation
from oomph.predicting.footprint import Footprint, Kernel, footprint_of
from oomph.predicting.scaling import affine
from oomph.predicting.timeline import find_peak
from oomph.records.trace import Trace
from oomph.records.workload import Precision, Variant
from predicting.footprints import traced

MANY = Variant(micro_batch=2, accumulation=2)
ONCE = Variant(micro_batch=2)


def footprint(optimizer: str, variant: Variant) -> Footprint:
    return footprint_of(
        affine(
            traced(optimizer, replace(variant, micro_batch=2)),
            traced(optimizer, replace(variant, micro_batch=3)),
        )
    )


def ops_of(footprint: Footprint) -> list[Kernel]:
    return [footprint.kernels[number] for number in footprint.op]


def direct(optimizer: str, variant: Variant, micro_batch: int) -> Trace:
    return traced(optimizer, replace(variant, micro_batch=micro_batch))


@pytest.mark.parametrize("variant", [MANY, ONCE, replace(MANY, precision="bf16")])
def test_live_bytes_are_those_of_the_trace_at_any_micro_batch(variant: Variant) -> None:
    found = footprint("adamw", variant)
    for micro_batch in (2, 3, 7):
        expected = find_peak(direct("adamw", variant, micro_batch)).live_bytes
        assert found.live_bytes(micro_batch) == expected


@pytest.mark.parametrize("checkpointing", ["none", "blocks"])
def test_without_accumulation_it_is_as_if_traced_so(checkpointing: str) -> None:
    cut = without_accumulation(footprint("adamw", replace(MANY, checkpointing=checkpointing)))
    for micro_batch in (2, 5):
        trace = direct("adamw", replace(ONCE, checkpointing=checkpointing), micro_batch)
        # The loss that is divided by the number of micro-steps: a block of 4 bytes.
        assert 0 <= cut.live_bytes(micro_batch) - find_peak(trace).live_bytes <= 8
        assert len(cut.op) - len(trace.ops) == 2  # the division of the loss, and its backward


@pytest.mark.parametrize("optimizer", ["for-loop", "sgd", "momentum"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_step_of_another_optimizer_is_as_if_traced_so(
    optimizer: str, precision: Precision
) -> None:
    variant = replace(MANY, precision=precision)
    spliced = with_step_of(footprint("adamw", variant), footprint(optimizer, MANY))
    whole = footprint(optimizer, variant)
    for micro_batch in (2, 5):
        assert spliced.live_bytes(micro_batch) == whole.live_bytes(micro_batch)
        sizes, events, *_ = spliced.requests(micro_batch)
        expected, expected_events, *_ = whole.requests(micro_batch)
        requested = [sizes[event - 1] for event in events if event > 0]
        assert requested == [expected[event - 1] for event in expected_events if event > 0]
    assert ops_of(spliced) == ops_of(whole)


def test_the_step_of_another_model_is_refused() -> None:
    mine = footprint("adamw", MANY)
    theirs = replace(mine, fixed_bytes=mine.fixed_bytes + 512)
    with pytest.raises(NotSpliceable, match="other parameters"):
        with_step_of(mine, theirs)
