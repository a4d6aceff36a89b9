"""GpuReading -> the one line that `print_gpu_utilisation` prints."""

from __future__ import annotations

from oomph.records.machine import GpuReading, MappedBy
from oomph.units import GIB, format_bytes, format_ratio

_HOW_MAPPED: dict[MappedBy, str] = {
    "torch": "",  # exact, and the usual case in a training script
    "uuid": "by UUID",
    "pci-order": "by PCI order",
    "cuda": "by CUDA's order",
    "assumed": "assumed",
}


def utilisation_line(reading: GpuReading) -> str:
    """GPU 3 = cuda:0 NVIDIA A100-SXM4-80GB: 61.2 GiB of 79.2 GiB used (77%): this process ..."""
    if reading.nvml_index is None:
        return f"GPU: {reading.problem}"
    problem = f" [{reading.problem}]" if reading.problem else ""
    return f"{_which(reading)}: {_how_full(reading)}; {_how_busy(reading)}{problem}"


def _which(reading: GpuReading) -> str:
    how = _HOW_MAPPED[reading.mapped_by] if reading.mapped_by else ""
    name = reading.name or "unknown model"
    return f"GPU {reading.nvml_index} = cuda:{reading.cuda_index}{how and f' ({how})'} {name}"


def _how_full(reading: GpuReading) -> str:
    used, total = reading.used_bytes, reading.total_bytes
    if used is None or total is None:
        full = f"{_size(used)} of {_size(total)} used"
    else:
        full = f"{_size(used)} of {_size(total)} used ({format_ratio(used / total)})"
    return f"{full}: {_whose(reading)}"


def _whose(reading: GpuReading) -> str:
    this, mine, others = reading.this_process_bytes, reading.mine_bytes, reading.others_bytes
    my_others = None if mine is None or this is None else mine - this
    parts = [
        f"this process {_size(this)}",
        f"my other processes {_size(my_others)}",
        f"others' {_size(others)}",
    ]
    unlisted = _unlisted_bytes(reading)
    if unlisted is not None and unlisted >= GIB:  # a process that we may not see
        parts.append(f"not listed {_size(unlisted)}")
    return ", ".join(parts)


def _unlisted_bytes(reading: GpuReading) -> int | None:
    used, mine, others = reading.used_bytes, reading.mine_bytes, reading.others_bytes
    return None if used is None or mine is None or others is None else used - mine - others


def _how_busy(reading: GpuReading) -> str:
    ratio = reading.busy_ratio
    return "kernel-active unknown" if ratio is None else f"kernel-active {format_ratio(ratio)}"


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)
