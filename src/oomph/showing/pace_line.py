"""Pace -> the line that stands in a training log at the end of an epoch."""

from __future__ import annotations

import sys

from oomph.records.pace import Pace
from oomph.showing.line import in_short
from oomph.showing.safe import printable
from oomph.units import format_bytes, format_rate, format_ratio


def print_pace(name: str, pace: Pace) -> None:
    """In one write, so that the lines of threads do not mix."""
    encoding = sys.stdout.encoding or "utf-8"
    line = pace_line(name, pace).encode(encoding, "replace").decode(encoding)
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def pace_line(name: str, pace: Pace) -> str:
    """epoch 2: 500 steps of 51.3 ms, 623 samples/s, 4% of it waiting for data; GPU 0 = ..."""
    return printable(f"{name}: {_steps(pace)}; {_gpu(pace)}; {_peak(pace)}")


def _steps(pace: Pace) -> str:
    if pace.step_s is None:
        return "no steps"
    plural = "s" * (pace.num_steps != 1)
    told = [f"{pace.num_steps} step{plural} of {_duration(pace.step_s)}"]
    if pace.samples_per_s is not None:
        told.append(f"{format_rate(pace.samples_per_s)} samples/s")
    wait = pace.data_wait_ratio
    told.append("data wait unknown" if wait is None else f"{format_ratio(wait)} waiting for data")
    return ", ".join(told)


def _duration(seconds: float) -> str:
    """
    >>> _duration(0.0513), _duration(2.5), _duration(0.00004)
    ('51.3 ms', '2.5 s', '0.04 ms')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


def _gpu(pace: Pace) -> str:
    gpu, span = pace.gpu, pace.span
    if gpu is None:
        return f"GPU unknown ({in_short(pace.gpu_problem or 'nobody has looked')})"
    which = f"GPU {gpu.index}" + ("" if gpu.cuda_index is None else f" = cuda:{gpu.cuda_index}")
    named = f"{which} {gpu.name or 'unknown model'}"
    if span is None:
        return f"{named}: not looked at yet"
    busy = "unknown" if span.busy_ratio is None else format_ratio(span.busy_ratio)
    return (
        f"{named}: kernel-active {busy}, {_size(span.used_bytes)} of {_size(gpu.total_bytes)} used"
    )


def _peak(pace: Pace) -> str:
    if pace.peak is None:
        return "no peak: CUDA does not run in this process"
    reserved, allocated = _size(pace.peak.used_bytes), _size(pace.peak.allocated_bytes)
    return f"torch's peak {reserved} reserved, {allocated} allocated"


def _size(size_bytes: int | None) -> str:
    return "unknown" if size_bytes is None else format_bytes(size_bytes)
