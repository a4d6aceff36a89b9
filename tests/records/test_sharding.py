"""Which GPUs hold what."""

from __future__ import annotations

import pytest

from oomph.errors import UsageError
from oomph.records.workload import Variant, check_sharding, grid_of, num_groups


def test_several_gpus_are_ddp_unless_something_else_is_said() -> None:
    assert check_sharding(None, 1) == "none"
    assert check_sharding(None, 2) == "ddp"
    assert check_sharding("fsdp", 2) == "fsdp"


@pytest.mark.parametrize(
    ("sharding", "num_gpus"),
    [("fsdp", 1), ("none", 2), ("zero", 2), (None, 0), (None, -1), ("hybrid", 2), ("hybrid", 11)],
)
def test_what_makes_no_sense_is_refused(sharding: str | None, num_gpus: int) -> None:
    with pytest.raises(UsageError):
        check_sharding(sharding, num_gpus)


def test_groups_of_hybrid_stay_within_a_smaller_machine() -> None:
    for gpus_per_node, grid in ((4, (4, 4)), (2, (8, 2)), (16, (2, 8)), (64, (2, 8))):
        variant = Variant(
            micro_batch=1, sharding="hybrid", num_gpus=16, gpus_per_node=gpus_per_node
        )
        assert grid_of(variant) == grid
    with pytest.raises(UsageError, match="cannot be put into equal groups"):
        check_sharding("hybrid", 4, gpus_per_node=1)


@pytest.mark.parametrize(
    ("num_gpus", "grid"), [(4, (2, 2)), (6, (2, 3)), (8, (2, 4)), (16, (2, 8)), (64, (8, 8))]
)
def test_hybrid_divides_within_a_machine_and_copies_beyond(
    num_gpus: int, grid: tuple[int, int]
) -> None:
    assert grid_of(Variant(micro_batch=1, sharding="hybrid", num_gpus=num_gpus)) == grid


def test_ddp_copies_and_fsdp_divides() -> None:
    assert grid_of(Variant(micro_batch=1, sharding="ddp", num_gpus=8)) == (8, 1)
    assert grid_of(Variant(micro_batch=1, sharding="fsdp", num_gpus=8)) == (1, 8)
    assert [
        num_groups(Variant(micro_batch=1, sharding=how, num_gpus=8))
        for how in ("ddp", "fsdp", "hybrid")
    ] == [
        1,
        1,
        2,
    ]
