"""All GPUs of a run -> what shows only when they are seen together: imbalance and head-room."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from oomph.explaining.agreement import LARGEST_BATCH
from oomph.explaining.case import FULL_RATIO, SHARED_RATIO
from oomph.records.report import Finding, GpuFigures, StepFigures
from oomph.units import format_bytes, format_ratio

DIFFERS_RATIO = 0.15  # from the other ranks: judgement
# What the micro-batch may fill: the CUDA context and fragments take the rest.
FILLABLE_RATIO = 0.92
_FAR = 10.0  # times: nobody knows what holds so far from what was measured


def imbalance(gpus: Sequence[GpuFigures], steps: Sequence[StepFigures]) -> Finding | None:
    """One rank whose steps, or one GPU whose kernel-active time, is unlike the others'."""
    return _by_steps(gpus, steps) or _by_busy(gpus)


def _by_steps(gpus: Sequence[GpuFigures], steps: Sequence[StepFigures]) -> Finding | None:
    times = {one.rank: one.step_s for one in steps}
    rank = _odd_one(times, low_is_odder=False)
    if rank is None:
        return None
    others = statistics.median(time for other, time in times.items() if other != rank)
    return Finding(
        kind="imbalance",
        sentence=f"rank {rank} does not keep step with the other ranks",
        evidence=(f"{times[rank]:.3g} s a step; the others need {others:.3g} s",),
        confidence="measured",
        advice=("compare what that rank has to do: its share of the data, its CPUs, its GPU",),
        gpus=tuple(one.gpu for one in gpus if one.rank == rank),
    )


def _by_busy(gpus: Sequence[GpuFigures]) -> Finding | None:
    working = {
        one.gpu: one.busy.working.mean
        for one in gpus
        if one.busy and one.busy.working and (one.shared_ratio or 0.0) <= SHARED_RATIO
    }
    gpu = _odd_one(working, low_is_odder=True)
    if gpu is None:
        return None
    others = statistics.median(ratio for other, ratio in working.items() if other != gpu)
    (rank,) = (one.rank for one in gpus if one.gpu == gpu)
    who = "this GPU" if rank is None else f"this GPU, of rank {rank},"
    return Finding(
        kind="imbalance",
        sentence=f"{who} is not as busy as the others",
        evidence=(
            f"kernel-active {format_ratio(working[gpu])}; the others {format_ratio(others)}",
            "a rank that waits for another can be busy with waiting, in a kernel of NCCL",
        ),
        confidence="inferred",
        advice=("compare what that rank has to do: its share of the data, its CPUs, its GPU",),
        gpus=(gpu,),
    )


def _odd_one(values: Mapping[int, float], *, low_is_odder: bool) -> int | None:
    """Who is farthest from the median, if they differ enough to speak of."""
    if len(values) < 2:
        return None
    lowest, highest = min(values.values()), max(values.values())
    if highest <= 0 or (highest - lowest) / highest <= DIFFERS_RATIO:
        return None
    median = statistics.median(values.values())
    sign = -1 if low_is_odder else 1
    # Of two, both are as far: rounding must not choose between them.
    return max(values, key=lambda key: (round(abs(values[key] - median), 9), sign * values[key]))


def head_room(gpus: Sequence[GpuFigures]) -> Finding | None:
    """How much more would fit: the fullest GPU decides."""
    used = [one for one in gpus if one.memory.peak_bytes is not None and one.memory.total_bytes]
    if not used or len(used) < len(gpus):
        return None
    fullest = max(used, key=_filled)
    if _filled(fullest) >= FULL_RATIO:
        return None
    factors = [factor(one) for one in used]
    known = [one for one in factors if one is not None]
    grows = min(known) if len(known) == len(factors) else None
    return _told_room(fullest, grows if grows and grows > 1 else None)


def factor(gpu: GpuFigures) -> float | None:
    """Up to so many times the micro-batch; None where what is fixed is not known.

    What does not grow with the batch is taken as what was reserved before the first step. Most
    optimizers take their states only in it, which makes the figure smaller than it could be.
    """
    memory = gpu.memory
    peak, fixed, total = memory.peak_bytes, memory.before_steps_bytes, memory.total_bytes
    is_exact = memory.peak_source == "torch" and memory.peak_misses is None
    if not is_exact or peak is None or fixed is None or total is None or peak <= fixed:
        return None
    beyond = _held(gpu) - peak  # the CUDA context, and what others hold
    return (min(FILLABLE_RATIO * total, total - beyond) - fixed) / (peak - fixed)


def _held(gpu: GpuFigures) -> int:
    """The most that was taken of the GPU, by this run and by others."""
    return max((gpu.memory.peak_bytes or 0) + (gpu.others_bytes or 0), gpu.memory.seen_bytes or 0)


def _filled(gpu: GpuFigures) -> float:
    return _held(gpu) / (gpu.memory.total_bytes or 1)


def _told_room(gpu: GpuFigures, grows: float | None) -> Finding:
    memory = gpu.memory
    peak, total = memory.peak_bytes or 0, memory.total_bytes or 0
    unused = max(total - _held(gpu), 0)
    by_others = f", and {format_bytes(gpu.others_bytes)} by others" if gpu.others_bytes else ""
    evidence = [f"at most {format_bytes(peak)} of {format_bytes(total)} were taken{by_others}"]
    if grows is not None:
        before = format_bytes(memory.before_steps_bytes or 0)
        evidence.append(f"{before} of it were there before the first step, and do not grow")
    if memory.peak_misses:
        evidence.append(memory.peak_misses)
    is_exact = memory.peak_source in ("torch", "accounting") and memory.peak_misses is None
    return Finding(
        kind="head-room",
        sentence=_room_sentence(unused, grows),
        evidence=tuple(evidence),
        confidence="inferred" if grows is not None else "measured" if is_exact else "weak",
        advice=(LARGEST_BATCH,),
        gpus=(gpu.gpu,),
        grows_by_ratio=grows,
        unused_bytes=unused,
    )


def _room_sentence(unused_bytes: int, grows: float | None) -> str:
    unused = f"{format_bytes(unused_bytes)} of memory were never used"
    if grows is None:
        return unused
    times = f"more than {_FAR:.0f}" if grows > _FAR else f"up to about {grows:.1f}"
    return f"{unused}: the micro-batch could be {times} times as large"
