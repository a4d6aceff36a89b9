"""What the blocks of a reduction exchange through memory, by torch's rule (Reduce.cuh)."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.footprint import footprint_of, from_bytes, to_bytes
from oomph.predicting.reductions import NONE, Multiprocessors, sized_on, staged_bytes
from oomph.predicting.scaling import AffineTrace, affine
from oomph.records.trace import Allocation, Reduction, Trace, from_columns, to_columns

A100, RTX_PRO_6000 = Multiprocessors(108, 2048), Multiprocessors(188, 1536)


def reduction(outputs: int, inputs: int, *, along_inputs: bool = False, **more: int) -> Reduction:
    values: dict[str, int] = {
        "element_bytes": 4,
        "value_bytes": 4,
        "num_contiguous": inputs if along_inputs else outputs,
    }
    return Reduction(
        part="staging",
        num_outputs=outputs,
        num_inputs=inputs,
        is_along_inputs=along_inputs,
        **{**values, **more},
    )


def both(one: Reduction, on: Multiprocessors) -> tuple[int, int]:
    return staged_bytes(one, on), staged_bytes(replace(one, part="semaphores"), on)


def test_a_sum_over_rows_stages_what_a_recording_of_one_shows() -> None:
    # 2048 rows of 2560 floats. A thread has 4 outputs, so a block is 32 x 4 threads and there are
    # 20 of them side by side. Each output has 512 values per thread, and 512 / 16 = 32 blocks.
    assert both(reduction(2560, 2048), RTX_PRO_6000) == (2560 * 4 * 32 * 32 * 4, 4 * 20)
    # A quarter of the rows leaves 128 values per thread, which is too few to share an output.
    assert both(reduction(2560, 512), RTX_PRO_6000) == (0, 0)


def test_a_small_card_has_fewer_blocks_to_share_an_output() -> None:
    # 2 x 12 blocks of 128 threads for 20 side by side: two for each output.
    assert both(reduction(2560, 2048), Multiprocessors(2, 1536)) == (2560 * 4 * 2 * 32 * 4, 80)
    assert both(reduction(2560, 2048), Multiprocessors(1, 1536)) == (0, 0)  # 12 for 20


def test_a_sum_of_everything_stages_one_value_per_block() -> None:
    # A block is 512 x 1 threads, four of them on an SM: 432 for the one output.
    assert both(reduction(1, 10**7, along_inputs=True), A100) == (4 * 432, 4)
    # A thread has at most 256 values, so that one SM takes 77 blocks in turn.
    assert both(reduction(1, 10**7, along_inputs=True), Multiprocessors(1, 2048)) == (4 * 77, 4)


def test_rows_that_are_not_side_by_side_are_read_one_by_one() -> None:
    # Odd rows: no vectors. A block is 32 x 16 threads, 80 side by side, 256 values per thread.
    assert both(reduction(2559, 4096, num_contiguous=0), A100) == (
        2559 * 4 * min(-(-432 // 80), 16) * 32,
        4 * 80,
    )


def test_more_bytes_are_staged_for_a_value_with_its_index() -> None:
    plain = reduction(256, 1_000_000, along_inputs=True)
    with_index = replace(plain, value_bytes=16)
    assert staged_bytes(with_index, A100) == 4 * staged_bytes(plain, A100) > 0


def test_a_tensor_beyond_32_bits_is_reduced_in_halves() -> None:
    half = reduction(2**14, 2**14, along_inputs=True)
    assert half.num_outputs * half.num_inputs * 4 < 2**31
    assert staged_bytes(replace(half, num_outputs=2**15), A100) == staged_bytes(half, A100)


@given(
    st.integers(1, 10**5),
    st.integers(1, 10**5),
    st.booleans(),
    st.integers(1, 200),
    st.sampled_from([1024, 1536, 2048]),
)
def test_no_card_stages_less_than_another_with_fewer_multiprocessors(
    outputs: int, inputs: int, along_inputs: bool, num: int, threads: int
) -> None:
    one = reduction(outputs, inputs, along_inputs=along_inputs)
    few, many = (staged_bytes(one, Multiprocessors(n, threads)) for n in (num, num + 1))
    assert 0 <= few <= many
    assert staged_bytes(one, NONE) == 0
    semaphores = replace(one, part="semaphores")
    assert bool(few) == bool(staged_bytes(semaphores, Multiprocessors(num, threads)))


# ---- in traces -----------------------------------------------------------------------------------


def trace_of(micro_batch: int) -> Trace:
    """A gradient, and the sum over the rows of a micro-batch that makes another."""

    def allocation(size_bytes: int, one: Reduction | None = None) -> Allocation:
        return Allocation(
            size_bytes=size_bytes,
            op="sum",
            module="",
            phase="backward",
            category="temporaries",
            reduction=one,
        )

    shape = reduction(2560, 512 * micro_batch)
    allocations = [
        allocation(512 * micro_batch * 2560 * 4),
        allocation(2560 * 4),
        allocation(0, shape),
        allocation(0, replace(shape, part="semaphores")),
    ]
    return Trace(
        allocations=allocations,
        events=[1, 2, 3, 4, -1, -2, -3, -4],
        step_starts=[0, 0],
        phase_starts=[(0, "backward")],
        ops=[],
        micro_batch=micro_batch,
        torch_version="2.13.0",
        compute_capability=(8, 0),
    )


def line() -> AffineTrace:
    return affine(trace_of(2), trace_of(3))


@pytest.mark.parametrize("micro_batch", [2, 3, 4, 8, 64])
def test_two_micro_batches_tell_what_any_other_stages(micro_batch: int) -> None:
    assert line().at(micro_batch) == trace_of(micro_batch)


@pytest.mark.parametrize("micro_batch", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("on", [NONE, A100, RTX_PRO_6000])
def test_a_footprint_requests_what_the_trace_does(micro_batch: int, on: Multiprocessors) -> None:
    footprints, _ = from_bytes(to_bytes({"all": footprint_of(line())}, {}))
    requests = footprints["all"].requests(micro_batch, on)
    sized = sized_on(trace_of(micro_batch), on)
    sizes = [allocation.size_bytes for allocation in sized.allocations]
    assert requests.sizes == sizes
    assert requests.events == [event for event in sized.events if sizes[abs(event) - 1]]


def test_a_trace_is_stored_with_its_reductions() -> None:
    assert from_columns(to_columns(trace_of(4))) == trace_of(4)
