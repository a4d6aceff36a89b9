"""Each run of a convolution's kernel is noted where it stands, with what it reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child


def traced(layer: nn.Module, *, benchmark: bool = False, tf32: bool = True) -> Trace:
    def work() -> Trace:
        from oomph.rehearsing.rehearse import prepare, rehearse

        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cudnn.allow_tf32 = tf32
        prepare((8, 0))
        workload = Workload(
            model=lambda: nn.Sequential(nn.Conv2d(3, 4, 1), layer),
            batch=lambda n: torch.zeros(n, 3, 6, 6),
            loss=lambda model, batch: model(batch).sum(),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=2,
        )
        return rehearse(workload, Variant(micro_batch=2), (8, 0))

    return in_a_child(work)


@pytest.fixture(scope="module")
def dense() -> Trace:
    return traced(nn.Conv2d(4, 8, 3))


def test_a_step_has_one_run_forward_and_two_back_but_none_for_the_gradient_of_the_images(
    dense: Trace,
) -> None:
    of_a_step = ["forward", "forward", "data gradient", "filter gradient", "filter gradient"]
    assert [run.direction for run in dense.convolutions] == 2 * of_a_step


def test_a_run_comes_when_its_result_has_its_memory(dense: Trace) -> None:
    for run in dense.convolutions:
        last = dense.events[run.at_event - 1]
        assert last > 0
        assert "convolution" in dense.allocations[last - 1].op


def test_a_run_has_the_shapes_of_what_it_reads_and_writes(dense: Trace) -> None:
    _, inner = dense.convolutions[:2]
    assert (inner.input_shape, inner.output_shape) == ((2, 4, 6, 6), (2, 8, 4, 4))
    assert inner.weight_shape == (8, 4, 3, 3)
    assert (inner.stride, inner.dilation, inner.groups) == ((1, 1), (1, 1), 1)
    assert (inner.dtype, inner.is_channels_last) == ("float32", False)


def test_strides_and_dilation_stand_for_each_edge() -> None:
    (_, run, *_) = traced(nn.Conv2d(4, 8, 3, stride=(2, 1), dilation=2)).convolutions
    assert (run.stride, run.dilation) == ((2, 1), (2, 2))


def test_a_transposed_convolution_is_the_backward_of_the_one_that_it_transposes() -> None:
    runs = traced(nn.ConvTranspose2d(4, 8, 3)).convolutions
    ours = [run for run in runs if run.weight_shape == (4, 8, 3, 3)][:3]
    assert [run.direction for run in ours] == ["data gradient", "forward", "filter gradient"]
    for run in ours:  # cuDNN writes the larger images, which are the layer's outputs
        assert (run.input_shape, run.output_shape) == ((2, 8, 8, 8), (2, 4, 6, 6))


@pytest.mark.parametrize(
    ("layout", "is_last"), [(torch.channels_last, True), (torch.contiguous_format, False)]
)
def test_filters_with_channels_last_are_enough_for_cudnn(layout: Any, is_last: bool) -> None:
    layer: Any = nn.Conv2d(4, 8, 3)
    layer.to(memory_format=layout)
    (_, run, *_) = traced(layer).convolutions
    assert run.is_channels_last is is_last


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.Conv2d(4, 8, 1), "pointwise"),
        (nn.Conv2d(4, 8, 3), "dense"),
        (nn.Conv2d(4, 8, 3, groups=2), "dense"),
        (nn.Conv2d(4, 4, 3, groups=4), "depthwise"),
        (nn.ConvTranspose2d(4, 8, 3), "dense"),
    ],
)
def test_kinds_are_told_apart(layer: Any, kind: str) -> None:
    assert traced(layer).convolutions[1].kind == kind


def test_it_is_noted_that_tf32_is_not_allowed() -> None:
    assert traced(nn.Conv2d(4, 8, 3)).allows_tf32
    assert not traced(nn.Conv2d(4, 8, 3), tf32=False).allows_tf32


def test_it_is_noted_that_cudnn_measures() -> None:
    assert traced(nn.Conv2d(4, 8, 3), benchmark=True).measures_convolutions
    assert not traced(nn.Conv2d(4, 8, 3)).measures_convolutions
