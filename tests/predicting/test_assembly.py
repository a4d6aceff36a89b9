"""A prediction is put together from exact parts and named intervals; the verdict is by replay."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.assembly import Card, assemble
from oomph.predicting.overhead import Interval
from oomph.records.prediction import Prediction
from oomph.records.trace import Op, Trace
from oomph.records.workload import Variant
from oomph.units import GIB, MIB
from predicting.test_scaling import trace_of

VARIANT = Variant(micro_batch=2)


def card(usable: int, context: tuple[int, int, int] = (300 * MIB, 400 * MIB, 500 * MIB)) -> Card:
    return Card(
        name="a card",
        usable=Interval(usable, usable, usable, "as given"),
        context=Interval(*context, "published"),
    )


def predicted(trace: Trace, usable: int = 16 * GIB) -> Prediction:
    return assemble(trace, VARIANT, card(usable))


def test_the_device_has_what_torch_reserves_and_the_context() -> None:
    told = predicted(trace_of([GIB, 2 * GIB], [1, 2, -1, -2], 2))
    assert told.reserved_bytes == 3 * GIB
    assert told.device_bytes == 3 * GIB + 400 * MIB
    unseen = 3 * GIB // 100 + 40 * MIB
    assert told.low_bytes == 3 * GIB + 300 * MIB - unseen
    assert told.high_bytes == 3 * GIB + 500 * MIB + unseen


@pytest.mark.parametrize(
    ("usable", "verdict"),
    [
        (3 * GIB + 600 * MIB, "yes"),
        (3 * GIB + 500 * MIB, "uncertain"),
        (3 * GIB + 400 * MIB, "uncertain"),
        (3 * GIB + 300 * MIB, "uncertain"),
        (3 * GIB + 298 * MIB, "no"),
    ],
)
def test_it_fits_if_it_fits_at_the_worst_of_what_is_unknown(usable: int, verdict: str) -> None:
    assert predicted(trace_of([GIB, 2 * GIB], [1, 2, -1, -2], 2), usable).fits == verdict


def test_what_fits_only_after_the_cache_was_given_back_is_told() -> None:
    # Two small blocks are cached when a large one comes: together they do not fit.
    trace = trace_of([GIB, GIB, 2 * GIB], [1, 2, -1, -2, 3, -3], 2)
    roomy, tight = predicted(trace), predicted(trace, 3 * GIB)
    assert (roomy.fits, roomy.num_retries) == ("yes", 0)
    assert (tight.fits, tight.num_retries) == ("yes", 1)
    assert (roomy.reserved_bytes, tight.reserved_bytes) == (4 * GIB, 2 * GIB)


def test_the_workspace_of_convolutions_is_an_unknown_that_widens_the_bar() -> None:
    trace = trace_of([GIB], [1], 2)
    convolution = Op(name="convolution", phase="forward", flops=1, moved_bytes=GIB, dtype="float32")
    plain, convolved = predicted(trace), predicted(replace(trace, ops=[convolution]))
    assert convolved.high_bytes == plain.high_bytes + GIB
    (named,) = (unknown for unknown in convolved.unknowns if "cuDNN" in unknown.what)
    assert convolved.low_bytes == plain.low_bytes + named.low_bytes < plain.low_bytes


def test_empty_tensors_take_nothing() -> None:
    assert predicted(trace_of([0, MIB], [1, 2, -1, -2], 2)).allocated_bytes == MIB


@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=30))
def test_live_allocated_reserved_and_device_stand_in_this_order(sizes: list[int]) -> None:
    events = list(range(1, len(sizes) + 1))
    told = predicted(trace_of(sizes, events, 2))
    assert sum(told.by_category.values()) <= told.allocated_bytes <= told.reserved_bytes
    assert told.low_bytes <= told.device_bytes <= told.high_bytes
