"""The width of an error bar follows from published residuals, and each source is covered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.residuals import (
    KINDS,
    Kind,
    Residual,
    conformal_quantile,
    kind_of,
    published_residuals,
    width_from,
    width_of,
)
from oomph.records.trace import Op


def residuals(kind: Kind, source: str, *ratios: float) -> list[Residual]:
    return [
        Residual(kind=kind, source=source, what=f"run {number}", outside_ratio=ratio)
        for number, ratio in enumerate(ratios)
    ]


def op(name: str, flops: int = 0) -> Op:
    return Op(name=name, phase="forward", flops=flops, moved_bytes=0, dtype="float32")


@given(st.lists(st.floats(0, 1), min_size=19, max_size=60))
def test_one_more_run_of_those_seen_is_covered_with_the_probability_that_is_claimed(
    ratios: list[float],
) -> None:
    covered = [
        ratio <= conformal_quantile([*ratios[:number], *ratios[number + 1 :]])
        for number, ratio in enumerate(ratios)
        if len(ratios) > 19
    ]
    assert sum(covered) >= int(0.95 * len(covered))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=18))
def test_of_too_few_runs_the_largest_counts(ratios: list[float]) -> None:
    assert conformal_quantile(ratios) == max(ratios)


def test_the_source_that_fits_worst_is_covered_too() -> None:
    many = residuals("transformer", "a", *[0.001] * 50)
    found = [*many, *residuals("transformer", "b", 0.02), *residuals("transformer", "c", -0.03)]
    assert width_from(found, "transformer").ratio == 0.03


def test_a_run_far_out_of_a_large_source_is_left_out() -> None:
    one_in_forty = [0.001] * 39 + [0.5]
    found = [
        *residuals("transformer", "a", *one_in_forty),
        *residuals("transformer", "b", 0.0),
        *residuals("transformer", "c", 0.0),
    ]
    assert width_from(found, "transformer").ratio == 0.001


@pytest.mark.parametrize("num_sources", [1, 2])
def test_a_kind_with_few_sources_is_as_wide_as_any_kind_and_says_so(num_sources: int) -> None:
    few = [each for source in "ab"[:num_sources] for each in residuals(KINDS[1], source, 0.01)]
    found = [*few, *residuals("transformer", "c", -0.06)]
    width = width_from(found, KINDS[1])
    assert width.ratio == 0.06
    assert "few runs" in width.because


def test_a_kind_with_few_sources_is_wider_than_they_need_themselves() -> None:
    kind: Kind = "model on several GPUs"
    found = [*residuals(kind, "a", 0.06), *residuals(kind, "b", 0.0)]
    assert width_from(found, kind).ratio == pytest.approx(0.09)


@pytest.mark.parametrize(
    ("ops", "kind"),
    [
        ([op("mm", 10), op("relu")], "other model"),
        ([op("mm", 10), op("_log_softmax")], "other model"),
        ([op("bmm", 10), op("_softmax")], "transformer"),
        ([op("mm", 10), op("_scaled_dot_product_efficient_attention", 4)], "transformer"),
        ([op("convolution", 9), op("convolution_backward", 18), op("mm", 1)], KINDS[1]),
        # a vision transformer's images, and a U-Net's attention
        ([op("convolution", 5), op("mm", 50), op("_softmax")], "transformer"),
        ([op("convolution", 50), op("mm", 20), op("_softmax")], KINDS[1]),
        ([], "other model"),
    ],
)
def test_the_kind_is_where_the_arithmetic_is(ops: list[Op], kind: Kind) -> None:
    assert kind_of(ops) == kind
    assert kind_of(ops, num_gpus=2) == "model on several GPUs"


def test_the_published_residuals_give_every_kind_a_width() -> None:
    assert {each.kind for each in published_residuals()} == set(KINDS)
    for kind in KINDS:
        assert 0 < width_of(kind).ratio < 0.1
    assert width_of("transformer").ratio < width_of("model on several GPUs").ratio


def test_each_published_run_stands_there_once() -> None:
    runs = [(each.source, each.kind, each.what) for each in published_residuals()]
    assert len(runs) == len(set(runs)) > 100
