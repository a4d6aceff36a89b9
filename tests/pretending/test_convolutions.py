"""Each run of a convolution's kernel is noted where it stands, with what it reads and writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child


def traced(layer: nn.Module, *, benchmark: bool = False) -> Trace:
    def work() -> Trace:
        from oomph.rehearsing.rehearse import prepare, rehearse

        torch.backends.cudnn.benchmark = benchmark
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


def test_channels_are_filled_up_to_what_tensor_cores_read_at_once(dense: Trace) -> None:
    images, inner = dense.convolutions[:2]
    assert images.input_bytes == 2 * 4 * 36 * 4  # three channels as four
    assert (inner.input_bytes, inner.output_bytes) == (2 * 4 * 36 * 4, 2 * 8 * 16 * 4)
    assert inner.weight_bytes == 8 * 4 * 9 * 4


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


def test_it_is_noted_that_cudnn_measures() -> None:
    assert traced(nn.Conv2d(4, 8, 3), benchmark=True).measures_convolutions
    assert not traced(nn.Conv2d(4, 8, 3)).measures_convolutions
