"""Two traces give every micro-batch, or say that they do not."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.scaling import NotAffine, affine, with_ordered_frees
from oomph.records.trace import Allocation, Convolution, Op, Trace


def trace_of(sizes: list[int], events: list[int], micro_batch: int, flops: int = 0) -> Trace:
    allocations = [
        Allocation(size_bytes=size, op="mm", module="", phase="forward", category="activations")
        for size in sizes
    ]
    op = Op(name="mm", phase="forward", flops=flops, moved_bytes=flops, dtype="float32")
    return Trace(
        allocations=allocations,
        events=events,
        step_starts=[0],
        phase_starts=[(0, "forward")],
        ops=[op],
        micro_batch=micro_batch,
        torch_version="2.13.0",
        compute_capability=(8, 0),
    )


lines = st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**6)), min_size=1, max_size=20)


@given(lines=lines, micro_batch=st.integers(2, 4096))
def test_sizes_on_a_line_are_found_for_every_micro_batch(
    lines: list[tuple[int, int]], micro_batch: int
) -> None:
    events = [*range(1, len(lines) + 1), *range(-len(lines), 0)]

    def at(size: int) -> Trace:
        return trace_of([c + k * size for c, k in lines], events, size, flops=7 * size)

    found = affine(at(2), at(3)).at(micro_batch)
    assert found.allocations == at(micro_batch).allocations
    assert found.ops == at(micro_batch).ops
    assert found.micro_batch == micro_batch


def test_the_order_within_a_run_of_frees_is_chance() -> None:
    assert with_ordered_frees([1, 2, -2, -1, 3, -3]) == with_ordered_frees([1, 2, -1, -2, 3, -3])
    assert with_ordered_frees([1, 2, -1, 3, -2]) != with_ordered_frees([1, 2, -2, 3, -1])


def test_another_order_of_requests_is_refused() -> None:
    with pytest.raises(NotAffine, match="order of allocations"):
        affine(trace_of([4, 6], [1, -1, 2], 2), trace_of([4, 6], [1, 2, -1], 3))


def test_a_size_that_shrinks_is_refused() -> None:
    with pytest.raises(NotAffine, match="takes 8 and 6 bytes"):
        affine(trace_of([8], [1], 2), trace_of([6], [1], 3))


def test_below_the_smaller_trace_there_is_no_line() -> None:
    line = affine(trace_of([2], [1], 2), trace_of([3], [1], 3))
    with pytest.raises(NotAffine, match="1 is below"):
        line.at(1)


def convolved(micro_batch: int, at_event: int = 1) -> Trace:
    trace = trace_of([100 * micro_batch], [1, -1], micro_batch)
    run = Convolution(
        at_event=at_event,
        direction="forward",
        dtype="float32",
        input_shape=(1, 4 * micro_batch, 9, 9),
        weight_shape=(8 * micro_batch, 4, 3, 3),  # a filter for each example
        output_shape=(1, 8 * micro_batch, 7, 7),
        stride=(1, 1),
        dilation=(1, 1),
        groups=micro_batch,
    )
    return replace(trace, convolutions=(run,))


def test_the_shapes_of_convolutions_are_on_a_line_too() -> None:
    assert affine(convolved(2), convolved(3)).at(64).convolutions == convolved(64).convolutions


def test_convolutions_in_another_order_are_on_no_line() -> None:
    with pytest.raises(NotAffine, match="convolutions"):
        affine(convolved(2), convolved(3, at_event=2))
