"""What to recompute: the text, the blocks, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.records.workload import as_text, check_checkpointing, recomputed_blocks


@pytest.mark.parametrize(
    ("text", "blocks"),
    [
        ("none", []),
        ("blocks", [0, 1, 2, 3]),
        ("selective", [0, 1, 2, 3]),
        ("every-2", [0, 2]),
        ("every-9", [0]),
        ("blocks:3,1,1", [1, 3]),
        ("blocks:0-1,3", [0, 1, 3]),
    ],
)
def test_each_way_names_its_blocks(text: str, blocks: list[int]) -> None:
    assert recomputed_blocks(text, 4) == blocks


@pytest.mark.parametrize(
    "text",
    [
        "",
        "some",
        "every-0",
        "every-",
        "every-x",
        "blocks:",
        "blocks:1,",
        "blocks:-1",
        "blocks:3-1",
        "²",
    ],
)
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="unknown checkpointing"):
        check_checkpointing(text)


def test_a_block_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="no block 4"):
        recomputed_blocks("blocks:4", 4)


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1)))))
def test_a_set_of_blocks_survives_being_written(case: tuple[int, set[int]]) -> None:
    num_blocks, blocks = case
    assert recomputed_blocks(as_text(sorted(blocks), num_blocks), num_blocks) == sorted(blocks)
