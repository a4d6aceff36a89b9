"""What decides the seconds of a kernel: its shape, its layout, its elements, and the host."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.predicting.footprint import Kernel
from oomph.predicting.pricing import KERNEL_S
from oomph.predicting.rates import best_rates
from oomph.predicting.speed import StepTime, estimate
from oomph.records.gpu_model import GpuModel
from oomph.records.trace import Op, Product
from oomph.sensing.catalog import all_models, find

A100, H100, V100 = (find(name).model for name in ("a100-80gb", "h100-80gb", "v100-16gb"))
RTX4090, RTX3090 = find("rtx4090").model, find("rtx3090").model
TERA, GIGA = 10**12, 10**9


def op(name: str = "add", flops: int = 0, moved: int = 0, **more: Any) -> Op:
    given_ = {"phase": "forward", "dtype": "float32", **more}
    return Op(name=name, flops=flops, moved_bytes=moved, **given_)


def matmul(rows: int, columns: int, depth: int, num: int = 1, dtype: str = "bfloat16") -> Op:
    size = {"float32": 4}.get(dtype, 2)
    moved = size * num * (rows * depth + depth * columns + rows * columns)
    product = Product(num, rows, columns, depth)
    return op("mm", 2 * num * rows * columns * depth, moved, dtype=dtype, product=product)


def time_of(*ops: Op, on: GpuModel = A100, **options: Any) -> StepTime:
    time = estimate(ops, on, **options)
    assert time is not None
    return time


def busy(*ops: Op, on: GpuModel = A100, **options: Any) -> float:
    return time_of(*ops, on=on, **options).gpu_busy_s


# ---- products --------------------------------------------------------------------------------

edges = st.integers(1, 20_000)


@settings(deadline=None)
@given(edges, edges, edges, st.integers(1, 64), st.sampled_from(["bfloat16", "float32"]))
def test_a_larger_product_never_takes_less(
    rows: int, columns: int, depth: int, num: int, dtype: str
) -> None:
    took_s = busy(matmul(rows, columns, depth, num, dtype))
    for more in ((rows + 1, columns, depth, num), (rows, columns + 1, depth, num)):
        assert took_s <= busy(matmul(*more, dtype)) * (1 + 1e-9)
    for more in ((rows, columns, depth + 1, num), (rows, columns, depth, num + 1)):
        assert took_s <= busy(matmul(*more, dtype)) * (1 + 1e-9)


@settings(deadline=None)
@given(edges, edges, edges, st.integers(1, 64))
def test_no_product_is_faster_than_the_best_one(
    rows: int, columns: int, depth: int, num: int
) -> None:
    made = matmul(rows, columns, depth, num)
    best = best_rates(A100)[0]["bfloat16"]
    assert best is not None
    assert busy(made) >= made.flops / best


def test_a_tile_too_many_takes_another_wave() -> None:
    """An A100 has 108 SMs: 108 tiles of 128 x 256 are one wave, and 109 are two."""
    whole, beyond = matmul(128 * 108, 256, 4096), matmul(128 * 109, 256, 4096)
    assert busy(beyond) > 1.15 * busy(whole)


def test_a_product_smaller_than_a_tile_takes_as_long_as_the_tile() -> None:
    whole, small = (replace(matmul(n, n, 512, 1000), moved_bytes=0) for n in (64, 33))
    assert busy(small) == pytest.approx(busy(whole))


def test_a_deep_product_with_a_small_result_is_cut_along_its_depth() -> None:
    """One tile on one SM would take 100 times the rate of all."""
    deep, square = matmul(128, 128, 1_000_000), matmul(2540, 2540, 2540)
    assert busy(deep) < 6 * busy(square)


def test_traffic_of_a_product_does_not_hide_entirely() -> None:
    made = matmul(8192, 8192, 512)
    assert busy(made) > 1.05 * busy(replace(made, moved_bytes=0))


@pytest.mark.parametrize(
    ("gpu", "shape", "published_s"),
    [
        # stas00/ml-engineering, MAMF: the best shapes, 271.2 and 794.5 TFLOPS
        (A100, (1024, 10240, 5120), 2 * 1024 * 10240 * 5120 / 271.2e12),
        (H100, (2048, 2048, 13312), 2 * 2048 * 2048 * 13312 / 794.5e12),
        # karpathy/nanochat: a compiled linear layer on an H100
        (H100, (65536, 6656, 1664), 0.00200),
    ],
)
def test_published_products_take_what_they_take(
    gpu: GpuModel, shape: tuple[int, int, int], published_s: float
) -> None:
    assert busy(matmul(*shape), on=gpu) == pytest.approx(published_s, rel=0.30)


def test_the_share_of_the_datasheet_follows_from_the_rate_of_an_sm() -> None:
    """The line through A100 and H100 gives the measured share of a B200: 0.776."""
    measured = (("a100-80gb", 108, 0.869), ("h100-80gb", 132, 0.803), ("b200", 148, 0.776))
    for name, num_sms, of_sheet in measured:
        model = replace(find(name).model, matmul_bf16_flops=None, num_sms=num_sms)
        best = best_rates(model)[0]["bfloat16"]
        assert best == pytest.approx(of_sheet * (model.bf16_flops or 0), rel=0.02)


def test_geforce_boards_run_above_the_clock_of_their_datasheet_and_others_do_not() -> None:
    fast = {model.title for model in all_models() if model.is_geforce_desktop}
    assert {"RTX 4090", "RTX 3080 10GB", "RTX 2080 Ti", "GTX 1080 Ti"} <= fast
    others = {"RTX 6000 Ada", "RTX A6000", "Quadro RTX 6000", "A100 SXM4 80GB", "Titan RTX"}
    assert not fast & others
    assert not any("Laptop" in title or "Max-Q" in title for title in fast)


# ---- convolutions ----------------------------------------------------------------------------


def convolution(dtype: str = "float16", **more: Any) -> Op:
    """Return 3 x 3, 64 channels, 256 images of 56 x 56."""
    shape = {"window": 9, "channels": 64, "is_channels_last": False, **more}
    product = Product(1, 256 * 56 * 56, 64, 64 * 9, **shape)
    flops = 2 * product.rows * product.columns * product.depth
    moved = {"float16": 2}.get(dtype, 4) * 2 * product.rows * 64
    return op("convolution", flops, moved, dtype=dtype, product=product)


def test_tensor_cores_want_channels_last() -> None:
    first, last = convolution(), convolution(is_channels_last=True)
    assert busy(first) > 1.15 * busy(last)


def test_without_tensor_cores_the_layout_does_not_matter() -> None:
    first, last = (convolution("float32", is_channels_last=which) for which in (False, True))
    assert busy(first, on=V100) == busy(last, on=V100)


def test_winograd_spares_products_of_a_3_by_3_window_without_a_stride() -> None:
    small, strided = convolution("float32"), convolution("float32", stride=2)
    assert busy(strided, on=V100) > 1.4 * busy(small, on=V100)
    assert busy(small, on=V100) < small.flops / 15.7e12


def test_a_depthwise_convolution_is_far_from_the_arithmetic_of_a_dense_one() -> None:
    deep = convolution(channels=1)
    assert deep.product is not None
    deep = replace(deep, product=deep.product._replace(num=64, columns=1, depth=9))
    assert busy(deep) > 3 * busy(convolution(is_channels_last=True))


# ---- attention and kernels that are bound by memory ------------------------------------------


def attention(head: int, name: str = "_scaled_dot_product_flash_attention") -> Op:
    product = Product(64, 2048, 2048, head)
    return op(name, 4 * 64 * 2048 * 2048 * head, 0, dtype="float16", product=product)


@pytest.mark.parametrize(
    ("gpu", "made", "published_tflops"),
    [
        # apache/tvm, tl_doc/flash_perf.md: FlashAttention-2 on an RTX 4090
        (RTX4090, attention(64), 168.9),
        (RTX4090, attention(128), 169.3),
        (RTX4090, attention(64, "_scaled_dot_product_flash_attention_backward"), 124.8),
        # https://arxiv.org/abs/2307.08691: 50 to 73 % of an A100's 312
        (A100, attention(128), 0.66 * 312),
        # https://arxiv.org/abs/2407.08608: FlashAttention-2 reaches 35 % of an H100
        (H100, attention(128), 0.35 * 989),
    ],
)
def test_attention_runs_at_the_published_rates(
    gpu: GpuModel, made: Op, published_tflops: float
) -> None:
    assert made.flops / busy(made, on=gpu) / 1e12 == pytest.approx(published_tflops, rel=0.25)


@pytest.mark.parametrize(
    ("gpu", "name", "moved", "published_s"),
    [
        # linkedin/Liger-Kernel, all_benchmark_data.csv: torch's own kernels, fp32
        (RTX3090, "_softmax", 2 * 4 * 2048 * 4096, 83.2e-6),
        (RTX3090, "_softmax_backward_data", 3 * 4 * 2048 * 4096, 330.8e-6 - 83.2e-6),
        (H100, "native_layer_norm", 2 * 4 * 4096 * 8192, 152.7e-6),
        (H100, "native_layer_norm_backward", 3 * 4 * 4096 * 8192, 333.7e-6),
        (A100, "_log_softmax", 2 * 4 * 16384 * 131072, 20.73e-3),
        # babelstream: fp64 triad of an A100 SXM 80GB and of an RTX 4090
        (A100, "add", 3 * 268_435_456, 3 * 268_435_456 / 1724.8e9),
        (RTX4090, "add", 3 * 268_435_456, 3 * 268_435_456 / 920e9),
    ],
)
def test_kernels_bound_by_memory_take_the_published_times(
    gpu: GpuModel, name: str, moved: int, published_s: float
) -> None:
    assert busy(op(name, moved=moved), on=gpu) == pytest.approx(published_s, rel=0.20)


def test_batch_norm_reads_more_often_than_it_looks() -> None:
    """cuDNN's on a V100: 5.7 ms forward, 10.3 ms backward for the tensors of a ResNet-50
    (pytorch/kineto, resnet50_num_workers_0)."""
    elements = 11_113_984 * 32
    norm = op("cudnn_batch_norm", moved=2 * 4 * elements)
    back = op("cudnn_batch_norm_backward", moved=3 * 4 * elements)
    assert busy(norm, on=V100) == pytest.approx(5.7e-3, rel=0.15)
    assert busy(back, on=V100) == pytest.approx(10.3e-3, rel=0.15)


def test_small_elements_do_not_fill_the_bandwidth_of_fast_memory() -> None:
    half, single = (op("add", moved=GIGA, dtype=dtype) for dtype in ("float16", "float32"))
    assert busy(half, on=A100) > 1.1 * busy(single, on=A100)
    assert busy(half, on=V100) == busy(single, on=V100)
    strided = replace(half, is_strided=True)
    assert busy(strided, on=A100) > 1.1 * busy(half, on=A100)


def test_a_kernel_of_nothing_takes_its_start() -> None:
    assert busy(op("add")) == pytest.approx(KERNEL_S)


# ---- the host --------------------------------------------------------------------------------


def test_views_cost_the_host_and_not_the_gpu() -> None:
    alone, viewed = op("add"), op("add", num_views=10)
    assert busy(alone) == busy(viewed)
    assert time_of(viewed).host_s > time_of(alone).host_s + 10e-6


def test_an_op_that_starts_no_kernel_costs_the_host_less() -> None:
    assert time_of(op("empty_like")).host_s < 0.3 * time_of(op("add")).host_s


def test_cudnns_calls_cost_the_host_more_than_other_ops() -> None:
    plain_s = time_of(op("add")).host_s
    assert time_of(op("native_batch_norm")).host_s > 2 * plain_s
    assert time_of(op("convolution")).host_s > 3 * plain_s


def test_a_convolutions_backward_makes_two_calls() -> None:
    forward, backward = op("convolution"), op("convolution_backward", phase="backward")
    assert time_of(backward).host_s > 1.9 * time_of(forward).host_s


def test_the_host_beside_a_newer_server_gpu_is_faster() -> None:
    """Machines are sold with CPUs of their time. Nobody knows what is beside a desktop's GPU."""
    step = op("add", num_views=4), op("convolution"), op("empty")
    on_a100_s, on_h100_s, on_desktop_s = (
        time_of(*step, on=gpu).host_s for gpu in (A100, H100, RTX4090)
    )
    assert 1.4 * on_h100_s < on_a100_s < 1.7 * on_h100_s
    assert on_desktop_s == on_a100_s


def test_every_name_of_batch_norm_costs_the_host_the_same() -> None:
    names = ("native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update")
    assert len({time_of(op(name)).host_s for name in names}) == 1


# ---- any micro-batch -------------------------------------------------------------------------


def test_a_kernels_product_grows_with_the_micro_batch() -> None:
    kernel = Kernel(
        name="mm",
        phase="forward",
        dtype="bfloat16",
        fixed_flops=0,
        grown_flops=2 * 128 * 64 * 32,
        fixed_moved_bytes=0,
        grown_moved_bytes=0,
        fixed_product=Product(1, 0, 64, 32),
        grown_product=(0, 128, 0, 0),
    )
    assert kernel.at(7).product == Product(1, 7 * 128, 64, 32)
