"""The set of blocks to recompute: enough, not more, and the best for each second first."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oomph.planning.ranking import Checked, best_partial, blocks_that_free, in_order
from oomph.records.workload import Variant

COSTS = st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0, 10)), min_size=1, max_size=24)
EQUAL = [(100, 1.0)] * 10


@given(COSTS, st.floats(0, 1))
def test_blocks_are_taken_until_enough_is_freed(
    costs: list[tuple[int, float]], share: float
) -> None:
    wanted = share * sum(saved for saved, _ in costs)
    chosen = blocks_that_free(wanted, costs)
    assert chosen == sorted(set(chosen))
    freed = sum(costs[place][0] for place in chosen)
    assert freed >= wanted or len(chosen) == len(costs)
    if chosen:
        last = max(chosen, key=in_order(costs).index)
        assert freed - costs[last][0] < wanted


def test_the_most_bytes_a_second_come_first_and_equals_from_the_front() -> None:
    assert in_order([(1, 1.0), (9, 1.0), (4, 2.0), (1, 1.0001)]) == [1, 2, 0, 3]
    assert in_order(EQUAL) == list(range(10))
    assert blocks_that_free(0, EQUAL) == []
    assert blocks_that_free(301, EQUAL) == [0, 1, 2, 3]


# ---- the fastest set that fits -------------------------------------------------------------------

# 1000 bytes at once with nothing recomputed, 200 with everything; 10 s and 14 s.
WHOLE = Variant(micro_batch=8)


class Measured:
    def knows(self, _: Variant) -> bool:
        return True

    def seconds(self, variant: Variant) -> float:
        return 10.0 if variant.checkpointing == "none" else 14.0

    def has_host_for(self, _: Variant) -> bool:
        return True

    def paced_seconds(self, variant: Variant) -> tuple[float]:
        return (self.seconds(variant),)

    def reserved_bytes(self, variant: Variant) -> int:
        return (1000 if variant.checkpointing == "none" else 200) * variant.micro_batch // 8

    least_bytes = host_bytes = reserved_bytes

    def check(self, variant: Variant) -> Checked:
        return Checked(device_bytes=self.reserved_bytes(variant), fits="yes")


def test_a_part_is_recomputed_where_none_is_too_much_and_all_too_slow() -> None:
    # 300 of 800 bytes must go, 38% and 3% for safety: five of ten blocks, for 12 s.
    found = best_partial([WHOLE], EQUAL, Measured(), 700, faster_than_s=13.0)
    assert found == replace(WHOLE, checkpointing="blocks:0-4")


def test_no_set_is_offered_where_it_is_no_faster_or_not_needed_or_not_enough() -> None:
    assert best_partial([WHOLE], EQUAL, Measured(), 700, faster_than_s=12.0) is None
    assert best_partial([WHOLE], EQUAL, Measured(), 1000, faster_than_s=20.0) is None
    assert best_partial([WHOLE], EQUAL, Measured(), 199, faster_than_s=20.0) is None
    assert best_partial([WHOLE], EQUAL, Measured(), 200, faster_than_s=20.0) is None  # it is all


def test_of_several_the_one_that_recomputes_least_is_chosen() -> None:
    half = Variant(micro_batch=4, accumulation=2)  # 500 bytes: nothing need be recomputed
    larger = Variant(micro_batch=16)
    smaller = Variant(micro_batch=6, accumulation=2)
    found = best_partial([larger, smaller, half, WHOLE], EQUAL, Measured(), 650, faster_than_s=13.9)
    assert found is not None
    assert found.micro_batch == 6
