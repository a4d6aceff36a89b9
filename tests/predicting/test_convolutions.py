"""What cuDNN takes for a convolution follows from its shape, the precision and the card."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.convolutions import (
    NOTHING,
    RESULT_OF_DATA_GRADIENTS,
    TRANSFORMED_TILES,
    WHAT_BACKWARD_READS,
    WHAT_IS_READ,
    WHAT_IS_READ_AND_WRITTEN,
    WorkspaceRule,
    rules_for,
    winograd_bytes,
)
from oomph.predicting.scaling import affine
from oomph.records.gpu_model import Tf32
from oomph.records.trace import Convolution, Direction, Trace
from predicting.test_scaling import trace_of

EVERY_RULE = (
    NOTHING,
    RESULT_OF_DATA_GRADIENTS,
    TRANSFORMED_TILES,
    WHAT_BACKWARD_READS,
    WHAT_IS_READ,
    WHAT_IS_READ_AND_WRITTEN,
)


def convolution(
    direction: Direction = "forward",
    *,
    examples: int = 2,
    channels: tuple[int, int] = (8, 16),
    edge: int = 8,
    kernel: int = 3,
    dtype: str = "float32",
    groups: int = 1,
    is_channels_last: bool = False,
) -> Convolution:
    """A convolution whose maps keep their size."""
    inputs, outputs = channels
    return Convolution(
        at_event=1,
        direction=direction,
        dtype=dtype,
        input_shape=(examples, inputs, edge, edge),
        weight_shape=(outputs, inputs // groups, kernel, kernel),
        output_shape=(examples, outputs, edge, edge),
        stride=(1, 1),
        dilation=(1, 1),
        groups=groups,
        is_channels_last=is_channels_last,
    )


X, W, Y = 2 * 8 * 64 * 4, 8 * 16 * 9 * 4, 2 * 16 * 64 * 4


@pytest.mark.parametrize(
    ("direction", "is_read", "is_touched", "is_result"),
    [
        ("forward", X + W, X + W + Y, 0),
        ("data gradient", Y + W, X + W + Y, X + W),
        ("filter gradient", X + Y + W, X + W + Y, 0),
    ],
)
def test_a_kernel_copies_what_it_reads_or_also_what_it_writes(
    direction: Direction, is_read: int, is_touched: int, is_result: int
) -> None:
    run = convolution(direction)
    assert WHAT_IS_READ.workspace_bytes(run) == is_read
    assert WHAT_IS_READ_AND_WRITTEN.workspace_bytes(run) == is_touched
    assert RESULT_OF_DATA_GRADIENTS.workspace_bytes(run) == is_result
    assert WHAT_BACKWARD_READS.workspace_bytes(run) == (0 if direction == "forward" else is_read)
    assert NOTHING.workspace_bytes(run) == 0


@pytest.mark.parametrize(("dtype", "as_many"), [("float32", 4), ("float16", 8), ("bfloat16", 8)])
def test_channels_are_filled_up_to_what_tensor_cores_read_at_once(dtype: str, as_many: int) -> None:
    three, filled = (convolution(channels=(each, 16), dtype=dtype) for each in (3, as_many))
    weights = [16 * each * 9 * (4 if dtype == "float32" else 2) for each in (3, as_many)]
    assert WHAT_IS_READ.workspace_bytes(three) - weights[0] == (
        WHAT_IS_READ.workspace_bytes(filled) - weights[1]
    )


@pytest.mark.parametrize(
    ("dtype", "edge", "is_copied"),
    [
        ("float32", 56, False),
        ("float32", 7, True),
        ("float32", 19, True),
        ("float32", 2, False),
        ("float16", 2, True),
        ("float16", 14, True),
        ("float16", 28, False),
    ],
)
def test_a_1x1_convolution_is_a_matrix_product_unless_its_maps_begin_between_two_reads(
    dtype: str, edge: int, is_copied: bool
) -> None:
    run = convolution(kernel=1, edge=edge, dtype=dtype)
    assert (WHAT_IS_READ.workspace_bytes(run) > 0) is is_copied


@pytest.mark.parametrize("rule", EVERY_RULE)
def test_depthwise_kernels_and_channels_last_need_no_copies(rule: WorkspaceRule) -> None:
    for direction in ("forward", "data gradient", "filter gradient"):
        depthwise = convolution(direction, channels=(8, 8), groups=8)
        last = convolution(direction, is_channels_last=True)
        assert rule.workspace_bytes(depthwise) == rule.workspace_bytes(last) == 0


@pytest.mark.parametrize(
    ("channels", "edge", "recorded_bytes"),
    [(64, 56, 116_195_328), (256, 14, 47_185_920), (512, 7, 56_623_104)],
)
def test_winograds_tiles_are_those_of_the_recording(
    channels: int, edge: int, recorded_bytes: int
) -> None:
    # pytorch/kineto, resnet50_v100_num_workers_0.pt.trace.json.gz: batch 32
    run = convolution(examples=32, channels=(channels, channels), edge=edge)
    assert winograd_bytes(run) == recorded_bytes
    assert TRANSFORMED_TILES.workspace_bytes(run) == recorded_bytes


def test_winograds_tiles_are_nearly_those_of_the_recordings_other_shape() -> None:
    run = convolution(examples=32, channels=(128, 128), edge=28)
    assert 0.985 < winograd_bytes(run) / 60_817_408 < 1


@pytest.mark.parametrize(
    "other",
    [
        {"stride": (2, 2)},
        {"dilation": (2, 2)},
        {"weight_shape": (16, 8, 5, 5)},
        {"dtype": "float16"},
        {"groups": 2},
    ],
)
def test_winograds_algorithm_exists_for_one_kind_of_filter_only(other: dict[str, object]) -> None:
    assert TRANSFORMED_TILES.workspace_bytes(replace(convolution(), **other)) == 0  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "tf32", "likely"),
    [
        ("float32", "none", {NOTHING, RESULT_OF_DATA_GRADIENTS}),
        ("float32", "as fast as fp32", {NOTHING, RESULT_OF_DATA_GRADIENTS}),
        ("float32", "faster than fp32", {WHAT_IS_READ, WHAT_BACKWARD_READS}),
        ("float16", "none", {WHAT_IS_READ, WHAT_BACKWARD_READS}),
        ("bfloat16", "as fast as fp32", {WHAT_IS_READ, WHAT_BACKWARD_READS}),
    ],
)
def test_copies_are_likely_where_tensor_cores_pay(
    dtype: str, tf32: Tf32, likely: set[WorkspaceRule]
) -> None:
    rules = rules_for([convolution(dtype=dtype)], tf32=tf32)
    assert set(rules.likely) == likely


def test_without_tensor_cores_the_fastest_kernel_is_winograds() -> None:
    rules = rules_for([convolution()], tf32="none", are_measured=True)
    assert rules.likely == (TRANSFORMED_TILES,)


@pytest.mark.parametrize("tf32", ["none", "as fast as fp32", "faster than fp32"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("are_measured", [False, True])
def test_what_is_likely_is_possible_and_so_is_a_kernel_without_a_workspace(
    tf32: Tf32, dtype: str, are_measured: bool
) -> None:
    rules = rules_for([convolution(dtype=dtype)], tf32=tf32, are_measured=are_measured)
    assert {*rules.likely, NOTHING} <= set(rules.possible)


def convolved(examples: int) -> Trace:
    trace = trace_of([64 * examples], [1, -1], examples)
    runs = (
        convolution("filter gradient", examples=examples),
        convolution("forward", examples=examples, kernel=1, edge=7),
        convolution("data gradient", examples=examples, dtype="float16"),
    )
    return replace(trace, convolutions=runs)


@given(examples=st.integers(4, 4096))
def test_workspaces_of_another_micro_batch_are_those_of_its_own_trace(examples: int) -> None:
    scaled = affine(convolved(2), convolved(3)).at(examples)
    for rule in EVERY_RULE:
        for found, own in zip(scaled.convolutions, convolved(examples).convolutions, strict=True):
            assert rule.workspace_bytes(found) == rule.workspace_bytes(own)


def test_volumes_and_lines_are_copied_like_images() -> None:
    for edges in ((6,), (6, 6, 6)):
        run = Convolution(
            at_event=1,
            direction="forward",
            dtype="float16",
            input_shape=(2, 8, *edges),
            weight_shape=(8, 8, *(3 for _ in edges)),
            output_shape=(2, 8, *edges),
            stride=tuple(1 for _ in edges),
            dilation=tuple(1 for _ in edges),
        )
        size = 2 * 2 * 8 * 6 ** len(edges)
        assert WHAT_IS_READ.workspace_bytes(run) == size + 2 * 8 * 8 * 3 ** len(edges)
