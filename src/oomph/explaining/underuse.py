"""A GPU that was not busy -> why: one small function per rule.

A rule that lacks what it needs says nothing. Kernel-active time is never called efficiency: it
says that something ran, not how much of the GPU it filled.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.explaining.agreement import EVALUATE_LESS, LARGER_BATCH, MORE_WORKERS, PREFETCH
from oomph.explaining.case import (
    CONTENDED_RATIO,
    CPU_LIMITED_RATIO,
    FED_RATIO,
    GAPS_RATIO,
    IDLE_IN_STEP_RATIO,
    PAUSING_RATIO,
    PHASES_RATIO,
    SATURATED_RATIO,
    SWAPPING_RATIO,
    WAITS_RATIO,
    WORKING_CORES,
    Case,
    active,
)
from oomph.records.report import Finding, Gap, HostFigures
from oomph.units import format_bytes, format_duration, format_ratio

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
            MORE_WORKERS,
            PREFETCH,
            "cache or pre-process what is decoded anew each epoch: that also spares the CPU",
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
            "then give the CPU less work in the loop, or spread it over more processes",
        ),
        gpus=(case.gpu.gpu,),
    )


def pauses_in_step(case: Case) -> Finding | None:
    """The GPU works for a while and then stands still, in each step, with the data there.

    Small kernels look else: they are spread evenly, so hardly a sixth of a second is without one.
    """
    waits, working = case.waits_ratio, case.working_ratio
    pauses = _pauses(case) if _is_pausing(case) or _gaps_fit_into_steps(case) else ""
    if waits is None or working is None or not pauses or case.is_high:
        return None
    if 1 - working - waits < IDLE_IN_STEP_RATIO:
        return None
    cores = case.host.busiest_cpu_cores
    by = [] if cores is None else [f"its busiest process keeps {cores:.1f} cores busy"]
    if cores is None:
        doing = "the script does something else"
    elif cores >= WORKING_CORES:
        doing = "the script works on the CPU"
    else:
        doing = "the script waits for something else: a disk, the network, a lock"
    return Finding(
        kind="pauses-in-step",
        sentence=f"the GPU is idle within each step, while {doing}",
        evidence=(
            active(case),
            pauses,
            f"data is there in time: {format_ratio(waits)} of a step is spent waiting for it",
            *by,
        ),
        confidence="inferred",
        advice=(
            "see what runs between the kernels of a step: torch.profiler, or py-spy record",
            "move it into the loader's workers, to the GPU, or out of the loop",
        ),
        gpus=(case.gpu.gpu,),
    )


def launch_bound(case: Case) -> Finding | None:
    waits, cores = case.waits_ratio, case.host.busiest_cpu_cores
    if not case.is_low or waits is None or waits >= FED_RATIO or _gaps_are_many(case):
        return None
    if _is_pausing(case) or (cores is not None and cores < WORKING_CORES):
        return None  # who launches kernels all the time neither pauses nor sleeps
    return Finding(
        kind="launch-bound",
        sentence="the GPU waits for the CPU between kernels: they are too small, or the script does"
        " too much between them",
        evidence=(
            active(case),
            f"data is there in time: {format_ratio(waits)} of a step is spent waiting for it",
            "it works evenly: its pauses are too short to be seen one by one",
        ),
        confidence="inferred",
        advice=(
            LARGER_BATCH,
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
    gaps = [gap for gap in busy.gaps if gap.began_s < case.until_s] if busy.gaps_are_rare else []
    left_out = [gap for gap in gaps if case.has_stalls and not _name(gap)]
    rare = [gap for gap in gaps if gap not in left_out]
    # Of very many only the longest are listed, so what is not said is taken from the whole.
    hung_s = sum(gap.lasted_s for gap in busy.gaps if gap.began_s >= case.until_s)
    rest_s = busy.gaps_s - hung_s - sum(gap.lasted_s for gap in left_out)
    stood_s = busy.start_up_s + (max(rest_s, 0.0) if rare else 0.0)
    share = min(stood_s / case.lasted_s, 1.0)
    if share < PHASES_RATIO:
        return None
    num_gaps = busy.num_gaps - (len(busy.gaps) - len(rare))
    return Finding(
        kind="phases",
        sentence=f"the GPU stood still for {format_ratio(share)} of the run, in {_when(rare)}",
        evidence=(*_listed(busy.start_up_s, rare, num_gaps if rare else 0), active(case)),
        confidence="measured" if busy.source == "buffered" else "weak",
        advice=_against_gaps(rare),
        gpus=(case.gpu.gpu,),
    )


def _name(gap: Gap) -> str:
    """What the script called it, if that says more than that it trains."""
    return gap.phase.lower() if gap.phase and gap.phase != "training" else ""


def _against_gaps(gaps: Sequence[Gap]) -> tuple[str, ...]:
    """Only what fits to what the script says of them."""
    names = {_name(gap) for gap in gaps}
    advice = []
    if any("eval" in name or "valid" in name or "test" in name for name in names):
        advice.append(EVALUATE_LESS)
    if any("checkpoint" in name or "sav" in name for name in names):
        advice.append("save checkpoints in the background")
    if "" in names:
        advice.append(
            'have the script say what it does then: with run.phase("checkpoint"), in'
            " oomph.watching()"
        )
    return tuple(advice)


def host_contention(case: Case) -> Finding | None:
    """Others take the CPUs that the run needs."""
    host = case.host
    if not _wants_more(case) or not host.num_cpus or host.others_cpu_cores is None:
        return None
    taken = host.others_cpu_cores + (host.stolen_cpu_cores or 0.0)
    whole = taken + (host.cpu_cores or 0.0)
    if whole < SATURATED_RATIO * host.num_cpus or taken < CONTENDED_RATIO * host.num_cpus:
        return None
    stolen = host.stolen_cpu_cores or 0.0
    by = "the hypervisor takes" if stolen > taken / 2 else "other processes take"
    return Finding(
        kind="host-contention",
        sentence=f"the GPU is short of CPU: {by} {taken:.1f} of the {host.num_cpus} CPUs",
        evidence=(f"the run gets {host.cpu_cores or 0.0:.1f} of them", active(case), *_waits(case)),
        confidence="inferred",
        advice=("a machine that you do not share",)
        if stolen > taken / 2
        else (
            "see which processes take them: top",
            "keep CPUs for this job: the scheduler's, or taskset -c",
        ),
        gpus=(case.gpu.gpu,),
    )


def cpu_limit(case: Case) -> Finding | None:
    """The limit of a container, or of a job."""
    held = case.host.throttled_ratio
    if not _wants_more(case) or held is None or held < CPU_LIMITED_RATIO:
        return None
    return Finding(
        kind="cpu-limit",
        sentence=f"the CPU limit of its control group holds the run back, in {format_ratio(held)}"
        " of the scheduler's periods",
        evidence=(
            f"the run gets {case.host.cpu_cores or 0.0:.1f} CPUs",
            active(case),
            *_waits(case),
        ),
        confidence="inferred",
        advice=(
            "a higher limit: docker run --cpus, resources.limits.cpu, --cpus-per-task",
            "or fewer threads and loader workers than the limit has CPUs",
        ),
        gpus=(case.gpu.gpu,),
    )


def swapping(case: Case) -> Finding | None:
    share = case.host.swapping_ratio
    if not _wants_more(case) or share is None or share < SWAPPING_RATIO:
        return None
    back = format_bytes(case.host.swapped_in_bytes or 0)
    return Finding(
        kind="swapping",
        sentence=f"the host swaps, for {format_ratio(share)} of the time",
        evidence=(f"{back} came back from swap, for all processes together", active(case)),
        confidence="inferred",
        advice=(
            "use less host memory: fewer loader workers, less prefetching, less pinned memory",
            "or take a machine with more",
        ),
        gpus=(case.gpu.gpu,),
    )


def _wants_more(case: Case) -> bool:
    """It worked, and not all the time."""
    return case.working_ratio is not None and not case.is_high


def _waits(case: Case) -> tuple[str, ...]:
    waits = case.waits_ratio
    return () if waits is None else (f"{format_ratio(waits)} of a step is spent waiting for data",)


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


def _gaps_fit_into_steps(case: Case) -> bool:
    """Are steps so long that the gaps can lie within them?"""
    busy, steps = case.busy, case.steps
    if busy is None or steps is None or not busy.num_gaps or not _gaps_are_many(case):
        return False
    return steps.longest_step_s >= busy.gaps_s / busy.num_gaps


def _pauses(case: Case) -> str:
    """What shows that it pauses again and again; empty where it does not."""
    if case.busy is None:
        return ""
    if not case.busy.gaps_are_rare:
        return f"{case.busy.num_gaps} gaps of 2 s and more, close to each other"
    return _again_and_again(case) if _is_pausing(case) else ""


def _is_pausing(case: Case) -> bool:
    return case.busy is not None and (case.busy.pausing_ratio or 0.0) >= PAUSING_RATIO


def _again_and_again(case: Case) -> str:
    share = case.busy.pausing_ratio if case.busy else None
    return f"it pauses again and again: in {format_ratio(share or 0.0)} of the seconds of training"


def is_saturated(host: HostFigures) -> bool:
    """Are all CPUs that it may use busy, by whomever?"""
    taken = (host.cpu_cores, host.others_cpu_cores, host.stolen_cpu_cores)
    whole = sum(cores for cores in taken if cores is not None)
    return bool(host.num_cpus) and whole >= SATURATED_RATIO * (host.num_cpus or 0)


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
