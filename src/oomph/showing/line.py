"""GpuReading -> the one line that `print_gpu_utilisation` prints."""

from __future__ import annotations

import sys
from dataclasses import replace

from oomph.records.machine import GpuReading, MappedBy
from oomph.showing.safe import printable
from oomph.units import format_bytes, format_ratio

_HOW_MAPPED: dict[MappedBy, str] = {
    "torch": "",  # exact, and the usual case in a training script
    "uuid": "by UUID",
    "pci-order": "by PCI order",
    "cuda": "by CUDA's order",
    "assumed": "assumed",
}


_told: set[str] = set()


def print_utilisation(reading: GpuReading) -> None:
    """Print the line whole in one write, so that the lines of threads do not mix."""
    if reading.problem in _told:
        reading = replace(reading, problem=in_short(reading.problem))
    elif reading.problem:
        _told.add(reading.problem)
    encoding = sys.stdout.encoding or "utf-8"
    line = utilisation_line(reading).encode(encoding, "replace").decode(encoding)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def in_short(problem: str) -> str:
    """What is wrong, without because and try.

    >>> in_short("no NVIDIA driver (it was not found); try: installing it")
    'no NVIDIA driver'
    """
    return problem.partition(" (")[0].partition("; try")[0]


def utilisation_line(reading: GpuReading) -> str:
    """GPU 3 = cuda:0 NVIDIA A100-SXM4-80GB: 61.2 GiB of 79.2 GiB used (77%): this process ..."""
    if reading.nvml_index is None:
        return printable(f"GPU: {reading.problem}")
    problem = f" [{reading.problem}]" if reading.problem else ""
    return printable(f"{_which(reading)}: {_how_full(reading)}; {_how_busy(reading)}{problem}")


def _which(reading: GpuReading) -> str:
    how = _HOW_MAPPED[reading.mapped_by] if reading.mapped_by else ""
    name = reading.name or "unknown model"
    if reading.uuid and reading.uuid.startswith("MIG-"):
        name = f"a MIG slice of {name}"
    return f"GPU {reading.nvml_index} = cuda:{reading.cuda_index}{how and f' ({how})'} {name}"


def _how_full(reading: GpuReading) -> str:
    used, total = reading.used_bytes, reading.total_bytes
    if used is None or not total:
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
    return ", ".join(parts)


def _how_busy(reading: GpuReading) -> str:
    ratio = reading.busy_ratio
    return "kernel-active unknown" if ratio is None else f"kernel-active {format_ratio(ratio)}"


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)
