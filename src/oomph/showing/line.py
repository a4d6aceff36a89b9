"""GpuReading -> the line of `print_gpu_utilisation`; Pace -> the line after an epoch."""

from __future__ import annotations

import sys
from dataclasses import replace

from oomph.records.machine import GpuReading, MappedBy
from oomph.records.run import Pace
from oomph.showing.terminal import printable
from oomph.units import format_bytes, format_rate, format_ratio, format_time

_HOW_MAPPED: dict[MappedBy, str] = {
    "torch": "",  # exact, and the usual case in a training script
    "uuid": "by UUID",
    "pci-order": "by PCI order",
    "cuda": "by CUDA's order",
    "assumed": "assumed",
}


_shown_problems: set[str] = set()


def print_utilisation(reading: GpuReading) -> None:
    """Print the line; a problem with its cause and advice only once."""
    if reading.problem in _shown_problems:
        reading = replace(reading, problem=in_short(reading.problem))
    elif reading.problem:
        _shown_problems.add(reading.problem)
    _write(utilisation_line(reading))


def _write(line: str) -> None:
    """Write in one call, so that lines of several threads do not mix."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(f"{line.encode(encoding, 'replace').decode(encoding)}\n")
    sys.stdout.flush()


def in_short(problem: str) -> str:
    """Return what is wrong, without the cause and the advice.

    >>> in_short("no NVIDIA driver (it was not found); try: installing it")
    'no NVIDIA driver'
    """
    return problem.partition(" (")[0].partition("; try")[0]


def utilisation_line(reading: GpuReading) -> str:
    """Return "GPU 3 = cuda:0 NVIDIA A100-SXM4-80GB: 61.2 GiB of 79.2 GiB used (77%): this ..."."""
    if reading.nvml_index is None:
        return printable(f"GPU: {reading.problem}")
    problem = f" [{reading.problem}]" if reading.problem else ""
    busy = f"kernel-active {_ratio(reading.busy_ratio)}"
    return printable(f"{_which(reading)}: {_how_full(reading)}; {busy}{problem}")


def _which(reading: GpuReading) -> str:
    mapping = _HOW_MAPPED[reading.mapped_by] if reading.mapped_by else ""
    name = reading.name or "unknown model"
    if reading.uuid and reading.uuid.startswith("MIG-"):
        name = f"a MIG slice of {name}"
    return (
        f"GPU {reading.nvml_index} = cuda:{reading.cuda_index}{mapping and f' ({mapping})'} {name}"
    )


def _how_full(reading: GpuReading) -> str:
    used, total = reading.used_bytes, reading.total_bytes
    share = "" if used is None or not total else f" ({format_ratio(used / total)})"
    this, mine = reading.this_process_bytes, reading.mine_bytes
    my_others = None if mine is None or this is None else mine - this
    return (
        f"{_size(used)} of {_size(total)} used{share}: this process {_size(this)}, my other"
        f" processes {_size(my_others)}, others' {_size(reading.others_bytes)}"
    )


def _ratio(ratio: float | None) -> str:
    return "unknown" if ratio is None else format_ratio(ratio)


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)


# ---- the line at the end of an epoch -------------------------------------------------------------


def print_pace(name: str, pace: Pace) -> None:
    """Print the line after an epoch."""
    _write(pace_line(name, pace))


def pace_line(name: str, pace: Pace) -> str:
    """Return "epoch 2: 500 steps of 51.3 ms, 623 samples/s, 4% of it waiting for data; GPU ..."."""
    return printable(f"{name}: {_steps(pace)}; {_gpu(pace)}; {_peak(pace)}")


def _steps(pace: Pace) -> str:
    if pace.step_s is None:
        return "no steps"
    plural = "s" * (pace.num_steps != 1)
    parts = [f"{pace.num_steps} step{plural} of {format_time(pace.step_s)}"]
    if pace.samples_per_s is not None:
        parts.append(f"{format_rate(pace.samples_per_s)} samples/s")
    wait = pace.data_wait_ratio
    parts.append("data wait unknown" if wait is None else f"{format_ratio(wait)} waiting for data")
    return ", ".join(parts)


def _gpu(pace: Pace) -> str:
    gpu, span = pace.gpu, pace.span
    if gpu is None:
        return f"GPU unknown ({in_short(pace.gpu_problem or 'not read yet')})"
    which = f"GPU {gpu.index}" + ("" if gpu.cuda_index is None else f" = cuda:{gpu.cuda_index}")
    named = f"{which} {gpu.name or 'unknown model'}"
    if span is None:
        return f"{named}: not read yet"
    memory = f"{_size(span.used_bytes)} of {_size(gpu.total_bytes)} used"
    return f"{named}: kernel-active {_ratio(span.busy_ratio)}, {memory}"


def _peak(pace: Pace) -> str:
    if pace.peak is None:
        return "no peak: CUDA does not run in this process"
    reserved, allocated = _size(pace.peak.used_bytes), _size(pace.peak.allocated_bytes)
    return f"torch's peak {reserved} reserved, {allocated} allocated"
