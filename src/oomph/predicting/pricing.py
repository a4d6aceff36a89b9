"""The kernels of a step, a GPU -> the seconds of each: on the GPU, to issue, on bus and links.

Kernels are priced in columns, because a planner asks for thousands of micro-batches. Constants are
of kernels that were measured alone where there are any; others are named as judgement.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from oomph.predicting.links import COMMUNICATION, is_in_layers
from oomph.predicting.rates import (
    BEST_INTENSITY,
    IDLE_RATIO,
    OPERAND_RATIO,
    SM_BYTES_PER_S,
    Kind,
    Rates,
)
from oomph.records.trace import Op, Phase, Product

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]
    Columns = NDArray[np.float64]

Bound = Literal[
    "arithmetic", "memory bandwidth", "kernel launches", "host and bus", "communication"
]
Place = Literal["gpu", "to host", "from host", "host"]
Role = Literal["kernel", "gather", "reduce", "wait"]

# ---- where an op runs ----------------------------------------------------------------------------

_MATMULS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"}
    | {"_scaled_mm", "_grouped_mm"}
)
# These run no kernel: they make a tensor, or another view of one.
_WITHOUT_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "lift_fresh"}
)
# The host waits for the result of these ops.
WAITED_FOR = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"})

# Where ops run that do not run on the GPU.
_PLACES: Mapping[str, Place] = {
    "copy_to_host": "to host",
    "copy_from_host": "from host",
    "on_host": "host",
}
BUS = ("copy_to_host", "copy_from_host")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Where an op runs, and what waits for it."""

    place: Place = "gpu"
    role: Role = "kernel"
    is_waited_for: bool = False
    num_pending: int = 0  # for a wait
    is_sent: bool = False  # a collective that the GPU waits for at once, as for a kernel

    @property
    def is_gpus(self) -> bool:
        return self.place == "gpu" and self.role == "kernel"


def lane_of(name: str, num_pending: int) -> Lane:
    """Return where an op of this name runs."""
    if name == "wait":
        return Lane(role="wait", num_pending=num_pending)
    if name in COMMUNICATION:
        return Lane(role="gather" if name == "all_gather" else "reduce")
    if is_in_layers(name):
        return Lane(is_sent=True)
    return Lane(place=_PLACES.get(name, "gpu"), is_waited_for=name in WAITED_FOR)


def kind_of(name: str) -> Kind:
    """Return what decides an op's arithmetic."""
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    return "convolution" if name.startswith("convolution") else "other"


# ---- memory traffic ------------------------------------------------------------------------------
# Of the datasheet's bandwidth, for what an op reads and writes once. Plain elementwise kernels:
# BabelStream's copy, mul, add and triad reach 0.79 to 0.91 on seven GPUs.
_PLAIN = 0.86
# Kernels that read their tensors more than once, or not in order. Of the same bytes, from
# measurements of torch's own kernels (linkedin/Liger-Kernel, all_benchmark_data.csv): layer norm on
# an H100 (4096 rows of 4096 to 16384), softmax on an RTX 3090 (its backward also multiplies into a
# temporary), cross-entropy on an A100 (16384 rows of 32768 and more).
# Batch norm reads its input again after it has the mean; backward reads both again: 3 and 5 passes
# for the 2 and 3 counted, at the bandwidth of a copy.
_SHARES: Mapping[str, float] = {
    "native_layer_norm": 0.55,
    "native_layer_norm_backward": 0.36,
    "_fused_rms_norm": 0.55,
    "_fused_rms_norm_backward": 0.36,
    "native_group_norm": 0.35,
    "native_group_norm_backward": 0.35,
    "_log_softmax": 0.41,
    "_log_softmax_backward_data": 0.42,
    "_softmax": 0.80,
    "_softmax_backward_data": 0.42,
    "native_batch_norm": _PLAIN * 2 / 3,
    "native_batch_norm_backward": _PLAIN * 3 / 5,
    "cudnn_batch_norm": _PLAIN * 2 / 3,
    "cudnn_batch_norm_backward": _PLAIN * 3 / 5,
    "_batch_norm_with_update": _PLAIN * 2 / 3,
    "batch_norm_backward": _PLAIN * 3 / 5,
}
# A thread of an elementwise kernel has 4 elements (torch's thread_work_size, CUDALoops.cuh), of any
# size, and an SM holds so many threads. This long a block stays on its SM: it waits for its loads,
# then for its stores. Memory that is fast for its SMs is not reached with small elements.
# Judgement, between one and two times the latency of a loaded memory.
_ELEMENTS_PER_THREAD = 4
_BLOCK_S, _STRIDED_BLOCK_S = 1.5e-6, 2.4e-6
_IN_CHUNKS = ("_foreach", "_fused")  # kernels that load several elements at once
# cuDNN's tensor-core kernels want channels last. Other tensors are transposed before, and results
# after (nchwToNhwcKernel and nhwcToNchwKernel in profiles): read and written once more each. In
# TF32 some kernels take both layouts (nhwckrsc_nchw in their names): about half of that. Judgement.
_TRANSPOSING, _TRANSPOSING_SOME = 3.0, 2.0
# What a kernel takes besides: its launch on the GPU, and the time until its first blocks have data.
# Kernels of a few elements take 2 us in a profile of a V100 (pytorch/kineto's ResNet-50).
KERNEL_S = 2e-6

# ---- arithmetic ----------------------------------------------------------------------------------
# A matrix product is cut into tiles, one per SM at a time. The last wave of tiles may be small, and
# a tile that is larger than the product is computed whole. cuBLAS chooses among tiles, and may cut
# the depth, whose parts are then added. (NVIDIA, "Matrix Multiplication Background User's Guide".)
_TILES = (
    *((256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64)),
    *((128, 32), (32, 128), (32, 32)),
)
_SPLITS = (1, 2, 4, 8, 16, 64)
_LEAST_TENSOR_EDGE, _MOST_VECTOR_EDGE = 64, 128
_TILE_S = 1e-6  # until a tile's first operands arrive, and to write its result; judgement
# How much of a product's memory traffic does not hide behind its arithmetic: the first operands of
# each wave and the results of the last. Judgement: 0.3 to 0.5 for a linear layer on an H100
# (karpathy/nanochat) and for the convolutions of a ResNet-50 on a V100 (pytorch/kineto).
_EXPOSED = 0.4
# Of the best matmul, for a product whose shape or whose GPU's number of SMs is unknown. Judgement.
_WITHOUT_SHAPE = 0.80
_LONGEST_S = 1e30  # of a tile that a unit does not have

# Of the best matmul. A convolution computes where its operands are while it multiplies. Judgement.
_CONVOLUTION = 0.80
# Winograd's 2 x 2 transform of a 3 x 3 window multiplies 2.25 times less; what it saves after its
# transforms. cuDNN has it without tensor cores. Judgement between 1.3 and 2.25.
_WINOGRAD = 2.0
_WINOGRAD_CHANNELS = 32  # from here on; judgement
# With so few channels per group, tensor cores compute mostly padding, and cuDNN uses other kernels.
_FEW_CHANNELS = 16
# One channel per group: no operand is used twice by neighbours in a tile. Judgement.
_DEPTHWISE = 0.25

# Fused attention (https://arxiv.org/abs/2307.08691): between its two products a score passes the
# exponential and some ten other operations of the vector units, half of it hidden by products.
_EXPONENTIALS_PER_CYCLE = 16  # of an SM (CUDA C++ Programming Guide, "Arithmetic Instructions")
_SCORE_OPERATIONS = 10
_HIDDEN = 0.5
# Backward has five products for two and sums queries' gradients in memory: 0.75 of the forward's
# rate (both tables of the paper, and an RTX 4090: apache/tvm, tl_doc/flash_perf.md).
_ATTENTION_BACKWARD = 0.75
# Without the asynchronous products of compute capability 9.0, its tensor cores reach 0.62
# (https://arxiv.org/abs/2402.13499); torch's flash attention is FlashAttention-2.
_SYNCHRONOUS = 0.62
# The memory-efficient kernel, of FlashAttention-2's rate. Judgement.
_EFFICIENT = 0.6

# ---- bus and host ------------------------------------------------------------------------------
# bus: 25 to 26 GB/s of 31.5 are common with pinned memory. host: between two channels of DDR4 and a
# server's eight, shared with other work: judgement. Links: links.py.
_BUS = 0.80
_HOST_BYTES_PER_S = 50e9

# ---- the host ------------------------------------------------------------------------------------
# Python, autograd, dispatcher and launch of one op, on the host beside an A100. Judgement, between
# published hosts. What sources with small kernels ask for, of this and of a GPU's host_speed, in
# the median: three machines with Turing boards 1.0 to 1.2, an H100's 0.80, an RTX 4090's 1.7.
_HOST_S: Mapping[Phase, float] = {
    "build": 10e-6,
    "input": 10e-6,
    "forward": 20e-6,
    "backward": 21e-6,
    "clip": 10e-6,
    "step": 8e-6,
    "zero_grad": 8e-6,
}
_VIEW_S = 2.5e-6  # a view: no kernel, and no memory
# cuDNN takes the host longer: it looks up what it chose, describes each tensor, and starts several
# kernels. Of an elementwise op, from the backward of a ResNet-50 on a V100 (profile of
# pytorch/kineto; 4 us less for each profiled op inside, 3 us for each call of CUDA): 6.6 for a
# convolution's backward, which makes two calls, and 2.4 for batch norm's. Forward is taken alike.
_CUDNN_CALL, _NORM_CALL = 3.3, 2.4
# An op that starts no kernel, of one that does: aten::empty in the same profile.
_WITHOUT_LAUNCH = 0.25
_CALLS: Mapping[str, float] = {
    "convolution": _CUDNN_CALL,
    "convolution_backward": 2 * _CUDNN_CALL,
    "native_batch_norm": _NORM_CALL,
    "native_batch_norm_backward": _NORM_CALL,
    "cudnn_batch_norm": _NORM_CALL,
    "cudnn_batch_norm_backward": _NORM_CALL,
    "_batch_norm_with_update": _NORM_CALL,
    "batch_norm_backward": _NORM_CALL,
}


class _Unit(NamedTuple):
    """What a kind of kernel takes, apart from its sizes."""

    lane: Lane
    runs: bool = False  # False: no kernel on the GPU
    flop_s: float = 0.0  # if it is no product
    byte_s: float = 0.0
    start_s: float = 0.0
    host_s: float = 0.0
    exposed: float = 0.0  # share of the shorter of arithmetic and traffic that is not hidden
    is_product: bool = False
    on_tensor_cores: bool = False
    of_best: float = 1.0  # of the best matmul's rate
    operand_bytes: int = 4
    rate: float = 1.0


class Sizes(NamedTuple):
    """The sizes of kernels, in columns."""

    flops: Columns
    moved_bytes: Columns
    products: Columns  # num, rows, columns, depth; zeros if it is no product


def sizes_of(kernels: Sequence[Op]) -> Sizes:
    """Return the sizes of kernels in columns."""
    import numpy as np

    nothing = (0, 0, 0, 0)
    return Sizes(
        np.array([op.flops for op in kernels], dtype=np.float64),
        np.array([op.moved_bytes for op in kernels], dtype=np.float64),
        np.array([op.product[:4] if op.product else nothing for op in kernels], dtype=np.float64)
        .reshape(-1, 4)
        .T,
    )


class Prices:
    """What kernels take on one GPU; each kind is priced once."""

    def __init__(self, rates: Rates) -> None:
        self._rates = rates
        self.unit = functools.cache(self._unit)

    @property
    def num_sms(self) -> int | None:
        return self._rates.num_sms

    def of(self, kernels: Sequence[Op]) -> Priced | None:
        """Return the kernels with their prices; None if a needed rate is unknown."""
        found = [
            self.unit(
                op.name,
                op.phase,
                op.dtype,
                trait_of(op.product),
                op.num_pending,
                has_flops=op.flops > 0,
                is_strided=op.is_strided,
            )
            for op in kernels
        ]
        speed = self._rates.host_speed
        units = [
            unit._replace(host_s=(unit.host_s + op.num_views * _VIEW_S) / speed)
            for unit, op in zip(found, kernels, strict=True)
            if unit is not None
        ]
        return Priced(units, self) if len(units) == len(found) else None

    # ---- one kind of kernel

    def _unit(
        self,
        name: str,
        phase: Phase,
        dtype: str,
        trait: Trait | None,
        num_pending: int,
        *,
        has_flops: bool,
        is_strided: bool,
    ) -> _Unit | None:
        lane = lane_of(name, num_pending)
        bandwidth = self._rates.bandwidth_bytes_per_s
        if not bandwidth:
            return None
        if not lane.is_gpus:
            return self._off_the_gpu(lane, name)
        host_s = _HOST_S[phase] * _CALLS.get(name, 1.0)
        if lane.is_sent:
            return self._sent(lane, name, host_s)
        if name in _WITHOUT_KERNEL:
            return _Unit(lane, host_s=host_s * _WITHOUT_LAUNCH)
        plain = _Unit(
            lane,
            runs=True,
            byte_s=self._byte_s(name, dtype, bandwidth, is_strided=is_strided),
            start_s=KERNEL_S,
            host_s=host_s,
        )
        if not has_flops:
            return plain
        arithmetic = _Arithmetic(self._rates, name, dtype)
        if arithmetic.kind == "attention":
            return arithmetic.attention(plain, trait)
        return arithmetic.product(plain, trait)

    def _byte_s(self, name: str, dtype: str, bandwidth: float, *, is_strided: bool) -> float:
        """Return the seconds of a byte that is read or written."""
        byte_s = 1 / (bandwidth * _SHARES.get(name, _PLAIN))
        num_sms = self._rates.num_sms
        if not num_sms or kind_of(name) != "other" or name.startswith(_IN_CHUNKS):
            return byte_s
        block_s = _STRIDED_BLOCK_S if is_strided and name not in _SHARES else _BLOCK_S
        under_way = num_sms * self._rates.threads_per_sm * _ELEMENTS_PER_THREAD
        return max(byte_s, block_s / (_element_bytes(dtype) * under_way))

    def _sent(self, lane: Lane, name: str, host_s: float = 0.0) -> _Unit | None:
        """Return the price of a collective; None if its link is unknown."""
        link = self._rates.links.of(name)
        if link is None:
            return None
        byte_s = 1 / link.reached_bytes_per_s
        return _Unit(lane, byte_s=byte_s, start_s=link.start_s, host_s=host_s)

    def _off_the_gpu(self, lane: Lane, name: str) -> _Unit | None:
        if lane.role == "wait":
            return _Unit(lane)
        if lane.role != "kernel":
            return self._sent(lane, name)
        if lane.place == "host":
            return _Unit(lane, byte_s=1 / _HOST_BYTES_PER_S, host_s=_HOST_S["step"])
        bus = self._rates.bus_bytes_per_s
        if bus is None:
            return None
        return _Unit(lane, byte_s=1 / (bus * _BUS), host_s=_HOST_S["forward"])


class Trait(NamedTuple):
    """What of a product decides its price per operation: nothing that grows with the batch."""

    head: int  # the depth, for attention
    is_grouped: bool
    window: int
    stride: int
    is_channels_last: bool
    channels: int


def trait_of(product: Product | None) -> Trait | None:
    """Return the trait of a product."""
    if product is None:
        return None
    if not product.channels:  # no convolution
        return Trait(product.depth, False, 1, 1, False, 0)
    more = product.window, product.stride, product.is_channels_last, product.channels
    return Trait(0, product.num > 1, *more)


class _Arithmetic:
    """The rates of an op's arithmetic on one GPU."""

    def __init__(self, rates: Rates, name: str, dtype: str) -> None:
        self._rates, self._name, self._dtype = rates, name, dtype
        self.kind = kind_of(name)
        self._tensor = rates.of_tensor_cores(dtype, self.kind)
        self._vector = rates.of_vector_units(dtype)

    def product(self, plain: _Unit, trait: Trait | None) -> _Unit | None:
        """Return the price of a matmul, a convolution, or of anything else with operations."""
        rate, of_best, on_tensor_cores = self._tensor, 1.0, self._tensor is not None
        byte_s = plain.byte_s
        if self.kind == "convolution":
            of_best = _CONVOLUTION
        if self.kind == "convolution" and trait is not None:
            if trait.channels == 1 and trait.is_grouped:
                rate, of_best, on_tensor_cores = self._vector, _DEPTHWISE, False
                trait = None  # nothing of it is cut into tiles
            elif trait.is_grouped and trait.channels < _FEW_CHANNELS:
                rate, on_tensor_cores = self._vector, False
            elif _is_for_winograd(trait) and self._vector and self._is_faster_by_winograd():
                rate, of_best, on_tensor_cores = self._vector, _WINOGRAD * _CONVOLUTION, False
            elif on_tensor_cores and not trait.is_channels_last:
                byte_s *= _TRANSPOSING if _element_bytes(self._dtype) < 4 else _TRANSPOSING_SOME
        if not on_tensor_cores:
            rate = self._vector
        if rate is None:
            return None
        return plain._replace(
            flop_s=1 / (rate * of_best * _WITHOUT_SHAPE),
            byte_s=byte_s,
            exposed=_EXPOSED if self.kind != "other" else 0.0,
            is_product=trait is not None and self._rates.num_sms is not None,
            on_tensor_cores=on_tensor_cores,
            of_best=of_best,
            operand_bytes=_element_bytes(self._dtype),
            rate=rate,
        )

    def _is_faster_by_winograd(self) -> bool:
        """Return whether vector units with fewer products beat tensor cores, if there are any."""
        return self._dtype == "float32" and (self._vector or 0) * _WINOGRAD > (self._tensor or 0)

    def attention(self, plain: _Unit, trait: Trait | None) -> _Unit | None:
        """Return the price of fused attention, by the size of its heads."""
        rate = self._tensor or self._vector
        if rate is None:
            return None
        of_best = self._of_best_in_attention(rate, trait) if self._tensor else 1.0
        if "backward" in self._name:
            of_best *= _ATTENTION_BACKWARD
        if "flash" not in self._name and "cudnn" not in self._name:
            of_best *= _EFFICIENT
        return plain._replace(flop_s=1 / (rate * of_best))

    def _of_best_in_attention(self, rate: float, trait: Trait | None) -> float:
        """Return how much of the best matmul's rate the products of attention reach."""
        of_best = _SYNCHRONOUS if self._rates.capability >= (9, 0) else 1.0
        sheet, num_sms = self._rates.fp32_flops, self._rates.num_sms
        if trait is None or not trait.head or not sheet or not num_sms:
            return of_best * (1 - _HIDDEN / 2)
        # seconds per score of one SM, which has an fp32 sheet of 2 operations a cycle and unit
        units = _VECTOR_UNITS_DOUBLED if self._rates.capability >= (8, 6) else _VECTOR_UNITS
        cycle_s = 2 * units * num_sms / sheet
        products_s = 4 * trait.head * num_sms / (rate * of_best)
        softmax_s = cycle_s * (1 / _EXPONENTIALS_PER_CYCLE + _SCORE_OPERATIONS / units)
        return of_best * products_s / (products_s + (1 - _HIDDEN) * softmax_s)


# fp32 units of an SM (CUDA C++ Programming Guide, "Arithmetic Instructions").
_VECTOR_UNITS, _VECTOR_UNITS_DOUBLED = 64, 128


def _is_for_winograd(trait: Trait) -> bool:
    is_small = trait.window == 9 and trait.stride == 1
    return is_small and not trait.is_grouped and trait.channels >= _WINOGRAD_CHANNELS


def _element_bytes(dtype: str) -> int:
    if dtype.startswith("float8"):
        return 1
    return {"bfloat16": 2, "float16": 2, "float64": 8, "int64": 8}.get(dtype, 4)


# ---- kernels of a step ---------------------------------------------------------------------------


class Priced:
    """The kernels of a step on one GPU: their seconds at any sizes."""

    def __init__(self, units: Sequence[_Unit], prices: Prices) -> None:
        import numpy as np

        self.lanes = [unit.lane for unit in units]
        self._flop_s, self._byte_s, self._start_s, self.host_s = (
            np.array(
                [(unit.flop_s, unit.byte_s, unit.start_s, unit.host_s) for unit in units],
                dtype=np.float64,
            )
            .reshape(-1, 4)
            .T
        )
        self._hidden = 1 - np.array([unit.exposed for unit in units], dtype=np.float64)
        self._places = np.flatnonzero(np.array([unit.is_product for unit in units], dtype=bool))
        self._tiles = _Tiles([units[i] for i in self._places.tolist()], prices.num_sms or 1)

    def parts(self, sizes: Sizes) -> tuple[Seconds, Seconds]:
        """Return the seconds of arithmetic and of memory traffic."""
        arithmetic = sizes.flops * self._flop_s
        if len(self._places):
            arithmetic[self._places] = self._tiles.seconds(
                sizes.products[:, self._places], sizes.flops[self._places]
            )
        return arithmetic, sizes.moved_bytes * self._byte_s

    def seconds(self, sizes: Sizes) -> Seconds:
        """Return the seconds of each kernel."""
        import numpy as np

        arithmetic, traffic = self.parts(sizes)
        hidden = np.minimum(arithmetic, traffic) * self._hidden
        seconds: Seconds = arithmetic + traffic - hidden + self._start_s
        return seconds

    def bounds(self, sizes: Sizes) -> list[Bound]:
        """Return what takes most of each kernel on the GPU."""
        import numpy as np

        arithmetic, traffic = self.parts(sizes)
        names: tuple[Bound, ...] = ("kernel launches", "memory bandwidth", "arithmetic")
        most = np.argmax(np.stack([self._start_s, traffic, arithmetic]), axis=0)
        return [
            "communication" if lane.is_sent else names[place]
            for lane, place in zip(self.lanes, most.tolist(), strict=True)
        ]


class _Tiles:
    """The seconds of products, by the best of the ways to cut them."""

    def __init__(self, units: Sequence[_Unit], num_sms: int) -> None:
        import numpy as np

        self._num_sms = num_sms
        ways = [(*tile, split) for tile in _TILES for split in _SPLITS]
        self._high, self._wide, self._split = (
            column[:, None] for column in np.array(ways, dtype=np.float64).T
        )
        # seconds of one unit of depth of a tile, on one SM
        self._depth_s = np.array(
            [[_depth_s(unit, way[0], way[1], num_sms) for unit in units] for way in ways],
            dtype=np.float64,
        ).reshape(len(ways), len(units))

    def seconds(self, products: Columns, flops: Columns) -> Seconds:
        """Return the seconds of products, of `flops` operations each."""
        import numpy as np

        num, rows, columns, depth = products
        tiles = num * np.ceil(rows / self._high) * np.ceil(columns / self._wide) * self._split
        waves = np.ceil(tiles / self._num_sms)
        of_a_tile = np.ceil(depth / self._split) * self._depth_s + _TILE_S * (self._split > 1)
        seconds: Seconds = (waves * (of_a_tile + _TILE_S)).min(axis=0)
        # gradients of a strided convolution skip what the stride left out
        counted = 2 * num * rows * columns * depth
        ratio = np.divide(flops, counted, out=np.ones_like(flops), where=counted > 0)
        seconds *= np.minimum(ratio, 1)
        return seconds


@functools.cache
def _depth_s(unit: _Unit, high: int, wide: int, num_sms: int) -> float:
    """Return the seconds of one unit of depth of a tile, at what its operands allow."""
    edges = min(high, wide), max(high, wide)
    if unit.on_tensor_cores and edges[0] < _LEAST_TENSOR_EDGE:
        return _LONGEST_S
    if not unit.on_tensor_cores and edges[1] > _MOST_VECTOR_EDGE:
        return _LONGEST_S
    rate = unit.rate / num_sms
    intensity = 2 * high * wide / (unit.operand_bytes * (high + wide))
    best = BEST_INTENSITY * 2 / unit.operand_bytes
    per_byte = OPERAND_RATIO * rate * IDLE_RATIO / SM_BYTES_PER_S
    waiting = (IDLE_RATIO + per_byte / intensity) / (IDLE_RATIO + per_byte / best)
    return 2 * high * wide * waiting / (rate * unit.of_best)
