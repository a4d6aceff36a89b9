"""The ops of a step, a GpuModel -> the seconds that the step takes.

Each op takes the longest of its arithmetic, its memory traffic and the least that a kernel
takes. The host issues one op after the other, the GPU runs them in that order when they have
been issued, and what joins several GPUs sends beside: three clocks, wound op by op. A step begins
with all idle, as after a loss is read.

Good for comparing ways to train and for the order of magnitude: `low_s` and `high_s` are the
step with all constants at their best and at their worst. A measured step of the same kind makes
it much better: `anchored`. Limits: eager mode, GPUs of one machine. Not modelled are matmuls too
small to fill the GPU, caches, copies of the batch and data loading. What is offloaded goes over
the bus, a clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oomph.errors import UsageError
from oomph.predicting.communication import COMMUNICATION, Link, LinkClock, link_between
from oomph.predicting.micro_steps import second_micro_step
from oomph.records.catalog import GpuModel
from oomph.records.trace import Op

Bound = Literal[
    "arithmetic", "memory bandwidth", "kernel launches", "host and bus", "communication"
]
_Place = Literal["gpu", "to host", "from host", "host"]
MatmulPrecision = Literal["fp32", "tf32"]
_Kind = Literal["matmul", "convolution", "attention", "other"]
_Role = Literal["kernel", "gather", "reduce", "wait"]

# Best measured matmul / datasheet: 0.73 to 0.87 on the 7 kinds of GPU that the catalogue has
# both of (stas00/ml-engineering, MAMF), the median is this. For GPUs without a measurement.
_BEST_OF_SHEET = 0.80
# Units without tensor cores are easier to keep busy. Judgement.
_BEST_OF_VECTOR_SHEET = 0.90

# Tensor cores of compute capability 8 and later: tf32 runs at half the rate of fp16, and bf16 at
# the same (every GPU of the catalogue that has both figures).
_TENSOR_FLOAT_SINCE = (8, 0)
_TF32_OF_FP16 = 0.5
# CUDA programming guide, arithmetic throughput: fp64 runs at half the rate of fp32 on these, and
# at 1/32 or 1/64 on the others.
_FAST_FP64 = frozenset({(6, 0), (7, 0), (8, 0), (9, 0), (10, 0)})
_FAST_FP64_OF_FP32, _SLOW_FP64_OF_FP32 = 1 / 2, 1 / 64


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pace:
    """How much of what the hardware can do is had. Ratios of the best matmul, or of the sheet."""

    matmul: float  # of the best measured matmul
    convolution: float  # of the same
    attention: float  # fused, of the datasheet
    bandwidth: float  # of the datasheet
    bus: float  # of what the bus can carry
    host_bytes_per_s: float  # that an optimizer on the host reads and writes
    kernel_s: float  # the least that a kernel takes on the GPU
    host_s: float  # Python, autograd, dispatcher and launch of one op
    nvlink: float  # of the datasheet, one direction
    pcie: float  # of the same
    collective_s: float  # the least that a collective takes


# matmul, attention, bandwidth: 0.70 of the A100's sheet, 0.45 and 0.80 were chosen once, untuned,
# in a study before this module, and gave 7020 tokens/s where torchtune's README has 7075.
# host: between the 5 and 25 us that are told of torch
# (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html); the
# simplest op took 7 us on a CPU (https://github.com/pytorch/pytorch/issues/41383).
# bus: 25 to 26 GB/s of 31.5 are commonly seen with pinned memory. host bandwidth: between two
# channels of DDR4 and a server's eight, of which an optimizer has a part. Both judgement, as are
# convolution and kernel.
# nvlink: 230 to 250 GB/s of 300 between 8 A100s; pcie: 35 to 45 of 63 between 8 H100s
# (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 28 between 8 RTX 5090s
# (https://github.com/NVIDIA/nccl/issues/1639). collective: 42 us for 8 bytes on PCIe
# (https://github.com/NVIDIA/nccl/issues/1530), less on NVLink: judgement.
LIKELY = _Pace(
    matmul=0.80,
    convolution=0.60,
    attention=0.45,
    bandwidth=0.80,
    bus=0.80,
    host_bytes_per_s=50e9,
    kernel_s=3e-6,
    host_s=10e-6,
    nvlink=0.78,
    pcie=0.50,
    collective_s=30e-6,
)
# attention: FlashAttention-2 reaches 50 to 73 % of an A100, its forerunner 25 to 40 %
# (https://arxiv.org/abs/2307.08691). host: as above. All others: judgement.
_BEST = _Pace(
    matmul=0.95,
    convolution=0.85,
    attention=0.70,
    bandwidth=0.92,
    bus=0.85,
    host_bytes_per_s=200e9,
    kernel_s=1.5e-6,
    host_s=5e-6,
    nvlink=0.95,
    pcie=0.75,
    collective_s=10e-6,
)
_WORST = _Pace(
    matmul=0.55,
    convolution=0.30,
    attention=0.25,
    bandwidth=0.60,
    bus=0.40,
    host_bytes_per_s=15e9,
    kernel_s=6e-6,
    host_s=25e-6,
    nvlink=0.50,
    pcie=0.20,
    collective_s=60e-6,
)

# The same study: ratios between steps of one model were off by 7 % in the mean and by 11 % at
# worst, but by up to 50 % where one of the two is bound by launches.
_ANCHORED_RATIO = 0.11

_MATMULS = frozenset(
    {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "linear"}
    | {"_scaled_mm", "_grouped_mm"}
)
# Nothing of these runs on the GPU: they make a tensor, or another view of one.
_WITHOUT_KERNEL = frozenset(
    {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}
    | {"_unsafe_view", "lift_fresh"}
)
# The host waits for the result of these.
WAITED_FOR = frozenset({"_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero"})


# What leaves the GPU: where each of these ops runs.
_PLACES: Mapping[str, _Place] = {
    "copy_to_host": "to host",
    "copy_from_host": "from host",
    "on_host": "host",
}
BUS = ("copy_to_host", "copy_from_host")
# Bytes per second of a lane in one direction, after encoding (PCI-SIG: 8, 16, 32 and 64 GT/s, of
# which 128 of 130 bits are data).
_LANE_BYTES_PER_S = {"3.0": 0.985e9, "4.0": 1.969e9, "5.0": 3.938e9, "6.0": 7.563e9}
# Tensors that wait on the GPU for their copy: training/offload_activations.py keeps so many.
_NUM_WAITING = 5

_TRACED_MICRO_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a training step takes, and why."""

    step_s: float
    gpu_busy_s: float
    host_s: float  # what the host needs to issue all ops
    by_phase: Mapping[str, float]  # seconds; together they are step_s
    flops: int
    bound_by: Bound  # what most of the step is spent on
    low_s: float
    high_s: float
    communication_s: float = 0.0  # all that is sent and received
    waited_s: float = 0.0  # of it, what no kernel hides


def estimate(
    ops: Sequence[Op],
    model: GpuModel,
    *,
    matmul_precision: MatmulPrecision = "fp32",
    num_gpus: int = 1,
) -> StepTime | None:
    """The time of a step with these ops; None if a rate is needed that nobody knows."""
    issued = _issued_on(ops, model, matmul_precision, num_gpus)
    if issued is None:
        return None
    likely = _wind(issued, LIKELY)
    return StepTime(
        step_s=likely.step_s,
        gpu_busy_s=sum(likely.busy_s.values()) - likely.exposed_s,
        host_s=len(ops) * LIKELY.host_s,
        by_phase=likely.by_phase,
        flops=sum(op.flops for op in ops),
        bound_by=_bound_by(likely),
        low_s=_wind(issued, _BEST).step_s,
        high_s=_wind(issued, _WORST).step_s,
        communication_s=likely.communication_s,
        waited_s=likely.exposed_s,
    )


def likely_seconds(
    ops: Sequence[Op], model: GpuModel, matmul_precision: MatmulPrecision, num_gpus: int
) -> float | None:
    """The time alone, as `estimate` has it."""
    issued = _issued_on(ops, model, matmul_precision, num_gpus)
    return None if issued is None else _wind(issued, LIKELY).step_s


def _issued_on(
    ops: Sequence[Op], model: GpuModel, matmul_precision: MatmulPrecision, num_gpus: int
) -> _Issued | None:
    bandwidth = model.memory_bandwidth_bytes_per_s
    link = link_between(model, num_gpus)
    if not ops or not bandwidth or (num_gpus > 1 and link is None):
        return None
    return _issued(ops, Rates(model, matmul_precision, link), bandwidth)


def with_micro_steps(ops: Sequence[Op], num_micro_steps: int) -> list[Op]:
    """The ops of a step that accumulates over more micro-steps than the two that were traced."""
    if num_micro_steps <= _TRACED_MICRO_STEPS:
        return list(ops)
    second = second_micro_step([op.phase for op in ops])
    repeated = ops[second.start : second.stop]
    if not any(op.name in COMMUNICATION for op in ops[: second.start]):
        # Gradients are sent after the last micro-step only: DDP's no_sync.
        repeated = [op for op in repeated if op.name not in COMMUNICATION and op.name != "wait"]
    more = [*repeated] * (num_micro_steps - _TRACED_MICRO_STEPS)
    return [*ops[: second.stop], *more, *ops[second.stop :]]


def is_beside_the_gpu(name: str) -> bool:
    """Whether an op is not the GPU's, but of the bus, the host or the link between GPUs."""
    return name in _PLACES or name in COMMUNICATION or name == "wait"


def anchored(predicted: StepTime, reference: StepTime, measured_s: float) -> StepTime:
    """A prediction, scaled by what a step of the same kind, predicted the same way, really took.

    The same kind: the same model, GPU and software, and bound by the same. Where another thing
    decides, the bounds stay as wide as they were.
    """
    if not measured_s > 0 or not reference.step_s > 0:
        raise UsageError(
            "a step cannot be held to one that took no time",
            because=f"measured {measured_s} s, predicted {reference.step_s} s",
            attempt="measuring the mean of some steps after the first",
        )
    factor = measured_s / reference.step_s
    step_s = predicted.step_s * factor
    low_s, high_s = step_s * (1 - _ANCHORED_RATIO), step_s * (1 + _ANCHORED_RATIO)
    if predicted.bound_by != reference.bound_by:
        low_s, high_s = min(low_s, predicted.low_s), max(high_s, predicted.high_s)
    return replace(
        predicted,
        step_s=step_s,
        gpu_busy_s=predicted.gpu_busy_s * factor,
        host_s=predicted.host_s * factor,
        by_phase={phase: seconds * factor for phase, seconds in predicted.by_phase.items()},
        low_s=low_s,
        high_s=high_s,
        communication_s=predicted.communication_s * factor,
        waited_s=predicted.waited_s * factor,
    )


def with_measured_rates(
    model: GpuModel, matmul_flops: Mapping[str, float], bandwidth_bytes_per_s: float | None
) -> GpuModel:
    """The GPU with a datasheet that the best rates which were measured on it would be the best of.

    A measured rate is what a large matmul or a copy reaches; the paces above are ratios of a
    datasheet, so it is put in as the sheet that gives this rate back.
    """
    changes: dict[str, float | int | None] = {}
    bfloat16, float16 = matmul_flops.get("bfloat16"), matmul_flops.get("float16")
    best_of_sheet = _best_of_sheet(model)
    if bfloat16 and model.bf16_flops:
        changes["matmul_bf16_flops"] = bfloat16
        best_of_sheet = bfloat16 / model.bf16_flops
    if float16:
        changes["fp16_flops"] = float16 / best_of_sheet
    if matmul_flops.get("float32"):
        changes["fp32_flops"] = matmul_flops["float32"] / _BEST_OF_VECTOR_SHEET
    if bandwidth_bytes_per_s:
        changes["memory_bandwidth_bytes_per_s"] = round(bandwidth_bytes_per_s / _BEST.bandwidth)
    return replace(model, **changes)  # type: ignore[arg-type] # the fields have several types


def best_rates(model: GpuModel) -> tuple[dict[str, float | None], float | None]:
    """The best matmul by dtype and the best copying that are taken for a GPU, per second."""
    rates = Rates(model, "fp32")
    bandwidth = model.memory_bandwidth_bytes_per_s
    return (
        {dtype: rates.of(dtype, "matmul") for dtype in ("bfloat16", "float16", "float32")},
        bandwidth * _BEST.bandwidth if bandwidth else None,
    )


# ---- the three clocks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """The ops of a step as numbers of kernels: a step has many ops and few different ones."""

    kernels: Sequence[_Kernel]
    runs: Sequence[tuple[str, Sequence[int]]]  # ops of one phase that follow each other


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wound:
    step_s: float
    busy_s: Mapping[Bound, float]
    by_phase: Mapping[str, float]
    waited_s: float  # by the GPU, for the bus and for the host's own work
    communication_s: float  # of the link
    exposed_s: float  # of it, what the GPU waited for


class _Bus:
    """The clock of the copies between GPU and host, and of the host's work on what was copied."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited_s = 0.0
        self._copied: list[float] = []  # when each copy to the host ends

    def run(self, place: _Place, seconds: float, host: float, gpu: float) -> tuple[float, float]:
        """The clocks of host and GPU after something that is not the GPU's work."""
        if place == "host":
            return max(host, self.now) + seconds, gpu
        if place == "to host":
            self.now = max(self.now, gpu) + seconds
            self._copied.append(self.now)
            if len(self._copied) > _NUM_WAITING:  # its memory is given back before more is taken
                host = max(host, self._copied[-1 - _NUM_WAITING])
            return host, gpu
        self.now = max(self.now, host) + seconds
        self.waited_s += max(self.now - gpu, 0.0)
        return host, max(gpu, self.now)


def _wind(issued: _Issued, pace: _Pace) -> _Wound:
    times = [kernel.at(pace) for kernel in issued.kernels]
    seconds = [time_s for time_s, _ in times]
    waits = [kernel.is_waited_for for kernel in issued.kernels]
    is_gpus = [kernel.is_gpus for kernel in issued.kernels]
    bus, link = _Bus(), LinkClock()
    by_phase: dict[str, float] = {}
    host = gpu = 0.0  # seconds since the step began; the GPU's clock is never behind the host's
    for phase, numbers in issued.runs:
        began = gpu
        for number in numbers:
            if not is_gpus[number]:
                kernel = issued.kernels[number]
                host, gpu = _beside_the_gpu(kernel, seconds[number], pace, bus, link, (host, gpu))
                continue
            host += pace.host_s
            if gpu < host:
                gpu = host
            gpu += seconds[number]
            if waits[number]:
                host = gpu
        by_phase[phase] = by_phase.get(phase, 0.0) + gpu - began
    if issued.runs and bus.now > gpu:  # the last copies
        by_phase[issued.runs[-1][0]] += bus.now - gpu
        bus.waited_s += bus.now - gpu
        gpu = bus.now
    return _Wound(
        step_s=gpu,
        busy_s=_busy(issued, times, link),
        by_phase=by_phase,
        waited_s=bus.waited_s,
        communication_s=link.busy_s,
        exposed_s=link.waited_s,
    )


def _beside_the_gpu(
    kernel: _Kernel,
    seconds: float,
    pace: _Pace,
    bus: _Bus,
    link: LinkClock,
    clocks: tuple[float, float],
) -> tuple[float, float]:
    """The clocks of host and GPU after what the bus, the host or the link does."""
    host, gpu = clocks
    if kernel.role == "wait":
        return host, link.wait(kernel.num_pending, gpu)
    if kernel.role != "kernel":
        link.begin(seconds, host, None if kernel.role == "gather" else gpu)
        return host, gpu
    return bus.run(kernel.place, seconds, host + pace.host_s, gpu)


def _busy(
    issued: _Issued, times: Sequence[tuple[float, Bound]], link: LinkClock
) -> dict[Bound, float]:
    """The GPU's seconds by what decides them."""
    busy: dict[Bound, float] = {}
    for number, count in Counter(n for _, numbers in issued.runs for n in numbers).items():
        if issued.kernels[number].is_gpus:
            time_s, bound = times[number]
            busy[bound] = busy.get(bound, 0.0) + time_s * count
    if link.busy_s:
        busy["communication"] = link.waited_s
    return busy


def _bound_by(wound: _Wound) -> Bound:
    """What takes most of the step; a GPU that waits, waits for launches."""
    idle_s = wound.step_s - sum(wound.busy_s.values()) - wound.waited_s
    shares = {**wound.busy_s, "host and bus": wound.waited_s}
    shares["kernel launches"] = shares.get("kernel launches", 0.0) + idle_s
    return max(shares, key=lambda bound: shares[bound])


# ---- what an op is ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """What an op is to the GPU: the seconds at full rate, before a pace is applied."""

    kind: _Kind
    arithmetic_s: float
    traffic_s: float
    runs: bool  # False: the GPU has nothing to do
    is_waited_for: bool
    place: _Place = "gpu"
    moved_bytes: int = 0  # of what is not the GPU's
    role: _Role = "kernel"
    link: Link | None = None  # of a collective
    num_pending: int = 0  # of a wait

    @property
    def is_gpus(self) -> bool:
        return self.place == "gpu" and self.role == "kernel"

    def unit_seconds(self, pace: _Pace) -> tuple[float, float]:
        """Of one operation and of one byte, for a kernel that was priced with one of each."""
        share = pace.matmul if self.kind == "other" else getattr(pace, self.kind)
        return self.arithmetic_s / share, self.traffic_s / pace.bandwidth

    def at(self, pace: _Pace) -> tuple[float, Bound]:
        """Seconds on the GPU, on the link or on the host, and what decides them."""
        if self.link is not None:
            share = pace.nvlink if self.link.kind == "nvlink" else pace.pcie
            sending_s = self.moved_bytes / (self.link.bytes_per_s * share)
            return pace.collective_s + sending_s, "communication"
        if self.place == "host":
            return self.moved_bytes / pace.host_bytes_per_s, "host and bus"
        if self.place != "gpu":
            return self.traffic_s / pace.bus, "host and bus"
        if not self.runs:
            return 0.0, "kernel launches"
        share = pace.matmul if self.kind == "other" else getattr(pace, self.kind)
        arithmetic_s = self.arithmetic_s / share
        traffic_s = self.traffic_s / pace.bandwidth
        longest = max(arithmetic_s, traffic_s, pace.kernel_s)
        if longest == pace.kernel_s:
            return longest, "kernel launches"
        return longest, "arithmetic" if longest == arithmetic_s else "memory bandwidth"


def _issued(ops: Sequence[Op], rates: Rates, bandwidth: float) -> _Issued | None:
    """None if an op computes at a rate that nobody knows."""
    numbers: dict[tuple[str, str, int, int, int], int] = {}
    kernels: list[_Kernel] = []
    runs: list[tuple[str, list[int]]] = []
    for op in ops:
        key = (op.name, op.dtype, op.flops, op.moved_bytes, op.num_pending)
        number = numbers.get(key)
        if number is None:
            kernel = kernel_of(op, rates, bandwidth)
            if kernel is None:
                return None
            number = numbers[key] = len(kernels)
            kernels.append(kernel)
        if not runs or runs[-1][0] != op.phase:
            runs.append((op.phase, []))
        runs[-1][1].append(number)
    return _Issued(kernels=kernels, runs=runs)


def kernel_of(op: Op, rates: Rates, bandwidth: float) -> _Kernel | None:
    place = _PLACES.get(op.name, "gpu")
    if place != "gpu":
        return _off_the_gpu(op, place, rates.bus_bytes_per_s)
    if op.name in COMMUNICATION or op.name == "wait":
        return _beside(op, rates.link)
    kind = _kind_of(op.name)
    rate = rates.of(op.dtype, kind) if op.flops else 1.0
    if rate is None:
        return None
    return _Kernel(
        kind=kind,
        arithmetic_s=op.flops / rate,
        traffic_s=op.moved_bytes / bandwidth,
        runs=op.name not in _WITHOUT_KERNEL,
        is_waited_for=op.name in WAITED_FOR,
    )


def _off_the_gpu(op: Op, place: _Place, bus_bytes_per_s: float | None) -> _Kernel | None:
    if bus_bytes_per_s is None:
        return None
    return _Kernel(
        kind="other",
        arithmetic_s=0.0,
        traffic_s=op.moved_bytes / bus_bytes_per_s,
        runs=True,
        is_waited_for=False,
        place=place,
        moved_bytes=op.moved_bytes,
    )


def _beside(op: Op, link: Link | None) -> _Kernel | None:
    """A collective, which the link does beside the GPU, or the GPU's waiting for one."""
    role: _Role = "gather" if op.name == "all_gather" else "reduce"
    is_wait = op.name == "wait"
    if link is None and not is_wait:
        return None
    return _Kernel(
        kind="other",
        arithmetic_s=0.0,
        traffic_s=0.0,
        runs=False,
        is_waited_for=False,
        role="wait" if is_wait else role,
        link=None if is_wait else link,
        moved_bytes=op.moved_bytes,
        num_pending=op.num_pending,
    )


def _kind_of(name: str) -> _Kind:
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "other"


# ---- rates -----------------------------------------------------------------------------------


def _best_of_sheet(model: GpuModel) -> float:
    """How much of the datasheet the best matmul reaches, on this GPU or on others."""
    if model.matmul_bf16_flops and model.bf16_flops:
        return model.matmul_bf16_flops / model.bf16_flops
    return _BEST_OF_SHEET


class Rates:
    """Operations per second of a GPU: the best measured ones, of attention those of the sheet."""

    def __init__(
        self,
        model: GpuModel,
        matmul_precision: MatmulPrecision,
        link: Link | None = None,
    ) -> None:
        self._model = model
        self.link = link
        self._matmul_precision = matmul_precision
        capability = model.compute_capability
        self._has_tensor_floats = capability is not None and capability >= _TENSOR_FLOAT_SINCE
        self._best_of_sheet = _best_of_sheet(model)

    @property
    def bus_bytes_per_s(self) -> float | None:
        """In one direction; None if the GPU's connection is not known."""
        generation, _, lanes = (self._model.pcie or "").partition(" x")
        per_lane = _LANE_BYTES_PER_S.get(generation)
        return per_lane * int(lanes) if per_lane and lanes.isdecimal() else None

    def of(self, dtype: str, kind: _Kind) -> float | None:
        sheet = self._tensor_sheet(dtype, kind)
        best = self._best_of_sheet
        if sheet is None:
            sheet, best = self._vector_sheet(dtype), _BEST_OF_VECTOR_SHEET
        if sheet is None:
            return None
        return sheet if kind == "attention" else sheet * best

    def _tensor_sheet(self, dtype: str, kind: _Kind) -> float | None:
        """None if tensor cores do not do this, or are not there."""
        if kind == "other":
            return None
        if dtype == "float32":
            return self._tf32(kind)
        if dtype == "bfloat16":
            fp16 = self._model.fp16_flops if self._has_tensor_floats else None
            return self._model.bf16_flops or fp16
        if dtype == "float16" or dtype.startswith("float8"):  # float8 is at least as fast
            return self._model.fp16_flops
        return None

    def _tf32(self, kind: _Kind) -> float | None:
        """torch.backends.cudnn.allow_tf32 is on as delivered, that of matmuls is off."""
        wanted = kind == "convolution" or (kind == "matmul" and self._matmul_precision == "tf32")
        if not wanted or not self._has_tensor_floats:
            return None
        fp16 = self._model.fp16_flops
        return self._model.tf32_flops or (fp16 * _TF32_OF_FP16 if fp16 else None)

    def _vector_sheet(self, dtype: str) -> float | None:
        fp32 = self._model.fp32_flops
        if fp32 is None or dtype not in ("float64", "complex128"):
            return fp32
        is_fast = self._model.compute_capability in _FAST_FP64
        return fp32 * (_FAST_FP64_OF_FP32 if is_fast else _SLOW_FP64_OF_FP32)
