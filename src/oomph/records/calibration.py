"""Calibration: what CUDA takes on one kind of GPU, measured once on the machine that has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

# process: the driver told what the measuring process held.
# difference: it did not; what the whole GPU held before was subtracted.
MeasuredBy = Literal["process", "difference"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """One GPU with one driver and one torch: what holds for others is not known."""

    gpu_name: str  # as the driver names it
    driver_version: str
    torch_version: str
    cuda_version: str  # that torch was built with
    context_bytes: int  # after torch.ones(1, device="cuda"), without what torch reserves
    context_with_libraries_bytes: int  # after a matmul and a convolution, without the same
    total_bytes: int  # of the card, as torch has it
    matmul_flops: Mapping[str, float]  # per second, by dtype; the best that was had
    bandwidth_bytes_per_s: float | None  # read and written, while copying
    measured_by: MeasuredBy
    measured_at: float  # seconds since the epoch

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What a measurement holds for."""
        return (self.gpu_name, self.driver_version, self.torch_version, self.cuda_version)


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumed:
    """What a prediction takes where nobody has measured."""

    gpu: str  # as the catalogue names it
    context_bytes: int
    context_low_bytes: int
    context_high_bytes: int
    total_bytes: int
    total_low_bytes: int
    total_high_bytes: int
    matmul_flops: Mapping[str, float | None]
    bandwidth_bytes_per_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibrated:
    """A measurement beside what it replaces; None where the catalogue does not know the GPU."""

    calibration: Calibration
    assumed: Assumed | None


def from_jsonable(entry: Any) -> Calibration:
    """A calibration as it was stored. Raises ValueError where it cannot be one."""
    names = {field.name for field in fields(Calibration)}
    if not isinstance(entry, dict) or set(entry) != names:
        raise ValueError("an entry has not the fields of a calibration")
    texts = ("gpu_name", "driver_version", "torch_version", "cuda_version")
    sizes = ("context_bytes", "context_with_libraries_bytes", "total_bytes")
    rates = entry["matmul_flops"]
    is_sound = (
        all(isinstance(entry[name], str) for name in texts)
        and all(type(entry[name]) is int and entry[name] > 0 for name in sizes)
        and isinstance(rates, dict)
        and all(_is_rate(rate) for rate in rates.values())
        and (entry["bandwidth_bytes_per_s"] is None or _is_rate(entry["bandwidth_bytes_per_s"]))
        and entry["measured_by"] in ("process", "difference")
        and _is_rate(entry["measured_at"])
    )
    if not is_sound:
        raise ValueError("an entry has figures that cannot be")
    return Calibration(**entry)


def _is_rate(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")
