"""Where a rehearsal and a recording part is found, and what cuDNN borrows is no difference."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from oomph.records.trace import Allocation, Trace
from oomph.records.verification import Located, Recorded
from oomph.verifying.sequences import compare

CONVOLUTION = "aten.convolution.default"


def trace_of(sizes: Sequence[int], *, op: str = "aten.mm.default", build: int = 0) -> Trace:
    """A trace that requests these sizes, the first `build` of them before its first step."""
    return Trace(
        allocations=[
            Allocation(
                size_bytes=size,
                op=op,
                module=f"layers.{number}",
                phase="forward",
                category="activations",
            )
            for number, size in enumerate(sizes)
        ],
        events=list(range(1, len(sizes) + 1)),
        step_starts=[build],
        phase_starts=[],
        ops=[],
        micro_batch=1,
        torch_version="2",
        compute_capability=(8, 0),
    )


def recorded(sizes: Sequence[int], events: Sequence[int] = (), build: int = 0) -> Recorded:
    return Recorded(
        sizes=tuple(sizes),
        lines=tuple(f"train.py:{number}" for number in range(len(sizes))),
        events=tuple(events) or tuple(range(1, len(sizes) + 1)),
        marks=(build,),
    )


@given(st.lists(st.integers(1, 5), max_size=20))
def test_the_same_requests_match_whole(sizes: list[int]) -> None:
    found = compare(trace_of(sizes), recorded(sizes))
    assert found.first_difference is None
    assert found.matched_ratio == 1
    assert (*found.only_predicted, *found.only_recorded, *found.explained) == ()


@given(st.lists(st.integers(1, 5), max_size=20), st.lists(st.integers(1, 5), max_size=20))
def test_every_request_is_matched_or_listed(one: list[int], other: list[int]) -> None:
    found = compare(trace_of(one), recorded(other))
    alone = sum(each.num_blocks for each in found.only_predicted)
    beside = sum(each.num_blocks for each in (*found.only_recorded, *found.explained))
    assert found.num_matched + alone == len(one)
    assert found.num_matched + beside == len(other)
    assert (found.first_difference is None) == (one == other)
    assert 0 <= found.matched_ratio <= 1


def test_a_block_more_on_the_gpu_is_named_with_its_line_and_the_block_before() -> None:
    first = compare(trace_of([10, 20]), recorded([10, 7, 20])).first_difference
    assert first is not None
    assert first.predicted is None
    assert (first.recorded_bytes, first.recorded_at) == (7, "train.py:1")
    assert first.after == Located(
        op="aten.mm.default", module="layers.0", phase="forward", size_bytes=10
    )


def test_a_block_that_the_gpu_never_requests_is_named_with_its_module() -> None:
    first = compare(trace_of([10, 20, 30]), recorded([10, 30])).first_difference
    assert first is not None
    assert first.predicted is not None
    assert (first.predicted.module, first.predicted.size_bytes) == ("layers.1", 20)
    assert first.recorded_bytes is None


def test_a_block_of_another_size_is_one_difference() -> None:
    first = compare(trace_of([10, 20, 30]), recorded([10, 25, 30])).first_difference
    assert first is not None
    assert first.predicted is not None
    assert (first.predicted.size_bytes, first.recorded_bytes) == (20, 25)


def test_a_difference_says_in_which_step_it_is() -> None:
    in_build = compare(trace_of([10, 20], build=2), recorded([10, 25], build=2)).first_difference
    in_step = compare(trace_of([10, 20], build=1), recorded([10, 20, 5], build=1)).first_difference
    assert in_build is not None
    assert in_build.when == "while the model is built"
    assert in_step is not None
    assert in_step.when == "in step 1"


def test_what_a_convolution_borrows_for_one_call_is_explained() -> None:
    borrowed = recorded([10, 99, 98, 20], [1, 2, -2, 3, -3, 4])
    found = compare(trace_of([10, 20], op=CONVOLUTION), borrowed)
    assert found.first_difference is None
    assert found.matched_ratio == 1
    assert {each.size_bytes for each in found.explained} == {98, 99}


def test_what_is_kept_after_a_convolution_is_not() -> None:
    kept = recorded([10, 99, 20], [1, 2, 3, -2])
    found = compare(trace_of([10, 20], op=CONVOLUTION), kept)
    assert found.first_difference is not None
    assert [each.size_bytes for each in found.only_recorded] == [99]


def test_what_another_op_borrows_is_not_a_convolutions() -> None:
    found = compare(trace_of([10, 20]), recorded([10, 99, 20], [1, 2, -2, 3]))
    assert not found.explained
    assert found.matched_ratio < 1
