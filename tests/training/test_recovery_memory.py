"""What was measured tells how many fit, also of examples that nobody has run yet."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.records.plan import MicroBatchLimits
from oomph.training.sizes import CudaMemory, Measurements, PlannedSizes, Reading, Sizes

WEIGHTS, GRADIENTS = 1000, 1000


class Gpu(CudaMemory):
    """Memory that a model takes by a rule, and torch's way of counting it."""

    segment_bytes = 0

    def __init__(self, room: int, each: Any) -> None:
        self.room, self.each = room, each  # each: bytes of an example, by its elements
        self.peak = WEIGHTS
        self.has_gradients = False
        self.num_read = 0

    def read(self) -> Reading:
        self.num_read += 1
        return Reading(WEIGHTS + self.has_gradients * GRADIENTS, self.peak, self.room)

    def gradient_bytes_to_come(self) -> int:
        return 0 if self.has_gradients else GRADIENTS

    def reset_peak(self) -> None:
        self.peak = 0

    def run(self, measured: Measurements, num: int, elements: int, size: int) -> None:
        """A batch that goes well."""
        self.has_gradients = False
        measured.begin(elements, size)
        largest = min(num, size) * self.each(elements)
        before = WEIGHTS + (GRADIENTS if num > size else 0)
        self.peak = max(self.peak, int(before + largest))
        self.has_gradients = True
        measured.end(elements, size, num)
        self.has_gradients = False


def linear(elements: int) -> float:
    return 10 * elements


def test_more_of_the_same_examples_take_in_proportion() -> None:
    gpu = Gpu(100_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    assert measured.fits(10) is None
    gpu.run(measured, 64, 10, 8)
    # 96 % of the room, without weights and gradients, at 100 bytes each.
    assert measured.fits(10) == (96_000 - WEIGHTS - GRADIENTS) // 100


def test_gradients_that_are_there_are_not_counted_again() -> None:
    gpu = Gpu(100_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    gpu.run(measured, 64, 10, 8)
    between_steps = measured.fits(10)
    gpu.has_gradients = True  # in the middle of an accumulation
    assert measured.fits(10) == between_steps


def test_what_fitted_fits_though_the_margin_says_otherwise() -> None:
    gpu = Gpu(10_100, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    gpu.run(measured, 160, 10, 80)
    measured.fitted(10, 80)
    assert measured.fits(10) == 80


@given(b=st.floats(0.5, 50), c=st.floats(0, 1), lengths=st.lists(st.integers(8, 512), min_size=1))
def test_a_length_that_was_not_measured_takes_no_more_than_is_told(
    b: float, c: float, lengths: list[int]
) -> None:
    def each(elements: int) -> float:
        return b * elements + c * elements**2

    gpu = Gpu(10**12, each)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    for length in lengths:
        gpu.run(measured, 64, length, 8)
    for length in (4, 100, 256, 600, 1024):
        assert measured.each_bytes(length) >= each(length) * 0.99 - 1


def test_two_lengths_tell_the_third_of_what_grows_with_the_square() -> None:
    gpu = Gpu(10**9, lambda e: 7 * e + 0.5 * e * e)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    gpu.run(measured, 64, 100, 8)
    assert measured.each_bytes(400) == pytest.approx(16 * gpu.each(100), rel=1e-3)
    gpu.run(measured, 64, 200, 8)
    assert measured.each_bytes(400) == pytest.approx(gpu.each(400), rel=1e-3)


def test_a_smaller_piece_after_larger_ones_is_measured_by_itself() -> None:
    gpu = Gpu(100_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    gpu.run(measured, 64, 10, 32)
    gpu.run(measured, 64, 20, 2)
    assert measured.each_bytes(20) == pytest.approx(linear(20), rel=0.01)


def test_what_has_been_measured_is_not_read_again() -> None:
    gpu = Gpu(100_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    gpu.run(measured, 64, 10, 8)
    num_read = gpu.num_read
    gpu.run(measured, 64, 10, 8)
    assert gpu.num_read == num_read
    gpu.run(measured, 64, 10, 16)
    assert gpu.num_read == num_read + 2


# ---- sizes by what was measured ----------------------------------------------------------------


def sizes_of(gpu: Gpu, *, may_grow: bool = True) -> tuple[Sizes, Measurements]:
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    return Sizes(8, measured=measured, may_grow=lambda: may_grow), measured


def test_sizes_grow_to_what_fits_by_the_first_step_and_not_in_it() -> None:
    gpu = Gpu(5_000, linear)
    sizes, measured = sizes_of(gpu)
    assert sizes.size_for(48, 10) == 8
    gpu.run(measured, 48, 10, 8)
    assert sizes.size_for(48, 10) == 8  # the optimizer's state is still to come
    sizes.fitted(48, 10, 8)
    assert sizes.size_for(48, 10) == 24
    assert sizes.size_for(36, 10) == 18


def test_sizes_stay_where_nothing_more_is_asked_for() -> None:
    gpu = Gpu(5_000, linear)
    sizes, measured = sizes_of(gpu, may_grow=False)
    gpu.run(measured, 48, 10, 8)
    sizes.fitted(48, 10, 8)
    assert sizes.size_for(48, 10) == 8
    assert sizes.size_for(48, 20) == 6


def test_longer_examples_are_cut_finer_before_they_fail() -> None:
    gpu = Gpu(5_000, linear)
    sizes, measured = sizes_of(gpu)
    gpu.run(measured, 48, 10, 8)
    sizes.fitted(48, 10, 8)
    assert sizes.size_for(48, 20) == 6  # as if it went with the square
    gpu.run(measured, 48, 20, 6)
    sizes.fitted(48, 20, 6)
    assert sizes.size_for(48, 20) == 12


def test_after_a_size_that_was_told_to_fit_fails_the_last_one_is_taken_for_good() -> None:
    gpu = Gpu(5_000, linear)
    sizes, measured = sizes_of(gpu)
    gpu.run(measured, 48, 10, 8)
    sizes.fitted(48, 10, 8)
    sizes.fitted(48, 10, 8)
    assert sizes.size_for(48, 10) == 24
    assert sizes.failed(48, 10, 24) == 8
    assert sizes.size_for(48, 5) == 24  # and not 48, which would need as much
    for _ in range(50):
        assert sizes.size_for(48, 10) == 8
        sizes.fitted(48, 10, 8)


def test_after_a_failure_measurements_may_come_near_what_failed() -> None:
    gpu = Gpu(5_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    sizes = Sizes(measured=measured, may_grow=lambda: True)
    assert sizes.failed(120, 10, 40) == 20
    gpu.run(measured, 120, 10, 20)
    sizes.fitted(120, 10, 20)
    assert sizes.size_for(120, 10) == 24


def test_whether_sizes_may_grow_is_asked_when_the_model_has_been_trained() -> None:
    """A library has set it to training by then: BatchNorm, for one, forbids it only in training."""
    gpu = Gpu(5_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    is_training: list[bool] = []
    sizes = Sizes(8, measured=measured, may_grow=lambda: not is_training)
    gpu.run(measured, 48, 10, 8)
    is_training.append(True)
    sizes.fitted(48, 10, 8)
    assert sizes.size_for(48, 10) == 8


def test_what_was_measured_of_other_lengths_is_not_asked_where_the_plan_knows() -> None:
    """Lengths that only longer ones are known of would be taken to go with the square."""
    gpu = Gpu(5_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    known = PlannedSizes(MicroBatchLimits(fit=12.5, too_many=15.0, elements=20), 20)
    sizes = Sizes(8, measured=measured, may_grow=lambda: True, planned=known)
    gpu.run(measured, 48, 5, 48)
    sizes.fitted(48, 5, 48)
    assert sizes.size_for(48, 20) == 12
    assert sizes.failed(48, 20, 12) == 6  # and not the 3 that the square of 5 would leave


def test_measurements_keep_a_segment_free_for_what_fits_into_no_hole() -> None:
    gpu = Gpu(5_000, linear)
    measured = Measurements(gpu, gpu.gradient_bytes_to_come)
    gpu.run(measured, 48, 10, 8)
    without = measured.fits(10)
    gpu.segment_bytes = 1_000
    assert without == 28
    assert measured.fits(10) == 20
