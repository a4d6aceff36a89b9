"""GpuModel -> operations and bytes per second, of its units, its memory, its bus and its links.

Rates are measured if known, else what the best kernel reaches of the datasheet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from oomph.predicting.links import NO_LINKS, Links, pcie_bytes_per_s
from oomph.records.generation import GENERATIONS, generation_of
from oomph.records.gpu_model import GpuModel

# ---- operations and bytes per second -------------------------------------------------------------

MatmulPrecision = Literal["fp32", "tf32"]
Kind = Literal["matmul", "convolution", "attention", "other"]

# Best measured matmul / datasheet. Each SM gets operands from the L2 cache at about 64 bytes a
# cycle (NVIDIA's A100 white paper: 5120 bytes a cycle for all). The more operations an SM does in
# the time of an operand, the more it waits for operands: 1 / ratio = 1.09 + 0.174 x (operations
# per second of one SM / operations per byte of its tile / 0.1e12 bytes per second).
# The two constants are those of stas00/ml-engineering, MAMF: A100 SXM 0.869, H100 SXM 0.803. They
# give 0.77 for a B200, which reaches 0.776.
SM_BYTES_PER_S = 0.1e12
IDLE_RATIO, OPERAND_RATIO = 1.09, 0.174
# The operations per byte of two-byte operands in the largest tiles, 256 x 128; since compute
# capability 10 two SMs share one of 256 x 256 (CUTLASS, "Blackwell SM100 GEMMs").
BEST_INTENSITY = 256 * 128 / (256 + 128)
_PAIRED_INTENSITY = 256 * 256 / (256 + 256)
_PAIRED_SINCE = 10
_MOST_WAITING_RATIO = 0.4  # beyond all GPUs of the catalogue: the line is not known there
# For a GPU whose number of SMs is unknown: the median of the 7 kinds of GPU of the catalogue that
# have a measured matmul.
BEST_OF_SHEET = 0.80
# fp32 on the units without tensor cores. Since compute capability 8.6 an SM has twice the units
# with the same registers and shared memory, so large products reach less of the sheet. Judgement.
_BEST_OF_VECTOR_SHEET = 0.92
_BEST_OF_DOUBLED_VECTOR_SHEET = 0.75
_DOUBLED_VECTOR_SINCE = (8, 6)
# GeForce datasheets give a boost clock that the cards exceed under load, by 8 to 17 % in reviews of
# an RTX 4090, an RTX 3090 and an RTX 2080 Ti. Other cards stay at theirs or below. Judgement.
_GEFORCE_CLOCK_RATIO = 1.10
# A copy of large tensors, of the datasheet: the best BabelStream figures are 0.84 (A100 SXM 80GB)
# to 0.92 (RTX 4090), see docs/predicting.md.
BEST_COPY = 0.92

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
    if bfloat16 and model.bf16_flops:
        changes["matmul_bf16_flops"] = bfloat16
    if float16:
        changes["fp16_flops"] = _fp16_sheet(model, bfloat16, float16)
    if matmul_flops.get("float32"):
        changes["fp32_flops"] = matmul_flops["float32"] / _best_of_vector_sheet(model)
    if bandwidth_bytes_per_s:
        changes["memory_bandwidth_bytes_per_s"] = round(bandwidth_bytes_per_s / BEST_COPY)
    return replace(model, **changes)  # type: ignore[arg-type] # the fields have several types


def _fp16_sheet(model: GpuModel, bfloat16: float | None, float16: float) -> float:
    """Return the datasheet of fp16 that gives a measured rate, beside a measured bf16."""
    if model.bf16_flops:  # whose share of the datasheet is fp16's as well
        of_sheet = bfloat16 / model.bf16_flops if bfloat16 else _best_of_sheet(model)
        return float16 / of_sheet
    return _sheet_for(model, float16)


def best_rates(model: GpuModel) -> tuple[dict[str, float | None], float | None]:
    """Return the best matmul rate by dtype and the best copy rate of a GPU, per second."""
    rates = Rates(model, "fp32")
    bandwidth = model.memory_bandwidth_bytes_per_s
    return (
        {dtype: rates.of(dtype, "matmul") for dtype in ("bfloat16", "float16", "float32")},
        bandwidth * BEST_COPY if bandwidth else None,
    )


def _best_of_sheet(model: GpuModel) -> float:
    """Return how much of the datasheet the best matmul reaches, measured or by its SMs' rate."""
    if model.matmul_bf16_flops and model.bf16_flops:
        return model.matmul_bf16_flops / model.bf16_flops
    sheet, per_flop = model.bf16_flops or model.fp16_flops, _waiting_per_flop(model)
    if not sheet or per_flop is None:
        return BEST_OF_SHEET
    return _clock_ratio(model) / (IDLE_RATIO + min(per_flop * sheet, _MOST_WAITING_RATIO))


def _sheet_for(model: GpuModel, best_flops: float) -> float:
    """Return the datasheet whose best matmul is this one."""
    per_flop = _waiting_per_flop(model)
    if per_flop is None:
        return best_flops / BEST_OF_SHEET
    best_flops /= _clock_ratio(model)
    most = best_flops * (IDLE_RATIO + _MOST_WAITING_RATIO)
    if per_flop * most >= _MOST_WAITING_RATIO:
        return most
    return IDLE_RATIO * best_flops / (1 - per_flop * best_flops)


def _waiting_per_flop(model: GpuModel) -> float | None:
    """Return how much longer operands make a matmul, by the datasheet; None without SMs."""
    if not model.num_sms:
        return None
    is_paired = (model.compute_capability or (0, 0))[0] == _PAIRED_SINCE
    intensity = _PAIRED_INTENSITY if is_paired else BEST_INTENSITY
    return OPERAND_RATIO / model.num_sms / intensity / SM_BYTES_PER_S


def _best_of_vector_sheet(model: GpuModel) -> float:
    is_doubled = (model.compute_capability or (0, 0)) >= _DOUBLED_VECTOR_SINCE
    of_sheet = _BEST_OF_DOUBLED_VECTOR_SHEET if is_doubled else _BEST_OF_VECTOR_SHEET
    return of_sheet * _clock_ratio(model)


def _clock_ratio(model: GpuModel) -> float:
    """Return the clock under load, of the datasheet's."""
    return _GEFORCE_CLOCK_RATIO if model.is_geforce_desktop else 1.0


class Rates:
    """A GPU's operations and bytes per second: what the best kernel reaches."""

    def __init__(
        self,
        model: GpuModel,
        matmul_precision: MatmulPrecision,
        links: Links = NO_LINKS,
    ) -> None:
        self._model = model
        self.links = links
        self._matmul_precision = matmul_precision
        capability = model.compute_capability
        self._generation = None if capability is None else generation_of(capability)
        self._has_tensor_floats = self._generation is not None and self._generation.has_bf16
        self._best_of_sheet = _best_of_sheet(model)
        self._best_of_vector_sheet = _best_of_vector_sheet(model)

    @property
    def bandwidth_bytes_per_s(self) -> float | None:
        """Return the bandwidth of the GPU's own memory, from the datasheet."""
        return self._model.memory_bandwidth_bytes_per_s

    @property
    def bus_bytes_per_s(self) -> float | None:
        """Return the bus rate in one direction; None if the GPU's connection is unknown."""
        return pcie_bytes_per_s(self._model)

    def of(self, dtype: str, kind: Kind) -> float | None:
        """Return the best rate of a kind of kernel; None if it is unknown."""
        tensor = self.of_tensor_cores(dtype, kind)
        return self.of_vector_units(dtype) if tensor is None else tensor

    def of_tensor_cores(self, dtype: str, kind: Kind) -> float | None:
        """Return the best rate of tensor cores; None if they cannot do this."""
        sheet = self._tensor_sheet(dtype, kind)
        return None if sheet is None else sheet * self._best_of_sheet

    def of_vector_units(self, dtype: str) -> float | None:
        """Return the best rate without tensor cores."""
        sheet = self._vector_sheet(dtype)
        return None if sheet is None else sheet * self._best_of_vector_sheet

    @property
    def fp32_flops(self) -> float | None:
        """Return the datasheet's fp32 rate, without tensor cores."""
        return self._model.fp32_flops

    @property
    def num_sms(self) -> int | None:
        return self._model.num_sms

    @property
    def threads_per_sm(self) -> int:
        """Return how many threads an SM holds; the usual number if the generation is unknown."""
        return 2048 if self._generation is None else self._generation.threads_per_sm

    @property
    def host_speed(self) -> float:
        """Return how fast the host beside this GPU is, of the one beside an A100."""
        return 1.0 if self._generation is None else self._generation.host_speed

    @property
    def capability(self) -> tuple[int, int]:
        """Return the compute capability; (0, 0) if unknown."""
        return self._model.compute_capability or (0, 0)

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
