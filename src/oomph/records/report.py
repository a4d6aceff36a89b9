"""Report and its parts: the conclusions from a Run, their evidence, and what to do.

Figures cover the whole run unless their name says otherwise, and means are weighted by time: a span
of ten seconds counts ten times as much as one of a second. `gpu` is an index into `Run.gpus`.

Kernel-active time is the share of the time with at least one kernel running. It is not an
efficiency: one block on one multiprocessor counts like a full GPU.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from oomph.records.notebook import html_of
from oomph.records.run import BusySource, EventKind, Halt, PeakSource
from oomph.units import format_duration

Confidence = Literal[
    "measured",  # observed directly
    "inferred",  # from signs that usually mean this
    "weak",  # from signs that can also mean something else
]

FindingKind = Literal[
    # How the run ended: one of these comes first.
    "out-of-memory",
    "recovered",  # it ran out of memory and went on
    "no-out-of-memory",
    "maybe-out-of-memory",  # it was killed, and the reason is unknown
    "not-ended",
    # Reasons to trust the other figures less.
    "too-short",
    "no-gpu",
    "lost-gpu",
    "shared-gpu",
    # Problems to fix first.
    "hang",  # steps or kernels have stopped
    "leak",  # GPU memory keeps growing
    "fragmentation",  # it grows, but tensors do not need it
    "host-leak",
    "spill",  # GPU memory is full, and data moves over PCIe all the time
    "swapping",  # on the host
    "unstable",  # the loss, the gradients or the updates are out of proportion
    # Why the GPU was not fully used.
    "never-busy",
    "input-bound",
    "host-contention",  # other processes take the CPUs
    "cpu-limit",  # set by the control group
    "pcie-bound",
    "pauses-in-step",  # the script does something else, or waits, within each step
    "launch-bound",
    "stalls",  # some steps take much longer
    "slowing-down",
    "phases",
    "narrow-kernels",
    "memory-bound",
    "throttled",
    "imbalance",
    "unexplained",  # it was not busy, and no measurement explains why
    "busy",  # a kernel ran almost all the time; nothing else was found
    # Unused capacity.
    "head-room",
    "noise-scale",  # a larger or smaller batch would be better used
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One conclusion."""

    kind: FindingKind
    sentence: str
    evidence: tuple[str, ...]
    confidence: Confidence
    advice: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()  # empty: the whole run; the evidence is from the first
    grows_by_ratio: float | None = None  # head-room: largest factor for the micro-batch
    unused_bytes: int | None = None  # head-room


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The distribution of a figure over time."""

    mean: float
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch of at least two seconds in which (almost) no kernel ran."""

    began_s: float
    ended_s: float
    phase: str | None  # what the script was doing, if it reported that

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A named stretch of the run: "evaluation"."""

    name: str
    began_s: float
    ended_s: float
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """How full a GPU was."""

    total_bytes: int | None
    peak_bytes: int | None
    peak_source: PeakSource | None
    peak_misses: str | None  # what the source cannot see; None: it is exact
    allocated_bytes: int | None  # peak of torch's tensors
    before_steps_bytes: int | None  # with model and optimizer, before the first step
    seen_bytes: int | None  # the peak that polling saw on the whole GPU, all processes


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyFigures:
    """How much of the time a GPU had a kernel running."""

    source: BusySource | None
    whole: Spread  # of the whole run
    working: Spread | None  # without start-up, end and long gaps; None: never worked
    known_s: float  # time for which it is known
    num_samples: int  # a lower bound
    pausing_ratio: float | None  # share of the working time in spans with a pause
    start_up_s: float  # until the first kernels
    gaps: tuple[Gap, ...]  # after start-up, by time; the longest if there are very many
    num_gaps: int  # in total
    gaps_s: float  # in total
    gaps_are_rare: bool  # they are phases of the run, not part of each step
    coarsest_s: float  # the longest span; shorter gaps can be hidden in it


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerFigures:
    """A GPU's power draw, and how it was throttled."""

    mean_w: float | None
    working_w: float | None  # mean while the run worked
    most_w: float | None
    limit_w: float | None
    energy_j: float | None  # of the GPU, all users
    most_c: int | None
    throttled_ratio: float | None  # share of the time with reduced clocks
    throttled_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """One GPU over the run."""

    gpu: int
    index: int  # NVML's
    cuda_index: int | None
    rank: int | None  # of the process that trained on it, if only one and reported
    name: str | None
    is_used: bool
    memory: MemoryFigures
    busy: BusyFigures | None
    power: PowerFigures
    shared_ratio: float | None  # share of the time with other users' processes
    most_others: int | None  # processes
    others_bytes: int | None  # their peak
    sm_active_ratio: float | None  # mean while working
    memory_active_ratio: float | None
    received_bytes: int | None  # over PCIe
    sent_bytes: int | None
    link_ratio: float | None  # share of the PCIe rate in the busier direction, while working


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """The steps that one rank reported."""

    rank: int
    num_steps: int
    step_s: float  # mean
    longest_step_s: float
    samples_per_s: float | None
    data_wait_ratio: float | None  # share of step time spent waiting for data


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """The run's processes."""

    num_cpus: int | None
    cpu_cores: float | None  # mean CPU seconds per second
    busiest_cpu_cores: float | None  # mean, of the busiest process
    memory_bytes: int | None  # peak
    num_processes: int | None  # peak
    others_cpu_cores: float | None  # mean, other processes, on the CPUs the run may use
    stolen_cpu_cores: float | None  # mean, by other virtual machines
    throttled_ratio: float | None  # share of the periods throttled by the CPU limit
    swapped_in_bytes: int | None  # read back from swap by the machine
    swapping_ratio: float | None  # share of the time with continuous swapping


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of the run that the report repeats."""

    at_s: float
    kind: EventKind
    text: str
    gpu: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """The conclusions about a run. `findings` has out of memory or not first, then by weight."""

    run: str  # its id
    command: tuple[str, ...]
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    lasted_s: float
    halted_s: float  # time the command was stopped, as by Ctrl-Z; excluded from figures
    halts: tuple[Halt, ...]  # by time; the longest if more than 200
    exit_code: int | None
    signal: str | None
    has_ended: bool
    findings: tuple[Finding, ...]
    gpus: tuple[GpuFigures, ...]  # GPUs the run used; all watched ones if it used none
    steps: tuple[StepFigures, ...]  # by rank
    host_figures: HostFigures
    phases: tuple[Phase, ...]  # by time; the longest of each name if more than 200
    num_phases: int  # in total
    marks: tuple[Mark, ...]
    num_marks: int  # in total; `marks` has the first ones

    @property
    def verdict(self) -> Finding:
        """Return the finding to look at first: a failure, else the leading one."""
        first, *rest = self.findings
        is_about_memory = first.kind in ("out-of-memory", "maybe-out-of-memory", "recovered")
        return first if is_about_memory or not rest else rest[0]

    def __repr__(self) -> str:
        """Return the findings without the many figures behind them."""
        findings = [f"  {found.sentence} [{found.confidence}]" for found in self.findings]
        lasted = format_duration(self.lasted_s)
        head = f"<Report of {self.run}: {shlex.join(self.command)!r}, {lasted}, {self._end()}"
        return "\n".join([head, *findings]) + ">"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def _end(self) -> str:
        if not self.has_ended:
            return "not seen to end"
        return f"ended by {self.signal}" if self.signal else f"exit {self.exit_code}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A figure in two reports."""

    what: str
    unit: Literal["bytes", "s", "ratio", "w", "per-s", "cores", "steps"]
    before: float | None
    after: float | None
    is_better: bool | None  # None: unknown, or (nearly) the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one run to another."""

    before: str  # its id
    after: str
    cautions: tuple[str, ...]  # differences that make the comparison less reliable
    changes: tuple[Change, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
