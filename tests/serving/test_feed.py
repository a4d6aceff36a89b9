"""The feed: what is now, what was, and what has added up."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.records.machine import Totals
from oomph.records.run import Event
from oomph.serving.feed import HISTORY_S, Feed, added
from serving.fakes import FakeSampler, device, span, watched


def test_totals_are_the_same_however_time_is_cut_into_spans() -> None:
    whole = added(Totals(), span(lasted_s=10, busy_ratio=0.3, power_w=150.0))
    parts = Totals()
    for second in range(10):
        parts = added(parts, span(began_s=second, busy_ratio=0.3, power_w=150.0))
    assert parts.active_s == pytest.approx(whole.active_s)
    assert parts.energy_j == pytest.approx(whole.energy_j) == pytest.approx(1500)
    assert parts.watched_s == whole.watched_s
    assert (parts.num_spans, whole.num_spans) == (10, 1)


def test_what_was_not_known_in_a_span_adds_nothing_and_is_not_zero() -> None:
    unknown = span(busy_ratio=None, power_w=None, received_bytes=None)
    totals = added(Totals(), unknown)
    assert (totals.active_s, totals.energy_j, totals.received_bytes) == (None, None, None)
    assert (totals.watched_s, totals.busy_known_s) == (1.0, 0.0)
    then = added(added(totals, span(received_bytes=5)), unknown)
    assert (then.active_s, then.received_bytes, then.busy_known_s) == (0.5, 5, 1.0)


def test_time_with_clocks_held_down_is_counted_by_cause() -> None:
    totals = added(Totals(), span(throttled_ratio=1.0, throttled_by=("heat", "power")))
    totals = added(totals, span(throttled_ratio=0.5, throttled_by=("power",)))
    assert totals.throttled_s == {"heat": 1.0, "power": 1.5}


@given(
    st.lists(
        st.tuples(st.floats(0, 10), st.none() | st.floats(0, 1), st.none() | st.floats(0, 1000))
    )
)
def test_totals_never_shrink(
    seconds: list[tuple[float, float | None, float | None]],
) -> None:
    totals = Totals()
    for lasted_s, busy_ratio, power_w in seconds:
        after = added(totals, span(lasted_s=lasted_s, busy_ratio=busy_ratio, power_w=power_w))
        assert (after.active_s or 0) >= (totals.active_s or 0)
        assert (after.energy_j or 0) >= (totals.energy_j or 0)
        assert (after.active_s or 0) <= after.busy_known_s <= after.watched_s
        totals = after


def test_a_gpu_that_stops_answering_has_no_present_but_keeps_its_totals() -> None:
    sampler = FakeSampler((device(),), (watched(),))
    feed = Feed(sampler)
    sampler.spans.append(span())
    sampler.now_s = 1.2
    assert feed.look().gpus[0].span is not None
    sampler.now_s = 9.0
    seen = feed.look().gpus[0]
    assert seen.span is None
    assert seen.totals.num_spans == 1
    assert [past.busy_ratios for past in feed.history] == [(None,), (0.5,), (None,)]


def test_slices_of_a_gpu_are_gpus_of_their_own() -> None:
    slices = tuple(device(0, uuid=f"MIG-{n}", is_slice=True) for n in range(2))
    whole = replace(device(0, mig_enabled=True), slices=slices)
    names = tuple(watched(0, uuid=f"MIG-{n}") for n in range(2))
    sampler = FakeSampler((whole, device(1)), (*names, watched(1)))
    sampler.spans.append(span(gpu=1, used_bytes=7))
    seen = Feed(sampler).newest.gpus
    assert [one.device.uuid for one in seen] == ["MIG-0", "MIG-1", "GPU-1"]
    assert [one.span.used_bytes if one.span else None for one in seen] == [None, 7, None]


def test_the_past_is_bounded_and_numbers_go_on() -> None:
    feed = Feed(FakeSampler((device(),), (watched(),)))
    for _ in range(HISTORY_S + 10):
        feed.look()
    assert len(feed.history) == HISTORY_S
    assert feed.newest.number == HISTORY_S + 10


def test_what_cannot_be_watched_stays_told_and_is_told_once() -> None:
    sampler = FakeSampler((device(),), (watched(),))
    feed = Feed(sampler)
    for _ in range(3):
        sampler.events.append(Event(at_s=0.0, kind="warning", text="SM activity is left to DCGM"))
        feed.look()
    assert feed.look().notes == ("SM activity is left to DCGM",)


def test_a_machine_without_gpus_is_told_with_its_problem() -> None:
    newest = Feed(FakeSampler((), (), problem="the driver is not loaded")).newest
    assert newest.gpus == ()
    assert newest.problem == "the driver is not loaded"
