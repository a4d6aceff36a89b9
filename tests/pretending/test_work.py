"""What a kernel moves: what it reads, and what it writes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.pretending.kernels import is_channels_last, laid_out_as_cudnn_does
from oomph.pretending.ops import Behaviour
from oomph.pretending.work import with_place, work_of

aten = torch.ops.aten
MIB = 2**20


def tensor() -> Any:
    return torch.empty(MIB // 4, device="meta")


@pytest.mark.parametrize(
    ("function", "args", "num_outputs", "moved_mib"),
    [
        pytest.param(aten.add.Tensor, (tensor(), tensor()), 1, 3, id="two read, one written"),
        pytest.param(aten.mul_.Scalar, (tensor(), 2.0), 0, 2, id="read and written again"),
        pytest.param(aten.add_.Tensor, (tensor(), tensor()), 0, 3, id="one of two written again"),
        pytest.param(aten.zero_.default, (tensor(),), 0, 1, id="written without a look"),
        pytest.param(aten.copy_.default, (tensor(), tensor()), 0, 2, id="copied"),
        pytest.param(
            aten._foreach_add_.List, ([tensor()] * 3, [tensor()] * 3), 0, 9, id="lists of tensors"
        ),
    ],
)
def test_every_byte_that_is_read_or_written_is_counted(
    function: Any, args: Any, num_outputs: int, moved_mib: int
) -> None:
    outputs = [tensor() for _ in range(num_outputs)]
    (work,) = work_of(Behaviour(function), args, {}, outputs, "step")
    assert work.moved_bytes == moved_mib * MIB


def test_a_product_of_matrices_has_two_operations_for_each_element_and_row() -> None:
    left, right = torch.empty(64, 32, device="meta"), torch.empty(32, 16, device="meta")
    (work,) = work_of(
        Behaviour(aten.mm.default),
        (left, right),
        {},
        [torch.empty(64, 16, device="meta")],
        "forward",
    )
    assert work.flops == 2 * 64 * 32 * 16


def test_what_happens_on_the_host_is_no_kernel() -> None:
    assert work_of(Behaviour(aten.zero_.default), (torch.empty(4),), {}, [], "step") == ()


# ---- convolutions


def convolution(channels: int, groups: int, *, channels_last: bool = False) -> tuple[Any, ...]:
    """Return a 3 x 3 convolution of 2 x 16 x 16 pixels, and its result."""
    source = torch.empty(2, channels, 16, 16, device="meta")
    if channels_last:
        source = source.to(memory_format=torch.channels_last)
    weight = torch.empty(channels, channels // groups, 3, 3, device="meta")
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], groups
    return source, weight, settings, torch.empty(2, channels, 16, 16, device="meta")


@pytest.mark.parametrize("groups", [1, 4, 64])
def test_each_gradient_of_a_convolution_multiplies_as_often_as_the_forward(groups: int) -> None:
    """torch's own formula counts 65 times as much for the filter of a depthwise one."""
    source, weight, settings, result = convolution(64, groups)
    (forward,) = work_of(
        Behaviour(aten.convolution.default), (source, weight, None, *settings), {}, [result], "step"
    )
    backward = work_of(
        Behaviour(aten.convolution_backward.default),
        (result, source, weight, [0], *settings, [True, True, False]),
        {},
        [source, weight, None],
        "backward",
    )
    assert forward.flops == 2 * 2 * 16 * 16 * 64 * 64 // groups * 9
    assert [run.flops for run in backward] == [forward.flops, forward.flops]
    for run in (forward, *backward):
        assert run.product is not None
        num, rows, columns, depth, *_ = run.product
        assert 2 * num * rows * columns * depth == run.flops


def test_only_gradients_that_are_wanted_are_computed() -> None:
    source, weight, settings, result = convolution(64, 1)
    (filters,) = work_of(
        Behaviour(aten.convolution_backward.default),
        (result, source, weight, [0], *settings, [False, True, False]),
        {},
        [None, weight, None],
        "backward",
    )
    assert filters.product is not None
    assert filters.product.depth == 2 * 16 * 16


def test_a_convolution_knows_its_layout() -> None:
    for channels_last in (False, True):
        source, weight, settings, result = convolution(64, 1, channels_last=channels_last)
        (run,) = work_of(
            Behaviour(aten.convolution.default),
            (source, weight, None, *settings),
            {},
            [result],
            "step",
        )
        assert run.product is not None
        assert run.product.is_channels_last == channels_last


# ---- attention, and kernels that read a part


def test_a_causal_attention_skips_what_lies_above_the_diagonal() -> None:
    query = torch.empty(2, 8, 4096, 64, device="meta")
    flops = []
    for is_causal in (False, True):
        (run,) = work_of(
            Behaviour(aten._scaled_dot_product_flash_attention.default),
            (query, query, query, 0.0, is_causal),
            {},
            [query],
            "forward",
        )
        flops.append(run.flops)
        assert run.product == (16, 4096, 4096, 64, 1, 1, False, 0)
    assert flops[1] / flops[0] == pytest.approx((32 + 1) / (2 * 32))


def test_an_embedding_reads_the_rows_that_it_returns_and_not_its_table() -> None:
    table, indices = torch.empty(2**20, 64, device="meta"), torch.empty(10, device="meta")
    rows = torch.empty(10, 64, device="meta")
    (run,) = work_of(Behaviour(aten.embedding.default), (table, indices), {}, [rows], "forward")
    assert run.moved_bytes == (2 * 10 * 64 + 10) * 4


def test_a_transposing_copy_is_strided_and_a_plain_one_is_not() -> None:
    one, other = torch.empty(64, 32, device="meta"), torch.empty(32, 64, device="meta")
    for source, is_strided in ((one, False), (other.t(), True), (one[:1], True)):
        (run,) = work_of(Behaviour(aten.add.Tensor), (one, source), {}, [one], "forward")
        assert run.is_strided == is_strided


def test_views_are_noted_with_the_first_kernel_after_them() -> None:
    runs = work_of(
        Behaviour(aten.add.Tensor), (tensor(), tensor()), {}, [tensor()], "forward", "a", 3
    )
    assert [run.num_views for run in runs] == [3]
    assert [(run.module, run.num_views) for run in with_place((*runs, *runs), "b", 2)] == [
        ("b", 2),
        ("b", 0),
    ]


@pytest.mark.parametrize("edge", [1, 3])
@pytest.mark.parametrize("which", ["input", "weight", "neither"])
def test_a_convolution_is_channels_last_if_its_input_or_its_weight_is(
    edge: int, which: str
) -> None:
    source = torch.empty(2, 8, 16, 16, device="meta")
    weight = torch.empty(8, 8, edge, edge, device="meta")
    if which == "input":
        source = source.to(memory_format=torch.channels_last)
    if which == "weight":
        weight = weight.to(memory_format=torch.channels_last)
    result = torch.empty(2, 8, 16, 16, device="meta")
    out = laid_out_as_cudnn_does("convolution", (source, weight), result)
    assert is_channels_last(out) == (which != "neither")
