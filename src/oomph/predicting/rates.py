"""GpuModel -> operations and bytes per second: the best measured ones, or what a sheet promises."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Literal

from oomph.predicting.communication import Link
from oomph.predicting.paces import BEST
from oomph.records.catalog import GpuModel

MatmulPrecision = Literal["fp32", "tf32"]
Kind = Literal["matmul", "convolution", "attention", "other"]

# Best measured matmul / datasheet: 0.73 to 0.87 on the 7 kinds of GPU that the catalogue has
# both of (stas00/ml-engineering, MAMF), the median is this. For GPUs without a measurement.
BEST_OF_SHEET = 0.80
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
# Bytes per second of a lane in one direction, after encoding (PCI-SIG: 8, 16, 32 and 64 GT/s, of
# which 128 of 130 bits are data).
_LANE_BYTES_PER_S = {"3.0": 0.985e9, "4.0": 1.969e9, "5.0": 3.938e9, "6.0": 7.563e9}


def with_measured_rates(
    model: GpuModel, matmul_flops: Mapping[str, float], bandwidth_bytes_per_s: float | None
) -> GpuModel:
    """The GPU with a datasheet that the best rates which were measured on it would be the best of.

    A measured rate is what a large matmul or a copy reaches; paces are ratios of a
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
        changes["memory_bandwidth_bytes_per_s"] = round(bandwidth_bytes_per_s / BEST.bandwidth)
    return replace(model, **changes)  # type: ignore[arg-type] # the fields have several types


def best_rates(model: GpuModel) -> tuple[dict[str, float | None], float | None]:
    """The best matmul by dtype and the best copying that are taken for a GPU, per second."""
    rates = Rates(model, "fp32")
    bandwidth = model.memory_bandwidth_bytes_per_s
    return (
        {dtype: rates.of(dtype, "matmul") for dtype in ("bfloat16", "float16", "float32")},
        bandwidth * BEST.bandwidth if bandwidth else None,
    )


def _best_of_sheet(model: GpuModel) -> float:
    """How much of the datasheet the best matmul reaches, on this GPU or on others."""
    if model.matmul_bf16_flops and model.bf16_flops:
        return model.matmul_bf16_flops / model.bf16_flops
    return BEST_OF_SHEET


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
    def bandwidth_bytes_per_s(self) -> float | None:
        """Of the GPU's own memory, as the sheet has it."""
        return self._model.memory_bandwidth_bytes_per_s

    @property
    def bus_bytes_per_s(self) -> float | None:
        """In one direction; None if the GPU's connection is not known."""
        generation, _, lanes = (self._model.pcie or "").partition(" x")
        per_lane = _LANE_BYTES_PER_S.get(generation)
        return per_lane * int(lanes) if per_lane and lanes.isdecimal() else None

    def of(self, dtype: str, kind: Kind) -> float | None:
        sheet = self._tensor_sheet(dtype, kind)
        best = self._best_of_sheet
        if sheet is None:
            sheet, best = self._vector_sheet(dtype), _BEST_OF_VECTOR_SHEET
        if sheet is None:
            return None
        return sheet if kind == "attention" else sheet * best

    def _tensor_sheet(self, dtype: str, kind: Kind) -> float | None:
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

    def _tf32(self, kind: Kind) -> float | None:
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
