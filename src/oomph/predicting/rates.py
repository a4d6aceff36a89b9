"""GpuModel -> operations and bytes per second; Op -> where it runs, and its seconds.

Rates are measured if known, else from the datasheet. A pace, the achieved fraction of peak, turns
an op's seconds at full rate into real seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from oomph.records.generation import GENERATIONS, generation_of
from oomph.records.gpu_model import GpuModel
from oomph.records.trace import Op
from oomph.records.workload import GPUS_PER_NODE, Variant, casts_parameters, grid_of

# ---- the link between GPUs
# Within one machine of at most eight GPUs: NVLink if the GPU has it, else PCIe. No datasheet
# describes the network between machines, so there is no link for more GPUs. Not modelled: the GPU
# bandwidth that communication takes while it runs beside kernels.

COMMUNICATION = frozenset({"all_gather", "reduce_scatter", "all_reduce"})

# Bytes per second of one lane in one direction, after line coding (PCI-SIG: 8, 16, 32 and 64 GT/s;
# 128 of 130 bits are data). The catalogue has no older generation.
_PCIE_LANE = {"3.0": 985e6, "4.0": 1969e6, "5.0": 3938e6, "6.0": 7563e6}


def pcie_bytes_per_s(model: GpuModel) -> float | None:
    """Return what a GPU's slot carries in one direction by its datasheet; None if unknown."""
    generation, _, lanes = (model.pcie or "").partition(" x")
    per_lane = _PCIE_LANE.get(generation)
    return per_lane * int(lanes) if per_lane and lanes.isdecimal() else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection between the GPUs of one machine."""

    kind: Literal["nvlink", "pcie"]
    bytes_per_s: float  # per GPU, in one direction, from the datasheet


def link_between(model: GpuModel, num_gpus: int) -> Link | None:
    """Return the link that this many of these GPUs use; None if unknown."""
    if num_gpus > GPUS_PER_NODE:
        return None
    if model.nvlink_bytes_per_s is not None:  # the datasheet adds both directions
        return Link(kind="nvlink", bytes_per_s=model.nvlink_bytes_per_s / 2)
    slot_bytes_per_s = pcie_bytes_per_s(model)
    return Link(kind="pcie", bytes_per_s=slot_bytes_per_s) if slot_bytes_per_s else None


def assumptions(how: Variant, model: GpuModel) -> list[str]:
    """Return the assumptions about sharding and links that may differ on the user's machine."""
    if how.num_gpus == 1:
        return []
    return [_put_on(how), *_cast(how), _joined_by(model, how.num_gpus)]


def _put_on(how: Variant) -> str:
    if how.sharding == "ddp":
        return (
            "DDP with gradient_as_bucket_view=True: its default is False, which keeps the gradients"
            " twice (accumulation does so for a while in any case)"
        )
    copies, shards = grid_of(how)
    grid = f"; {copies} copies of the model, each divided among {shards} GPUs" if copies > 1 else ""
    return (
        "FSDP2: fully_shard on each block and on the model, every micro-batch's gradients are"
        f" reduced at once, the model is built on the host or on meta{grid}"
    )


def _cast(how: Variant) -> list[str]:
    policy = "bf16 is FSDP's own MixedPrecisionPolicy (reduced in float32), without autocast"
    return [policy] if casts_parameters(how) else []


def _joined_by(model: GpuModel, num_gpus: int) -> str:
    link = link_between(model, num_gpus)
    if num_gpus > GPUS_PER_NODE:
        return (
            f"{num_gpus} GPUs are several machines, of {GPUS_PER_NODE} GPUs each:"
            " the network between them is unknown, so there is no time estimate"
        )
    if link is None:
        return "the link between these GPUs is unknown, so there is no time estimate"
    name = "NVLink" if link.kind == "nvlink" else f"PCIe {model.pcie}"
    return (
        f"the GPUs are in one machine, joined by {name}"
        f" ({link.bytes_per_s / 1e9:.0f} GB/s in each direction)"
    )


# ---- achieved fraction of peak: likely, best and worst -------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Achieved fraction of peak: ratios of the best measured matmul, or of the datasheet."""

    matmul: float  # of the best measured matmul
    convolution: float  # of the best measured matmul
    attention: float  # fused, of the datasheet
    bandwidth: float  # of the datasheet
    bus: float  # of the bus's peak rate
    host_bytes_per_s: float  # read and written by an optimizer on the host
    kernel_s: float  # minimum time of a kernel on the GPU
    host_s: float  # Python, autograd, dispatcher and launch of one op
    nvlink: float  # of the datasheet, one direction
    pcie: float  # of the datasheet, one direction
    collective_s: float  # minimum time of a collective


# matmul, attention, bandwidth: 0.70 of the A100's datasheet, 0.45 and 0.80 were chosen once,
# untuned, in a study before this module, and gave 7020 tokens/s where torchtune's README has 7075.
# host: between the 5 and 25 us that are reported for torch
# (https://jiahuanglin.xyz/all_lessons/gpu_kernel_serving/18_pytorch_to_kernel.html); the simplest
# op took 7 us on a CPU (https://github.com/pytorch/pytorch/issues/41383). bus: 25 to 26 GB/s of
# 31.5 are common with pinned memory. host bandwidth: between two channels of DDR4 and a server's
# eight, shared with other work. Both are judgement, as are convolution and kernel. nvlink: 230 to
# 250 GB/s of 300 between 8 A100s; pcie: 35 to 45 of 63 between 8 H100s
# (https://docs.alayanew.com/en/docs/tech-blog/2026-05-06-nccl-tests), 28 between 8 RTX 5090s
# (https://github.com/NVIDIA/nccl/issues/1639). collective: 42 us for 8 bytes on PCIe
# (https://github.com/NVIDIA/nccl/issues/1530), less on NVLink: judgement.
LIKELY = Pace(
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
# attention: FlashAttention-2 reaches 50 to 73 % of an A100, its predecessor 25 to 40 %
# (https://arxiv.org/abs/2307.08691). host: as above. All others, here and in WORST: judgement.
BEST = Pace(
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
WORST = Pace(
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


MatmulPrecision = Literal["fp32", "tf32"]
Kind = Literal["matmul", "convolution", "attention", "other"]

# Best measured matmul / datasheet: 0.73 to 0.87 on the 7 kinds of GPU for which the catalogue has
# both (stas00/ml-engineering, MAMF); this is the median. For GPUs without a measurement.
BEST_OF_SHEET = 0.80
# Units without tensor cores are easier to keep busy. Judgement.
_BEST_OF_VECTOR_SHEET = 0.90

# On tensor cores with bf16, tf32 runs at half the rate of fp16, and bf16 at the same rate (every
# GPU of the catalogue that has both figures).
_TF32_OF_FP16 = 0.5


def with_measured_rates(
    model: GpuModel, matmul_flops: Mapping[str, float], bandwidth_bytes_per_s: float | None
) -> GpuModel:
    """Return the GPU with the datasheet that would give the measured rates.

    A measured rate is what a large matmul or a copy reaches. Paces are ratios of a datasheet, so
    the datasheet value is set to the one that gives this rate back.
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
        changes["memory_bandwidth_bytes_per_s"] = round(bandwidth_bytes_per_s / BEST.bandwidth)
    return replace(model, **changes)  # type: ignore[arg-type] # the fields have several types


def best_rates(model: GpuModel) -> tuple[dict[str, float | None], float | None]:
    """Return the best matmul rate by dtype and the best copy rate of a GPU, per second."""
    rates = Rates(model, "fp32")
    bandwidth = model.memory_bandwidth_bytes_per_s
    return (
        {dtype: rates.of(dtype, "matmul") for dtype in ("bfloat16", "float16", "float32")},
        bandwidth * BEST.bandwidth if bandwidth else None,
    )


def _best_of_sheet(model: GpuModel) -> float:
    """Return how much of the datasheet the best matmul reaches, on this GPU or on others."""
    if model.matmul_bf16_flops and model.bf16_flops:
        return model.matmul_bf16_flops / model.bf16_flops
    return BEST_OF_SHEET


class Rates:
    """A GPU's operations per second: best measured, except attention, which uses the datasheet."""

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
        self._generation = None if capability is None else generation_of(capability)
        self._has_tensor_floats = self._generation is not None and self._generation.has_bf16
        self._best_of_sheet = _best_of_sheet(model)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Return the bandwidth of the GPU's own memory, from the datasheet."""
        return self._model.memory_bandwidth_bytes_per_s

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Return the bus rate in one direction; None if the GPU's connection is unknown."""
        return pcie_bytes_per_s(self._model)

    def of(self, dtype: str, kind: Kind) -> float | None:
        sheet = self._tensor_sheet(dtype, kind)
        best = self._best_of_sheet
        if sheet is None:
            sheet, best = self._vector_sheet(dtype), _BEST_OF_VECTOR_SHEET
        if sheet is None:
            return None
        return sheet if kind == "attention" else sheet * best

    def _tensor_sheet(self, dtype: str, kind: Kind) -> float | None:
        """Return the datasheet's tensor core rate; None if tensor cores cannot do this."""
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

    def _tf32(self, kind: Kind) -> float | None:
        """Return the TF32 rate if it is used.

        torch.backends.cudnn.allow_tf32 is on by default, the switch for matmuls is off.
        """
        wanted = kind == "convolution" or (kind == "matmul" and self._matmul_precision == "tf32")
        if not wanted or not self._has_tensor_floats:
            return None
        fp16 = self._model.fp16_flops
        return self._model.tf32_flops or (fp16 * _TF32_OF_FP16 if fp16 else None)

    def _vector_sheet(self, dtype: str) -> float | None:
        fp32 = self._model.fp32_flops
        if fp32 is None or dtype not in ("float64", "complex128"):
            return fp32
        slowest = min(row.fp64_of_fp32 for row in GENERATIONS)
        return fp32 * (self._generation.fp64_of_fp32 if self._generation else slowest)


# ---- one op: GPU, bus, host or link, and its seconds at full rate --------------------------------

Bound = Literal[
    "arithmetic", "memory bandwidth", "kernel launches", "host and bus", "communication"
]
Place = Literal["gpu", "to host", "from host", "host"]
_Role = Literal["kernel", "gather", "reduce", "wait"]

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
class PricedKernel:
    """An op's seconds at full rate, before a pace is applied."""

    kind: Kind = "other"
    arithmetic_s: float = 0.0
    traffic_s: float = 0.0
    runs: bool = True  # False if it starts no kernel
    is_waited_for: bool = False
    place: Place = "gpu"
    moved_bytes: int = 0  # for ops off the GPU
    role: _Role = "kernel"
    link: Link | None = None  # for a collective
    num_pending: int = 0  # for a wait

    @property
    def is_gpus(self) -> bool:
        return self.place == "gpu" and self.role == "kernel"

    def parts_at(self, pace: Pace) -> tuple[float, float]:
        """Return the seconds of its arithmetic and of its memory traffic, for a GPU's kernel."""
        share = pace.matmul if self.kind == "other" else getattr(pace, self.kind)
        return self.arithmetic_s / share, self.traffic_s / pace.bandwidth

    def at(self, pace: Pace) -> tuple[float, Bound]:
        """Return the seconds on the GPU, the link or the host, and what bounds them."""
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
        arithmetic_s, traffic_s = self.parts_at(pace)
        longest = max(arithmetic_s, traffic_s, pace.kernel_s)
        if longest == pace.kernel_s:
            return longest, "kernel launches"
        return longest, "arithmetic" if longest == arithmetic_s else "memory bandwidth"


def kernel_of(op: Op, rates: Rates, bandwidth: float) -> PricedKernel | None:
    place = _PLACES.get(op.name, "gpu")
    if place != "gpu":
        return _off_the_gpu(op, place, rates.bus_bytes_per_s)
    if op.name in COMMUNICATION or op.name == "wait":
        return _beside(op, rates.link)
    kind = _kind_of(op.name)
    rate = rates.of(op.dtype, kind) if op.flops else 1.0
    if rate is None:
        return None
    return PricedKernel(
        kind=kind,
        arithmetic_s=op.flops / rate,
        traffic_s=op.moved_bytes / bandwidth,
        runs=op.name not in _WITHOUT_KERNEL,
        is_waited_for=op.name in WAITED_FOR,
    )


def _off_the_gpu(op: Op, place: Place, bus_bytes_per_s: float | None) -> PricedKernel | None:
    if bus_bytes_per_s is None:
        return None
    traffic_s = op.moved_bytes / bus_bytes_per_s
    return PricedKernel(traffic_s=traffic_s, place=place, moved_bytes=op.moved_bytes)


def _beside(op: Op, link: Link | None) -> PricedKernel | None:
    """Return a collective, which the link runs beside the GPU, or the GPU's wait for one."""
    role: _Role = "gather" if op.name == "all_gather" else "reduce"
    is_wait = op.name == "wait"
    if link is None and not is_wait:
        return None
    return PricedKernel(
        runs=False,
        role="wait" if is_wait else role,
        link=None if is_wait else link,
        moved_bytes=op.moved_bytes,
        num_pending=op.num_pending,
    )


def _kind_of(name: str) -> Kind:
    if name in _MATMULS:
        return "matmul"
    if "attention" in name:
        return "attention"
    return "convolution" if "conv" in name else "other"
