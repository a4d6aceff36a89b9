"""The peak: how much, when, and who."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.timeline import (
    by_category,
    by_module,
    find_peak,
    live_at,
    moment_of,
    timeline_of,
)
from oomph.records.trace import Allocation, Category, Trace
from predicting.test_scaling import trace_of

CATEGORIES: tuple[Category, ...] = ("parameters", "activations", "temporaries", "gradients")


def test_the_peak_is_the_first_moment_of_the_most_live_bytes() -> None:
    trace = trace_of([10, 30, 5, 30], [1, 2, -2, 3, -1, 4], micro_batch=2)
    peak = find_peak(trace)
    assert (peak.live_bytes, peak.at_event) == (40, 1)
    assert [holder.size_bytes for holder in peak.holders] == [10, 30]
    assert moment_of(trace, peak.at_event).phase == "forward"
    assert by_category(peak.holders) == {"activations": 40}
    assert by_module(peak.holders) == {"": 40}


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=40))
def test_the_holders_of_the_peak_add_up_to_it(blocks: list[tuple[int, bool]]) -> None:
    events: list[int] = []
    for number, (_, dies_at_once) in enumerate(blocks, start=1):
        events += [number, -number] if dies_at_once else [number]
    trace = trace_of([size for size, _ in blocks], events, micro_batch=2)
    peak = find_peak(trace)
    assert sum(holder.size_bytes for holder in peak.holders) == (peak.live_bytes if blocks else 0)


def test_what_was_freed_is_not_alive() -> None:
    assert live_at([1, 2, -1, 3], 3) == [1, 2]


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Blocks of any category come and go in any order; the last step begins anywhere."""
    sizes = draw(st.lists(st.integers(1, 10**9), min_size=1, max_size=60))
    events: list[int] = []
    live: list[int] = []
    for number in range(1, len(sizes) + 1):
        while draw(st.booleans()) and live:
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
        events.append(number)
        live.append(number)
    trace = trace_of(sizes, events, micro_batch=2)
    return replace(
        trace,
        allocations=[
            replace(block, category=draw(st.sampled_from(CATEGORIES)))
            for block in trace.allocations
        ],
        step_starts=[0, draw(st.integers(0, len(events)))],
    )


def live_totals(trace: Trace) -> list[int]:
    """Live bytes when the last step begins, and after each of its events."""
    sizes = [block.size_bytes for block in trace.allocations]
    changes = [sizes[event - 1] if event > 0 else -sizes[-event - 1] for event in trace.events]
    return list(accumulate(changes, initial=0))[trace.step_starts[-1] :]


@given(trace=traces(), most_points=st.integers(4, 80))
def test_thinning_keeps_the_peak_and_the_ends_of_the_step(trace: Trace, most_points: int) -> None:
    timeline = timeline_of(trace, most_points)
    totals = [sum(column) for column in zip(*timeline.live_bytes, strict=True)]
    expected = live_totals(trace)
    if any(expected):
        assert max(totals) == max(expected)
        assert (totals[0], totals[-1]) == (expected[0], expected[-1])
    assert len(timeline.positions) <= most_points
    assert len(timeline.ops) == len(timeline.positions)


@given(trace=traces(), most_points=st.integers(4, 80))
def test_the_categories_add_up_to_what_is_alive_there(trace: Trace, most_points: int) -> None:
    timeline = timeline_of(trace, most_points)
    expected = live_totals(trace)
    num_events = max(len(expected) - 1, 1)
    assert list(timeline.positions) == sorted(set(timeline.positions))
    for place, position in enumerate(timeline.positions):
        alive = expected[round(position * num_events)]
        assert sum(layer[place] for layer in timeline.live_bytes) == alive


def test_a_timeline_is_of_the_last_step_and_says_where_its_phases_begin() -> None:
    trace = replace(
        trace_of([10, 30, 5, 7], [1, 2, -2, 3, 4, -4], micro_batch=2),
        step_starts=[1, 2],
        phase_starts=[(0, "build"), (1, "forward"), (2, "forward"), (4, "backward")],
    )
    timeline = timeline_of(trace)
    assert timeline.phases == ((0.0, "forward"), (0.5, "backward"))
    assert timeline.positions == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert timeline.live_bytes == ((40, 10, 15, 22, 15),)


def test_layers_that_stay_lie_below_those_that_come_and_go() -> None:
    trace = trace_of([1, 2, 3], [1, 2, 3], micro_batch=2)
    kinds: tuple[Category, ...] = ("activations", "parameters", "gradients")
    blocks = [
        replace(block, category=kind) for block, kind in zip(trace.allocations, kinds, strict=True)
    ]
    assert timeline_of(replace(trace, allocations=blocks)).categories == (
        "parameters",
        "gradients",
        "activations",
    )


@pytest.mark.parametrize(("module", "told"), [("", "mm"), ("blocks.3", "mm in blocks.3")])
def test_each_position_names_what_had_last_allocated(module: str, told: str) -> None:
    block = Allocation(
        size_bytes=8, op="mm", module=module, phase="forward", category="activations"
    )
    trace = replace(trace_of([8], [1, -1], micro_batch=2), allocations=[block])
    assert timeline_of(trace).ops == ("", told, told)
