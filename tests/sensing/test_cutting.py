"""A turn of several seconds, cut into them."""

from __future__ import annotations

import pytest

from oomph.sensing.watched import Part, cut, share


def test_samples_are_of_the_second_that_they_end_in() -> None:
    percents = [(10.2, 1), (11.0, 2), (11.1, 3), (12.9, 4), (13.0, 5)]
    parts = cut(10.0, 13.0, [], percents)
    assert [part.percents for part in parts] == [[1, 2], [3], [4, 5]]


def test_a_look_stands_for_the_second_before_it_though_it_is_early_or_late() -> None:
    looks = [(1.3, 1), (1.8, 2), (3.02, 3), (4.1, 4)]
    assert [part.used_bytes for part in cut(0.0, 4.0, looks, [])] == [[1], [2], [3], [4]]


def test_seconds_in_which_nobody_looked_know_of_no_memory() -> None:
    parts = cut(0.0, 10.0, [(0.1, 7), (10.0, 9)], [])
    assert [part.used_bytes for part in parts] == [[7], *[[]] * 8, [9]]


def test_the_parts_of_a_turn_are_equal_and_leave_nothing_out() -> None:
    parts = cut(2.5, 7.3, [], [])
    assert len(parts) == 5
    assert (parts[0].began_s, parts[-1].ended_s) == (2.5, 7.3)
    assert all(part.ended_s - part.began_s == pytest.approx(0.96) for part in parts)


@pytest.mark.parametrize("ended_s", [4.0, 4.0 + 1e-9, 4.2, 5.4])
def test_what_is_not_longer_than_a_second_is_one_part(ended_s: float) -> None:
    assert cut(4.0, ended_s, [(4.1, 7)], [(9.0, 50)]) == [Part(4.0, ended_s, [7], [50])]


def test_a_halt_of_a_day_is_not_cut_into_its_seconds() -> None:
    assert len(cut(0.0, 86400.0, [], [])) == 60


@pytest.mark.parametrize("whole", [0, 1, 7, 10**12 + 1])
def test_shares_of_a_count_are_the_whole_together(whole: int) -> None:
    shares = [share(whole, place, 3) for place in range(3)]
    assert sum(part or 0 for part in shares) == whole
    assert share(None, 0, 3) is None
