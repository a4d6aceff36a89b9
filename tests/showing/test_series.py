"""Series to draw: few points, and nothing that stood out is lost."""

from __future__ import annotations

from dataclasses import replace

import pytest
from explaining.runs import event, gpu, host, run_of, span, spans, steps
from hypothesis import given
from hypothesis import strategies as st

from oomph.showing.report import (
    Point,
    busy_of,
    cpu_of,
    decimated,
    highest_columns,
    mean_columns,
    memory_of,
    power_of,
    spans_of,
    steps_of,
    waits_of,
)
from oomph.units import GIB


def points(*values: float) -> list[Point]:
    return [
        Point(began_s=float(at), ended_s=at + 1.0, low=value, mean=value, high=value)
        for at, value in enumerate(values)
    ]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=300), st.integers(2, 50))
def test_extremes_survive_and_there_are_never_too_many_points(
    values: list[float], most: int
) -> None:
    kept = decimated(points(*values), most)
    assert len(kept) <= most
    assert min(point.low for point in kept if point.low is not None) == min(values)
    assert max(point.high for point in kept if point.high is not None) == max(values)
    assert [point.at_s for point in kept] == sorted(point.at_s for point in kept)


@given(st.lists(st.sampled_from([0.0, 5.0]), min_size=2, max_size=200), st.integers(2, 50))
def test_breaks_do_not_make_too_many_points_either(waits: list[float], most: int) -> None:
    at_s, made = 0.0, []
    for wait in waits:
        made.append(Point(began_s=at_s, ended_s=at_s + 1, low=1.0, mean=1.0, high=1.0))
        at_s += 1 + wait
    assert len(decimated(made, most)) <= most


def test_few_points_stay_as_they_are() -> None:
    assert decimated(points(1, 2, 3), 6) == points(1, 2, 3)
    assert decimated([]) == []


def test_a_spike_of_one_second_in_a_day_is_still_seen() -> None:
    values = [0.1] * 86_400
    values[50_000] = 0.9
    assert max(point.high or 0 for point in decimated(points(*values))) == 0.9


def test_where_nothing_was_seen_the_line_is_broken() -> None:
    first, second = points(1, 2)
    later = Point(began_s=60, ended_s=61, low=3.0, mean=3.0, high=3.0)
    middle = decimated([first, second, later])[2]
    assert (middle.low, middle.mean, middle.high) == (None, None, None)
    assert 2 < middle.at_s < 60


def test_merged_spans_leave_no_break_between_them() -> None:
    long = [span(10.0 * i, 0.5, ended_s=10.0 * i + 10) for i in range(400)]
    drawn = decimated(busy_of(spans_of(run_of(long), 0)), 100)
    assert all(point.mean == 0.5 for point in drawn)


def test_each_series_is_of_what_it_says() -> None:
    run = run_of(
        [*spans((2, 0.5), least_busy_ratio=0.1, most_busy_ratio=0.9), span(0, 0.7, gpu=1)],
        gpus=[gpu(0), gpu(1)],
        host_spans=[host(3.0)],
        step_spans=[steps(0.25, step_s=0.4)],
    )
    busy = busy_of(spans_of(run, 0))[0]
    assert (busy.low, busy.mean, busy.high) == (0.1, 0.5, 0.9)
    assert [point.mean for point in busy_of(spans_of(run, 1))] == [0.7]
    memory = memory_of(spans_of(run, 0))[0]
    assert (memory.mean, memory.high) == (60 * GIB, 70 * GIB)
    assert power_of(spans_of(run, 0))[0].mean == 300.0
    assert cpu_of(run)[0].mean == 3.0
    assert (steps_of(run, 0)[0].mean, steps_of(run, 0)[0].high) == (0.4, 0.8)
    assert waits_of(run, 0)[0].mean == 0.1
    assert steps_of(run, 7) == []


def test_what_nobody_read_is_not_drawn() -> None:
    run = run_of(spans((2, None), used_bytes=None, power_w=None), host_spans=[host(None, None)])
    assert (
        busy_of(spans_of(run, 0)),
        memory_of(spans_of(run, 0)),
        power_of(spans_of(run, 0)),
        cpu_of(run),
    ) == ([], [], [], [])


def test_columns_hold_the_highest_or_the_mean_and_know_what_was_not_seen() -> None:
    four = points(1, 5, 2, 3)
    assert highest_columns(four, 4.0, 2) == [5, 3]
    assert mean_columns(four, 4.0, 2) == [3, 2.5]
    assert highest_columns(points(1), 4.0, 4) == mean_columns(points(1), 4.0, 4)
    assert mean_columns(points(1), 4.0, 4) == [1, None, None, None]
    assert mean_columns(points(1), 0.0, 2) == [None, None]


def test_a_point_counts_in_a_column_by_how_much_of_it_lies_there() -> None:
    assert mean_columns(points(0, 3, 3), 3.0, 2) == pytest.approx([1.0, 3.0])


def test_a_point_of_no_length_is_seen_where_nothing_else_is() -> None:
    instant = Point(began_s=2.0, ended_s=2.0, low=7.0, mean=7.0, high=7.0)
    assert mean_columns([instant], 4.0, 2) == pytest.approx([None, 7.0])
    assert highest_columns([instant], 2.0, 2)[1] == 7.0


def test_a_halt_is_of_no_step_and_no_line_is_drawn_across_it() -> None:
    halted = (event(10, "halted"), event(30, "resumed"))
    told = replace(steps(0.1, num_steps=100, step_s=0.5), ended_s=50.0, longest_step_s=20.5)
    run = run_of(spans((50, 0.9)), step_spans=[told], events=halted)
    before, between, after = decimated(steps_of(run, 0))
    assert (before.began_s, before.ended_s) == (0.0, 10.0)
    assert (between.mean, after.began_s, after.ended_s) == (None, 30.0, 50.0)
    assert before.mean == after.mean == pytest.approx(0.3)
    assert after.high == pytest.approx(0.5)
    assert [point.mean for point in waits_of(run, 0)] == [0.05, 0.05]
