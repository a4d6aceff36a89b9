"""Waits and work -> steps, by times that the test chooses."""

from __future__ import annotations

from oomph.monitoring.step_log import StepClock, Tally


def test_a_step_lasts_from_its_wait_to_its_end() -> None:
    clock = StepClock()
    clock.waited(10.0, 10.25, 8)
    assert clock.end(11.0) == (11.0, 1.0, 0.25, 8)


def test_the_waits_and_samples_of_a_step_of_several_batches_add_up() -> None:
    clock = StepClock()
    clock.waited(0.0, 0.125, 4)
    clock.waited(0.5, 0.75)
    clock.count(3)
    clock.count(None)
    assert clock.end(1.0) == (1.0, 1.0, 0.375, 7)


def test_samples_that_are_told_at_the_end_count_instead_of_those_before() -> None:
    clock = StepClock()
    clock.waited(0.0, 0.125, 4)
    assert clock.end(1.0, 9) == (1.0, 1.0, 0.125, 9)


def test_what_lies_between_pause_and_resume_is_of_no_step() -> None:
    clock = StepClock()
    clock.resume(0.0)
    clock.pause(1.0)
    assert not clock.is_open
    clock.resume(5.0)
    assert clock.end(6.0) == (6.0, 2.0, None, None)


def test_a_step_may_end_while_it_is_paused() -> None:
    clock = StepClock()
    clock.resume(0.0)
    clock.pause(1.0)
    assert clock.end(6.0) == (6.0, 1.0, None, None)


def test_the_next_step_begins_anew_and_not_where_the_last_one_ended() -> None:
    clock = StepClock()
    clock.waited(0.0, 0.5, 2)
    clock.end(1.0)
    clock.waited(3.0, 3.5)
    assert clock.end(4.0) == (4.0, 1.0, 0.5, None)


def test_an_end_without_a_begin_is_no_step() -> None:
    clock = StepClock()
    assert clock.end(5.0) is None
    clock.waited(6.0, 7.0)
    clock.reset()
    assert clock.end(8.0) is None


def test_a_tally_with_one_unmeasured_wait_tells_no_share_of_waiting() -> None:
    tally = Tally()
    tally.add([(1.0, 1.0, 0.5, 8)])
    assert (tally.data_wait_ratio, tally.samples_per_s) == (0.5, 8.0)
    before = tally.copy()
    tally.add([(2.0, 1.0, None, None)])
    assert (tally.num_steps, tally.step_s) == (2, 1.0)
    assert tally.data_wait_ratio is None
    assert tally.samples_per_s is None
    middle = tally.copy()
    tally.add([(4.0, 2.0, 0.5, 4)])
    assert tally.since(before).data_wait_ratio is None
    assert tally.since(middle).data_wait_ratio == 0.25
    assert tally.since(middle).samples_per_s == 2.0


def test_a_tally_of_nothing_tells_nothing() -> None:
    tally = Tally()
    assert (tally.step_s, tally.data_wait_ratio, tally.samples_per_s) == (None, None, None)
