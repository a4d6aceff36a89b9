"""Two programs' requests are matched in order, and what is left over is named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting import alignment
from oomph.predicting.alignment import align, blocks_of, matched_pairs
from oomph.records.alignment import Alignment, Block, Difference, Unmatched

few = st.lists(st.integers(0, 4), max_size=30)


def blocks(*sizes: int, label: str = "op") -> list[Block]:
    return [Block(size_bytes=size, label=label) for size in sizes]


def lcs_length(one: list[int], other: list[int]) -> int:
    """The textbook table."""
    row = [0] * (len(one) + 1)
    for value in other:
        previous = row
        row = [0]
        for at, mine in enumerate(one):
            row.append(previous[at] + 1 if mine == value else max(row[-1], previous[at + 1]))
    return row[-1]


def assert_longest(one: list[int], other: list[int]) -> None:
    pairs = matched_pairs(one, other)
    assert all(one[mine] == other[others] for mine, others in pairs)
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(pairs))
    assert len(pairs) == lcs_length(one, other)


@given(few, few)
def test_the_matches_are_a_longest_common_subsequence(one: list[int], other: list[int]) -> None:
    assert_longest(one, other)


@given(few, few)
def test_halving_finds_one_as_long(one: list[int], other: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "_MOST_BITS", 8)
        assert_longest(one, other)


@given(few)
def test_a_program_matches_itself(sizes: list[int]) -> None:
    assert align(blocks(*sizes), blocks(*sizes)) == Alignment(
        num_predicted=len(sizes),
        num_recorded=len(sizes),
        num_matched=len(sizes),
        num_freed_elsewhere=0,
        only_predicted=(),
        only_recorded=(),
        first_difference=None,
    )


@given(few, few)
def test_every_block_is_matched_or_named(one: list[int], other: list[int]) -> None:
    found = align(blocks(*one), blocks(*other))
    assert found.num_matched + sum(each.num_blocks for each in found.only_predicted) == len(one)
    assert found.num_matched + sum(each.num_blocks for each in found.only_recorded) == len(other)
    difference = found.first_difference
    assert (difference is None) == (one == other)
    if difference is not None:
        assert one[: difference.at] == other[: difference.at]


def test_what_one_side_lacks_is_named_by_op_and_size() -> None:
    recorded = [
        *blocks(512, 1024),
        *blocks(8_519_680, label="cublas workspace"),
        *blocks(2048),
        *blocks(4096, 4096, label="sum"),
    ]
    found = align(blocks(512, 1024, 2048), recorded)
    assert found.only_predicted == ()
    assert found.only_recorded == (
        Unmatched(label="cublas workspace", size_bytes=8_519_680, num_blocks=1),
        Unmatched(label="sum", size_bytes=4096, num_blocks=2),
    )
    assert found.matched_ratio == 0.5
    assert found.first_difference == Difference(
        at=2, predicted=blocks(2048)[0], recorded=recorded[2]
    )


def test_a_side_that_ended_is_none_in_the_difference() -> None:
    found = align(blocks(1), blocks(1, 2))
    assert found.first_difference == Difference(at=1, predicted=None, recorded=blocks(2)[0])


def test_nothing_recorded_is_matched_wholly() -> None:
    assert align([], []).matched_ratio == 1.0


def test_frees_and_empty_caches_become_the_moment_of_the_free() -> None:
    events = [1, 2, 0, -1, 3, -3, -4]  # 4 was requested earlier, 2 outlives the window
    assert blocks_of([10, 20, 30, 40], events, list("abcd")) == [
        Block(size_bytes=10, label="a", freed_at=2),
        Block(size_bytes=20, label="b"),
        Block(size_bytes=30, label="c", freed_at=3),
    ]


def test_empty_tensors_request_nothing() -> None:
    assert blocks_of([0, 8], [1, 2, -1, -2], ["empty", "op"]) == [
        Block(size_bytes=8, label="op", freed_at=1)
    ]


def test_a_block_that_lives_longer_on_one_side_counts_as_freed_elsewhere() -> None:
    program = [[1, 2, -1, 3], [1, 2, 3, -1]]
    early, late = (blocks_of([10, 20, 30], events, ["op"] * 3) for events in program)
    assert align(early, late).num_freed_elsewhere == 1


def test_a_block_that_one_side_lacks_moves_no_free() -> None:
    one = blocks_of([10, 20, 30], [1, 2, -1, 3], ["op"] * 3)
    other = blocks_of([10, 20, 99, 30], [1, 2, 3, -3, -1, 4], ["op"] * 4)
    found = align(one, other)
    assert found.num_matched == 3
    assert found.num_freed_elsewhere == 0


def test_long_and_very_different_programs_are_aligned_too() -> None:
    one = [at * at % 251 % 50 for at in range(20_000)]
    other = [at * at % 257 % 50 for at in range(20_000)]
    pairs = matched_pairs(one, other)
    assert len(pairs) > 4_000
    assert all(one[mine] == other[others] for mine, others in pairs)
