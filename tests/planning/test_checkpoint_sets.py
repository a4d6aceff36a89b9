"""The blocks that free most for each second of recomputation come first."""

from __future__ import annotations

from oomph.planning.ranking import blocks_that_free, in_order


def test_the_block_that_frees_most_for_its_time_is_first() -> None:
    assert in_order([(100, 2.0), (100, 1.0), (300, 1.0)]) == [2, 1, 0]


def test_among_equals_the_earlier_is_first_though_the_last_digits_differ() -> None:
    assert in_order([(1000, 1.0), (1001, 1.0), (1000, 1.0)]) == [0, 1, 2]


def test_a_block_that_takes_no_time_to_recompute_divides_by_nothing() -> None:
    assert in_order([(100, 1.0), (100, 0.0)]) == [1, 0]


def test_blocks_are_taken_until_it_is_enough() -> None:
    costs = [(100, 2.0), (100, 1.0), (300, 1.0)]
    assert blocks_that_free(0, costs) == []
    assert blocks_that_free(300, costs) == [2]
    assert blocks_that_free(301, costs) == [1, 2]
    assert blocks_that_free(10_000, costs) == [0, 1, 2]
