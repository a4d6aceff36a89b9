"""A GPU that was not busy -> why: one small function per rule.

A rule that lacks what it needs says nothing. Kernel-active time is never called efficiency: it
says that something ran, not how much of the GPU it filled.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.explaining.case import (
    FED_RATIO,
    GAPS_RATIO,
    PAUSING_RATIO,
    PHASES_RATIO,
    SATURATED_RATIO,
    WAITS_RATIO,
    Case,
    active,
)
from oomph.records.report import Finding, Gap, HostFigures
from oomph.units import format_duration, format_ratio

_MOST_LISTED = 5  # gaps


def never_busy(case: Case) -> Finding | None:
    if case.busy is None or case.busy.working is not None:
        return None
    return Finding(
        kind="never-busy",
        sentence="no kernel was seen to run on this GPU",
        evidence=(f"kernel-active time never reached 5% in {case.busy.known_s:.0f} s",),
        confidence="measured" if case.busy.source == "buffered" else "weak",
        advice=("is the model on the GPU? next(model.parameters()).device",),
        gpus=(case.gpu.gpu,),
    )


def input_bound(case: Case) -> Finding | None:
    """Measured around the loader. Also between low and high: the wait itself was measured."""
    waits = case.waits_ratio
    if waits is None or waits < WAITS_RATIO or case.working_ratio is None or case.is_high:
        return None
    return Finding(
        kind="input-bound",
        sentence=f"the GPU waits for data for {format_ratio(waits)} of each step",
        evidence=(active(case), _step_time(case)),
        confidence="measured",
        advice=(
            "more loader workers: DataLoader(num_workers=...), persistent_workers=True",
            "pin_memory=True and .to(device, non_blocking=True); a larger prefetch_factor",
            "cache or pre-process what is decoded anew each epoch",
        ),
        gpus=(case.gpu.gpu,),
    )


def input_bound_inferred(case: Case) -> Finding | None:
    """Where the script does not say how long it waits."""
    saturated, pauses = _saturated(case.host), _pauses(case)
    if not case.is_low or case.waits_ratio is not None or not saturated or not pauses:
        return None
    return Finding(
        kind="input-bound",
        sentence="the GPU probably waits for the CPU: for data, or for the script itself",
        evidence=(active(case), pauses, saturated),
        confidence="inferred",
        advice=(
            "measure the wait to be sure: with oomph.watching() in the script",
            "then more loader workers, or less work for the CPU in the loop",
        ),
        gpus=(case.gpu.gpu,),
    )


def launch_bound(case: Case) -> Finding | None:
    waits = case.waits_ratio
    if not case.is_low or waits is None or waits >= FED_RATIO or _gaps_are_many(case):
        return None
    return Finding(
        kind="launch-bound",
        sentence="kernels are too small: the GPU waits for the CPU to launch the next one",
        evidence=(
            active(case),
            f"data is there in time: {format_ratio(waits)} of a step is spent waiting for it",
            "its pauses are shorter than 2 s",
        ),
        confidence="inferred",
        advice=(
            "a larger micro-batch",
            "torch.compile(model), or CUDA graphs",
            "no .item(), .cpu() or print of a tensor in each step: they wait for the GPU",
        ),
        gpus=(case.gpu.gpu,),
    )


def phases(case: Case) -> Finding | None:
    """Start-up, and gaps that are long and rare."""
    busy = case.busy
    if busy is None or busy.working is None or case.lasted_s <= 0:
        return None
    rare = busy.gaps if busy.gaps_are_rare else ()
    stood_s = busy.start_up_s + (busy.gaps_s if rare else 0.0)
    share = min(stood_s / case.lasted_s, 1.0)
    if share < PHASES_RATIO:
        return None
    return Finding(
        kind="phases",
        sentence=f"the GPU stood still for {format_ratio(share)} of the run, in {_when(rare)}",
        evidence=_listed(busy.start_up_s, rare, busy.num_gaps if rare else 0),
        confidence="measured" if busy.source == "buffered" else "weak",
        advice=("evaluate less often; save checkpoints in the background",) if rare else (),
        gpus=(case.gpu.gpu,),
    )


def unexplained(case: Case) -> Finding | None:
    """What to say where no other rule spoke."""
    if case.working_ratio is None or case.is_high:
        return None
    known = case.waits_ratio is not None
    beside = (_pauses(case), _saturated(case.host))
    return Finding(
        kind="unexplained",
        sentence="the GPU was not busy all the time, and what was measured does not say why",
        evidence=(active(case), *filter(None, beside)),
        confidence="measured",
        advice=("look at one step with torch.profiler",)
        if known
        else ("measure the wait for data: with oomph.watching() in the script",),
        gpus=(case.gpu.gpu,),
    )


def told(gap: Gap) -> str:
    """
    >>> told(Gap(began_s=62, ended_s=75, phase="evaluation"))
    'at 1 min 2 s for 13 s (evaluation)'
    """
    phase = f" ({gap.phase})" if gap.phase else ""
    return f"at {format_duration(gap.began_s)} for {format_duration(gap.lasted_s)}{phase}"


def _step_time(case: Case) -> str:
    steps = case.steps
    return f"{steps.step_s:.3g} s a step over {steps.num_steps} steps" if steps else ""


def _when(rare: Sequence[Gap]) -> str:
    return "start-up and long pauses" if rare else "start-up"


def _listed(start_up_s: float, gaps: Sequence[Gap], num_gaps: int) -> tuple[str, ...]:
    """Start-up and the longest gaps, with their times."""
    longest = sorted(gaps, key=lambda gap: -gap.lasted_s)[:_MOST_LISTED]
    told_gaps = [told(gap) for gap in sorted(longest, key=lambda gap: gap.began_s)]
    rest = num_gaps - len(longest)
    return (
        f"start-up: {format_duration(start_up_s)} until the first kernels",
        *told_gaps,
        *([f"and {rest} shorter pauses"] if rest else []),
    )


def _gaps_are_many(case: Case) -> bool:
    """Do gaps of 2 s and more belong to the way it trains?"""
    if case.busy is None or case.busy.gaps_are_rare:
        return False
    after_s = case.lasted_s - case.busy.start_up_s
    return case.busy.gaps_s >= GAPS_RATIO * after_s


def _pauses(case: Case) -> str:
    """What shows that it pauses again and again; empty where it does not."""
    if case.busy is None:
        return ""
    if not case.busy.gaps_are_rare:
        return f"{case.busy.num_gaps} gaps of 2 s and more, close to each other"
    share = case.busy.pausing_ratio or 0.0
    if share >= PAUSING_RATIO:
        return f"it pauses again and again: in {format_ratio(share)} of the seconds of training"
    return ""


def _saturated(host: HostFigures) -> str:
    """What shows that the CPU is the limit; empty where it is not."""
    if host.num_cpus and (host.cpu_cores or 0.0) >= SATURATED_RATIO * host.num_cpus:
        return f"all {host.num_cpus} CPUs that it may use are busy ({host.cpu_cores:.1f} of them)"
    if (host.busiest_cpu_cores or 0.0) >= SATURATED_RATIO:
        return (
            f"one process keeps {host.busiest_cpu_cores:.1f} cores busy"
            " (one that waits for the GPU can look like that, too)"
        )
    return ""
