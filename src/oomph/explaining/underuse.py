"""A GPU that was not busy -> why: one small function per rule.

A rule that lacks its data returns nothing. Kernel-active time is never called efficiency: it shows
that something ran, not how much of the GPU it filled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from oomph.explaining.findings import EVALUATE_LESS, LARGER_BATCH, MORE_WORKERS, PREFETCH
from oomph.records.report import (
    BusyFigures,
    Confidence,
    Finding,
    FindingKind,
    Gap,
    GpuFigures,
    HostFigures,
    StepFigures,
)
from oomph.units import format_bytes, format_duration, format_ratio

# ---- thresholds: judgement, to be tuned on real runs -------------------------------------------

SHORTEST_RUN_S = 30.0
FEWEST_SAMPLES = 20
SHARED_RATIO = 0.05  # of the time, other processes are on the GPU
LOW_RATIO = 0.30  # kernel-active time below this is low
HIGH_RATIO = 0.90  # above this, feeding the GPU faster gains nothing
WAITS_RATIO = 0.20  # of a step, waiting for data: from here on, fix the input first
FED_RATIO = 0.05  # below this the input is not the cause
SATURATED_RATIO = 0.90  # of one core, or of all CPUs the run may use
GAPS_RATIO = 0.10  # of the time: below this the gaps are short
PHASES_RATIO = 0.05  # of the run: less is not worth mentioning
PAUSING_RATIO = 0.50  # of the time: pauses this frequent belong to the training loop
NARROW_RATIO = 0.40  # of the multiprocessors
LOW_POWER_RATIO = 0.50  # of the power limit
MEMORY_BOUND_RATIO = 0.70  # of the time, DRAM moves data
THROTTLED_RATIO = 0.05  # of the time
IDLE_IN_STEP_RATIO = 0.20  # of a step, without a kernel and without a wait for data
WORKING_CORES = 0.50  # of the busiest process: below this it waits rather than works
CONTENDED_RATIO = 0.25  # of the CPUs, used by others: less is normal on a machine
CPU_LIMITED_RATIO = 0.10  # of the scheduler's periods
SWAPPING_RATIO = 0.05  # of the time
LINK_RATIO = 0.60  # of the PCIe bandwidth: about what continuous copies reach
SPILLS_LINK_RATIO = 0.50
SPILLS_FULL_RATIO = 0.95  # of the memory
FULL_RATIO = 0.80  # of the memory: from here on there is hardly any room
_MOST_LISTED = 5  # gaps


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A GPU, with the context that the rules need."""

    gpu: GpuFigures
    steps: StepFigures | None  # of its rank
    host: HostFigures
    lasted_s: float
    until_s: float = math.inf  # when it began to hang
    has_stalls: bool = False  # some of its steps take long, which has its own finding

    def finding(
        self,
        kind: FindingKind,
        sentence: str,
        *,
        evidence: tuple[str, ...],
        confidence: Confidence = "measured",
        advice: tuple[str, ...] = (),
    ) -> Finding:
        """Return a finding about this GPU."""
        return Finding(
            kind=kind,
            sentence=sentence,
            evidence=evidence,
            confidence=confidence,
            advice=advice,
            gpus=(self.gpu.gpu,),
        )

    @property
    def busy(self) -> BusyFigures | None:
        return self.gpu.busy

    @property
    def working_ratio(self) -> float | None:
        """Return the mean kernel-active time while the run worked."""
        working = self.busy.working if self.busy else None
        return None if working is None else working.mean

    @property
    def is_low(self) -> bool:
        return self.working_ratio is not None and self.working_ratio < LOW_RATIO

    @property
    def is_high(self) -> bool:
        return self.working_ratio is not None and self.working_ratio >= HIGH_RATIO

    @property
    def is_underused(self) -> bool:
        """Return whether the GPU worked, but not all the time."""
        return self.working_ratio is not None and not self.is_high

    @property
    def is_shared(self) -> bool:
        return (self.gpu.shared_ratio or 0.0) > SHARED_RATIO

    @property
    def waits_ratio(self) -> float | None:
        """Return the share of a step spent waiting for data; None if it is not recorded."""
        return self.steps.data_wait_ratio if self.steps else None

    @property
    def full_ratio(self) -> float | None:
        """Return the peak share of the memory in use, by all processes; None: unknown."""
        memory = self.gpu.memory
        peaks = [one for one in (memory.peak_bytes, memory.seen_bytes) if one is not None]
        return max(peaks) / memory.total_bytes if peaks and memory.total_bytes else None

    @property
    def is_throttled(self) -> bool:
        return (self.gpu.power.throttled_ratio or 0.0) > THROTTLED_RATIO


Rule = Callable[[Case], Finding | None]


def active(case: Case) -> str:
    """Return how busy it was, with the required wording."""
    ratio = format_ratio(case.working_ratio or 0.0)
    polled = case.busy is not None and case.busy.source == "polled"
    return f"kernel-active {ratio} of the time while it worked{', as polled' if polled else ''}"


# ---- what prevents a verdict ---------------------------------------------------------------------


def too_short(case: Case) -> Finding | None:
    """Return why there is no verdict, if the run is too short for one."""
    samples = case.busy.num_samples if case.busy else 0
    if case.lasted_s >= SHORTEST_RUN_S and samples >= FEWEST_SAMPLES:
        return None
    if case.lasted_s < SHORTEST_RUN_S:
        because = f"the run lasted {case.lasted_s:.0f} s, and start-up alone can take that long"
    elif case.busy is None:
        because = "kernel-active time could not be read"
    else:
        because = f"only {samples} samples of kernel-active time were seen"
    return case.finding(
        "too-short",
        "no verdict on how well the GPU was used",
        evidence=(because,),
        advice=(f"watch at least {SHORTEST_RUN_S:.0f} s of training",),
    )


def shared_gpu(case: Case) -> Finding | None:
    if not case.is_shared:
        return None
    how_long = format_ratio(case.gpu.shared_ratio or 0.0)
    most = case.gpu.most_others or 0
    who = "one process" if most == 1 else f"up to {most} processes"
    return case.finding(
        "shared-gpu",
        f"the GPU was shared for {how_long} of the time: its figures mix jobs",
        evidence=(f"{who} of others at a time",),
        advice=(
            "choose a GPU that nobody uses: oomph gpus --free",
            "or wait until this one is free",
        ),
    )


# ---- a GPU that was not busy ---------------------------------------------------------------------


def never_busy(case: Case) -> Finding | None:
    if case.busy is None or case.busy.working is not None:
        return None
    return case.finding(
        "never-busy",
        "no kernel was seen to run on this GPU",
        evidence=(f"kernel-active time never reached 5% in {case.busy.known_s:.0f} s",),
        confidence="measured" if case.busy.source == "buffered" else "weak",
        advice=("is the model on the GPU? next(model.parameters()).device",),
    )


def input_bound(case: Case) -> Finding | None:
    """Report a measured wait for data; also at medium kernel-active time, since it is measured."""
    waits, steps = case.waits_ratio, case.steps
    if steps is None or waits is None or waits < WAITS_RATIO or not case.is_underused:
        return None
    return case.finding(
        "input-bound",
        f"the GPU waits for data for {format_ratio(waits)} of each step",
        evidence=(active(case), f"{steps.step_s:.3g} s a step over {steps.num_steps} steps"),
        advice=(
            MORE_WORKERS,
            PREFETCH,
            "cache or pre-process what is decoded anew each epoch: that also spares the CPU",
        ),
    )


def input_bound_inferred(case: Case) -> Finding | None:
    """Infer a wait for data if the script does not record its waits."""
    saturated, pauses = _saturated(case.host), _pauses(case)
    if not case.is_low or case.waits_ratio is not None or not saturated or not pauses:
        return None
    return case.finding(
        "input-bound",
        "the GPU probably waits for the CPU: for data, or for the script itself",
        evidence=(active(case), pauses, saturated),
        confidence="inferred",
        advice=(
            "measure the wait to be sure: with oomph.watching() in the script",
            "then give the CPU less work in the loop, or spread it over more processes",
        ),
    )


def pauses_in_step(case: Case) -> Finding | None:
    """Report a GPU that works for a while and then idles in each step, although the data is there.

    Small kernels look different: they are spread evenly, so hardly any sixth of a second is
    without one.
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
    return case.finding(
        "pauses-in-step",
        f"the GPU is idle within each step, while {doing}",
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
    )


def launch_bound(case: Case) -> Finding | None:
    waits, cores = case.waits_ratio, case.host.busiest_cpu_cores
    if not case.is_low or waits is None or waits >= FED_RATIO or _gaps_are_many(case):
        return None
    if _is_pausing(case) or (cores is not None and cores < WORKING_CORES):
        return None  # a process that launches kernels all the time neither pauses nor sleeps
    return case.finding(
        "launch-bound",
        "the GPU waits for the CPU between kernels: they are too small, or the script does"
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
    )


def phases(case: Case) -> Finding | None:
    """Report start-up time, and gaps that are long and rare."""
    busy = case.busy
    if busy is None or busy.working is None or case.lasted_s <= 0:
        return None
    gaps = [gap for gap in busy.gaps if gap.began_s < case.until_s] if busy.gaps_are_rare else []
    left_out = [gap for gap in gaps if case.has_stalls and not _name(gap)]
    rare = [gap for gap in gaps if gap not in left_out]
    # If there are very many gaps, only the longest are listed: subtract the excluded from the
    # total.
    hung_s = sum(gap.lasted_s for gap in busy.gaps if gap.began_s >= case.until_s)
    rest_s = busy.gaps_s - hung_s - sum(gap.lasted_s for gap in left_out)
    stood_s = busy.start_up_s + (max(rest_s, 0.0) if rare else 0.0)
    share = min(stood_s / case.lasted_s, 1.0)
    if share < PHASES_RATIO:
        return None
    num_gaps = busy.num_gaps - (len(busy.gaps) - len(rare))
    when = "start-up and long pauses" if rare else "start-up"
    return case.finding(
        "phases",
        f"the GPU stood still for {format_ratio(share)} of the run, in {when}",
        evidence=(*_listed(busy.start_up_s, rare, num_gaps if rare else 0), active(case)),
        confidence="measured" if busy.source == "buffered" else "weak",
        advice=_against_gaps(rare),
    )


def _name(gap: Gap) -> str:
    """Return the script's name for the phase, unless it is just "training"."""
    return gap.phase.lower() if gap.phase and gap.phase != "training" else ""


def _against_gaps(gaps: Sequence[Gap]) -> tuple[str, ...]:
    """Return advice that matches the phases the script named."""
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
    """Report that others take the CPUs the run needs."""
    host = case.host
    if not case.is_underused or not host.num_cpus or host.others_cpu_cores is None:
        return None
    taken = host.others_cpu_cores + (host.stolen_cpu_cores or 0.0)
    whole = taken + (host.cpu_cores or 0.0)
    if whole < SATURATED_RATIO * host.num_cpus or taken < CONTENDED_RATIO * host.num_cpus:
        return None
    stolen = host.stolen_cpu_cores or 0.0
    by = "the hypervisor takes" if stolen > taken / 2 else "other processes take"
    return case.finding(
        "host-contention",
        f"the GPU is short of CPU: {by} {taken:.1f} of the {host.num_cpus} CPUs",
        evidence=(f"the run gets {host.cpu_cores or 0.0:.1f} of them", active(case), *_waits(case)),
        confidence="inferred",
        advice=("a machine that you do not share",)
        if stolen > taken / 2
        else (
            "see which processes take them: top",
            "keep CPUs for this job: the scheduler's, or taskset -c",
        ),
    )


def cpu_limit(case: Case) -> Finding | None:
    """Report a CPU limit of a container or a job."""
    limited_ratio = case.host.throttled_ratio
    if not case.is_underused or limited_ratio is None or limited_ratio < CPU_LIMITED_RATIO:
        return None
    return case.finding(
        "cpu-limit",
        f"the CPU limit of its control group holds the run back, in"
        f" {format_ratio(limited_ratio)} of the scheduler's periods",
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
    )


def swapping(case: Case) -> Finding | None:
    share = case.host.swapping_ratio
    if not case.is_underused or share is None or share < SWAPPING_RATIO:
        return None
    back = format_bytes(case.host.swapped_in_bytes or 0)
    return case.finding(
        "swapping",
        f"the host swaps, for {format_ratio(share)} of the time",
        evidence=(f"{back} came back from swap, for all processes together", active(case)),
        confidence="inferred",
        advice=(
            "use less host memory: fewer loader workers, less prefetching, less pinned memory",
            "or take a machine with more",
        ),
    )


def _waits(case: Case) -> tuple[str, ...]:
    waits = case.waits_ratio
    return () if waits is None else (f"{format_ratio(waits)} of a step is spent waiting for data",)


def unexplained(case: Case) -> Finding | None:
    """Report that no other rule applies."""
    if not case.is_underused:
        return None
    known = case.waits_ratio is not None
    beside = (_pauses(case), _saturated(case.host))
    return case.finding(
        "unexplained",
        "the GPU was not busy all the time, and what was measured does not say why",
        evidence=(active(case), *filter(None, beside)),
        advice=("look at one step with torch.profiler",)
        if known
        else ("measure the wait for data: with oomph.watching() in the script",),
    )


def gap_in_words(gap: Gap) -> str:
    """
    >>> gap_in_words(Gap(began_s=62, ended_s=75, phase="evaluation"))
    'at 1 min 2 s for 13 s (evaluation)'
    """
    phase = f" ({gap.phase})" if gap.phase else ""
    return f"at {format_duration(gap.began_s)} for {format_duration(gap.lasted_s)}{phase}"


def _listed(start_up_s: float, gaps: Sequence[Gap], num_gaps: int) -> tuple[str, ...]:
    """Return start-up and the longest gaps, with their times."""
    longest = sorted(gaps, key=lambda gap: -gap.lasted_s)[:_MOST_LISTED]
    listed_gaps = [gap_in_words(gap) for gap in sorted(longest, key=lambda gap: gap.began_s)]
    rest = num_gaps - len(longest)
    return (
        f"start-up: {format_duration(start_up_s)} until the first kernels",
        *listed_gaps,
        *([f"and {rest} shorter pauses"] if rest else []),
    )


def _gaps_are_many(case: Case) -> bool:
    """Return whether gaps of 2 s and more are a regular part of training."""
    if case.busy is None or case.busy.gaps_are_rare:
        return False
    after_s = case.lasted_s - case.busy.start_up_s
    return case.busy.gaps_s >= GAPS_RATIO * after_s


def _gaps_fit_into_steps(case: Case) -> bool:
    """Return whether steps are long enough to contain the gaps."""
    busy, steps = case.busy, case.steps
    if busy is None or steps is None or not busy.num_gaps or not _gaps_are_many(case):
        return False
    return steps.longest_step_s >= busy.gaps_s / busy.num_gaps


def _pauses(case: Case) -> str:
    """Return the evidence that it pauses again and again; empty if it does not."""
    if case.busy is None:
        return ""
    if not case.busy.gaps_are_rare:
        return f"{case.busy.num_gaps} gaps of 2 s and more, close to each other"
    if not _is_pausing(case):
        return ""
    share = format_ratio(case.busy.pausing_ratio or 0.0)
    return f"it pauses again and again: in {share} of the seconds of training"


def _is_pausing(case: Case) -> bool:
    return case.busy is not None and (case.busy.pausing_ratio or 0.0) >= PAUSING_RATIO


def is_saturated(host: HostFigures) -> bool:
    """Return whether all CPUs the run may use are busy, including with other work."""
    taken = (host.cpu_cores, host.others_cpu_cores, host.stolen_cpu_cores)
    whole = sum(cores for cores in taken if cores is not None)
    return bool(host.num_cpus) and whole >= SATURATED_RATIO * (host.num_cpus or 0)


def _saturated(host: HostFigures) -> str:
    """Return the evidence that the CPU is the limit; empty if it is not."""
    if host.num_cpus and (host.cpu_cores or 0.0) >= SATURATED_RATIO * host.num_cpus:
        return f"all {host.num_cpus} CPUs that it may use are busy ({host.cpu_cores:.1f} of them)"
    if (host.busiest_cpu_cores or 0.0) >= SATURATED_RATIO:
        return (
            f"one process keeps {host.busiest_cpu_cores:.1f} cores busy"
            " (one that waits for the GPU can look like that, too)"
        )
    return ""


# ---- a GPU that was busy, but not used well ------------------------------------------------------
# One small function per rule. Power alone only suggests where to look. If others used the GPU as
# well, nothing is concluded: its figures are sums over all jobs.


def memory_bound(case: Case) -> Finding | None:
    moving = case.gpu.memory_active_ratio
    if not case.is_high or case.is_shared or moving is None or moving <= MEMORY_BOUND_RATIO:
        return None
    return case.finding(
        "memory-bound",
        "the GPU is busy moving data: its memory bandwidth is the limit",
        evidence=(active(case), f"DRAM was moving data {format_ratio(moving)} of the time"),
        advice=(
            "fused kernels: torch.compile, fused attention, a fused optimizer",
            "lower precision; a larger batch will not help much",
        ),
    )


def narrow_kernels(case: Case) -> Finding | None:
    width = case.gpu.sm_active_ratio
    if not case.is_high or case.is_shared or width is None or width >= NARROW_RATIO:
        return None
    return case.finding(
        "narrow-kernels",
        "the GPU is always busy, but with kernels that fill few of its multiprocessors",
        evidence=(active(case), f"{format_ratio(width)} of the multiprocessors were active"),
        advice=(LARGER_BATCH, "fused kernels: torch.compile", "bf16 instead of fp32"),
    )


def perhaps_narrow(case: Case) -> Finding | None:
    """Suggest where to look: without a figure for the multiprocessors, nothing can be claimed."""
    power = case.gpu.power
    if not case.is_high or case.is_shared or case.is_throttled:
        return None
    if case.gpu.sm_active_ratio is not None or power.working_w is None or not power.limit_w:
        return None
    if power.working_w / power.limit_w >= LOW_POWER_RATIO:
        return None
    return case.finding(
        "narrow-kernels",
        "the GPU is always busy but draws little power: its kernels may be narrow",
        evidence=(
            active(case),
            f"{power.working_w:.0f} W of {power.limit_w:.0f} W while it worked",
            "work that is bound by memory draws less as well, so this is no proof",
        ),
        confidence="weak",
        advice=("look at one step with torch.profiler before changing anything",),
    )


_AGAINST_THROTTLING = {
    "power": "power: usual under full load; the limit can be seen with nvidia-smi -q -d POWER",
    "heat": "heat: look at fans, airflow and neighbours in the same machine",
    "hardware": "hardware: the power supply or the cooling of the machine needs a look",
}


def throttled(case: Case) -> Finding | None:
    if not case.is_throttled:
        return None
    power = case.gpu.power
    by = power.throttled_by
    because = f" by {' and '.join(by)}" if by else ""
    share = format_ratio(power.throttled_ratio or 0.0)
    evidence = [] if power.most_c is None else [f"up to {power.most_c} C"]
    if power.mean_w is not None:
        limit = f" of {power.limit_w:.0f} W" if power.limit_w else ""
        evidence.append(f"{power.mean_w:.0f} W{limit} on average")
    return case.finding(
        "throttled",
        f"clocks were held down{because} for {share} of the time",
        evidence=tuple(evidence),
        advice=tuple(_AGAINST_THROTTLING[why] for why in by if why in _AGAINST_THROTTLING),
    )


def spill(case: Case) -> Finding | None:
    """Report a likely spill. No driver reports one; its signs are full memory and a busy link."""
    moved, full = case.gpu.link_ratio, case.full_ratio
    if case.is_shared or case.working_ratio is None or moved is None or full is None:
        return None
    if full < SPILLS_FULL_RATIO or moved < SPILLS_LINK_RATIO:
        return None
    return case.finding(
        "spill",
        "GPU memory is full, and data moves to and from the host all the time",
        evidence=(
            (
                f"{format_ratio(full)} of the memory is taken; PCIe carries {format_ratio(moved)}"
                " of what it can"
            ),
            active(case),
            "offloading on purpose looks the same",
        ),
        confidence="inferred",
        advice=(
            "if nothing is offloaded on purpose, the job does not fit: oomph plan finds what does",
            (
                "under WSL and Windows: switch off the driver's CUDA sysmem fallback, so that it"
                " fails instead of crawling"
            ),
        ),
    )


def pcie_bound(case: Case) -> Finding | None:
    moved = case.gpu.link_ratio
    if case.is_shared or not case.is_underused or moved is None or moved < LINK_RATIO:
        return None
    return case.finding(
        "pcie-bound",
        "the GPU waits for data that comes over PCIe",
        evidence=(f"PCIe carries {format_ratio(moved)} of what it can", active(case)),
        confidence="inferred",
        advice=(
            "copy less: smaller types (uint8 images), and augment on the GPU",
            "keep on the GPU what is copied again in each step; offload less, if memory allows",
        ),
    )


def busy(case: Case) -> Finding | None:
    if not case.is_high:
        return None
    return case.finding(
        "busy",
        "the GPU was kept busy: a kernel was running almost all the time",
        evidence=(active(case), "this does not show how much of the GPU each kernel uses"),
    )


# Applied to each GPU. findings.py decides which findings may be combined, and their order.
RULES: Sequence[Rule] = (
    spill,
    swapping,
    cpu_limit,
    host_contention,
    never_busy,
    input_bound,
    input_bound_inferred,
    pcie_bound,
    pauses_in_step,
    launch_bound,
    throttled,
    phases,
    memory_bound,
    narrow_kernels,
    perhaps_narrow,
    unexplained,
    busy,
)
