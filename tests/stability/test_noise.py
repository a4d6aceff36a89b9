"""The noise scale from squared norms of pieces and of the whole."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.records.stability import NoiseScale
from oomph.stability.noise import NoiseEstimate, Sample

sizes = st.lists(st.integers(1, 64), min_size=2, max_size=6)
positive = st.floats(1e-3, 1e3)


def sample_of(nums: list[int], noise: float, signal: float) -> Sample:
    """What pieces of these sizes give on average."""
    num = sum(nums)
    return Sample(
        pieces_square=sum(n / num * (signal + noise / n) for n in nums),
        whole_square=signal + noise / num,
        pieces_share=len(nums) / num,
        whole_share=1 / num,
        num=num,
    )


@given(sizes, positive, positive)
def test_pieces_of_any_sizes_give_back_noise_and_signal(
    nums: list[int], noise: float, signal: float
) -> None:
    found = sample_of(nums, noise, signal).noise_and_signal
    assert found is not None
    assert found == pytest.approx((noise, signal), rel=1e-6, abs=1e-9 * (noise + signal))


def test_one_piece_or_values_that_are_not_finite_tell_nothing() -> None:
    assert sample_of([8], 1.0, 1.0).noise_and_signal is None
    assert Sample(float("inf"), 1.0, 0.5, 0.25, 4).noise_and_signal is None


def estimate_of(scales: list[float], spread: float = 0.3) -> NoiseEstimate:
    """An estimate from steps whose noise scale is each of these, measured with noise."""
    generator, estimate = random.Random(0), NoiseEstimate()  # noqa: S311
    for scale in scales:
        noise = scale * generator.uniform(1 - spread, 1 + spread)
        estimate.add(sample_of([8, 8], noise, generator.uniform(1 - spread, 1 + spread)))
    return estimate


def test_it_is_unknown_before_there_are_enough_steps() -> None:
    assert estimate_of([100.0] * 4).scale is None
    assert estimate_of([100.0] * 40).scale is not None


def test_the_band_holds_the_truth_and_is_a_factor_of_two_to_three() -> None:
    scale = estimate_of([100.0] * 40).scale
    assert scale is not None
    assert scale.low < 100 < scale.high
    assert 2 <= scale.high / scale.examples <= 3


def test_it_is_unknown_where_single_steps_differ_too_much() -> None:
    generator, estimate = random.Random(0), NoiseEstimate()  # noqa: S311
    for _ in range(20):
        estimate.add(sample_of([8, 8], generator.gauss(1, 5), generator.gauss(0.01, 1)))
    assert estimate.scale is None


@pytest.mark.parametrize(
    ("scales", "trend"),
    [
        ([100.0] * 100, "steady"),
        ([20.0 * 1.02**n for n in range(100)], "rising"),
        ([200.0 / 1.02**n for n in range(100)], "falling"),
        ([100.0] * 12, None),
    ],
)
def test_the_trend_is_told_once_there_is_one(scales: list[float], trend: str | None) -> None:
    scale = estimate_of(scales).scale
    assert scale is not None
    assert scale.trend == trend


@pytest.mark.parametrize(
    ("batch", "advice"),
    [
        (30, "a larger one would still help"),
        (100, "a good size"),
        (300, "half of it would learn as much from each example, in less memory"),
        (900, "a quarter of it would learn as much from each example, in less memory"),
    ],
)
def test_it_says_what_the_batch_is_beside_it(batch: int, advice: str) -> None:
    scale = NoiseScale(
        examples=100.0, low=50.0, high=200.0, batch=batch, num_samples=9, trend="rising"
    )
    assert str(scale) == (
        f"Your batch of {batch} is {batch / 100:.2g}x the noise scale (100 examples, 50 to 200,"
        f" rising): {advice}"
    )
