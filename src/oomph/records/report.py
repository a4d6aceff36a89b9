"""Report and what it is made of: what was concluded from a Run, on what evidence, and what to do.

Figures are of the whole run unless their name says otherwise, and means are weighted by time: a
span of ten seconds counts ten times as much as one of a second. `gpu` is a place in `Run.gpus`.
Kernel-active time is the share of the time with at least one kernel running. It is no efficiency:
one block on one multiprocessor counts like a full GPU.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from oomph.records.halts import Halt
from oomph.records.run import BusySource, EventKind, PeakSource
from oomph.units import format_duration

Confidence = Literal[
    "measured",  # by a source that can see it
    "inferred",  # from signs that usually mean it
    "weak",  # from signs that can mean something else as well
]

FindingKind = Literal[
    # How it ended: one of these stands first.
    "out-of-memory",
    "recovered",  # it ran out of memory, and went on
    "no-out-of-memory",
    "maybe-out-of-memory",  # it was killed, and nobody saw why
    "not-ended",
    # What makes the other figures worth less.
    "too-short",
    "no-gpu",
    "lost-gpu",
    "shared-gpu",
    # What must be mended first.
    "hang",  # steps, or kernels, have stopped
    "leak",  # GPU memory grows without an end
    "fragmentation",  # the same, but tensors do not need it
    "host-leak",
    "spill",  # GPU memory is full, and data moves over PCIe all the time
    "swapping",  # of the host
    # Why the GPU was not used to the full.
    "never-busy",
    "input-bound",
    "host-contention",  # others take the CPUs
    "cpu-limit",  # of the control group
    "pcie-bound",
    "pauses-in-step",  # the script does something else, or waits, within each step
    "launch-bound",
    "stalls",  # of some steps
    "slowing-down",
    "phases",
    "narrow-kernels",
    "memory-bound",
    "throttled",
    "imbalance",
    "unexplained",  # it was not busy, and nothing that was measured says why
    "busy",  # a kernel ran almost all the time, and nothing else was found
    # What is left.
    "head-room",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One conclusion."""

    kind: FindingKind
    sentence: str
    evidence: tuple[str, ...]
    confidence: Confidence
    advice: tuple[str, ...] = ()
    gpus: tuple[int, ...] = ()  # none: of the run as a whole; the evidence is of the first
    grows_by_ratio: float | None = None  # head-room: up to so many times the micro-batch
    unused_bytes: int | None = None  # head-room


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Of a figure over time."""

    mean: float
    p10: float
    p50: float
    p90: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """A stretch of at least two seconds in which (almost) no kernel ran."""

    began_s: float
    ended_s: float
    phase: str | None  # what the script was doing then, if it said so

    @property
    def lasted_s(self) -> float:
        return self.ended_s - self.began_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of the run that has a name: "evaluation"."""

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
    allocated_bytes: int | None  # by torch's tensors, at their most
    before_steps_bytes: int | None  # with model and optimizer, before the first step
    seen_bytes: int | None  # the most that polling saw of the GPU as a whole, by everybody


@dataclass(frozen=True, slots=True, kw_only=True)
class BusyFigures:
    """How much of the time a GPU had a kernel running."""

    source: BusySource | None
    whole: Spread  # of the whole run
    working: Spread | None  # without start-up, the end, and long gaps; None: it never worked
    known_s: float  # for how long it is known
    num_samples: int  # at least so many lie behind it
    pausing_ratio: float | None  # share of the working time in spans that hold a pause
    start_up_s: float  # until the first kernels
    gaps: tuple[Gap, ...]  # those after start-up, by time; of very many, the longest
    num_gaps: int  # in all
    gaps_s: float  # in all
    gaps_are_rare: bool  # phases of the run, and not the way it trains
    coarsest_s: float  # the longest span: shorter gaps can be hidden in it


@dataclass(frozen=True, slots=True, kw_only=True)
class PowerFigures:
    """What a GPU drew, and how it was held back."""

    mean_w: float | None
    working_w: float | None  # mean while the run worked
    most_w: float | None
    limit_w: float | None
    energy_j: float | None  # of the GPU, whoever used it
    most_c: int | None
    throttled_ratio: float | None  # share of the time with clocks held down
    throttled_by: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """One GPU over the run."""

    gpu: int
    index: int  # NVML's
    cuda_index: int | None
    rank: int | None  # of the process that trained on it, if it is one and has said so
    name: str | None
    is_used: bool
    memory: MemoryFigures
    busy: BusyFigures | None
    power: PowerFigures
    shared_ratio: float | None  # share of the time with processes of others on it
    most_others: int | None  # processes
    others_bytes: int | None  # the most that they held
    sm_active_ratio: float | None  # mean while working
    memory_active_ratio: float | None
    received_bytes: int | None  # over PCIe
    sent_bytes: int | None
    link_ratio: float | None  # of what PCIe carries, in the busier direction, while working


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFigures:
    """What one rank told about its steps."""

    rank: int
    num_steps: int
    step_s: float  # mean
    longest_step_s: float
    samples_per_s: float | None
    data_wait_ratio: float | None  # share of the steps' time that was spent waiting for data


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFigures:
    """The run's processes."""

    num_cpus: int | None
    cpu_cores: float | None  # mean: CPU seconds a second
    busiest_cpu_cores: float | None  # mean, of the busiest process
    memory_bytes: int | None  # the most
    num_processes: int | None  # the most
    others_cpu_cores: float | None  # mean, by everybody else, on the CPUs that the run may use
    stolen_cpu_cores: float | None  # mean, by other machines of the hypervisor
    throttled_ratio: float | None  # share of the periods in which the CPU limit held it back
    swapped_in_bytes: int | None  # that the machine read back from swap
    swapping_ratio: float | None  # share of the time in which it did so all along


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An event of the run that the report repeats."""

    at_s: float
    kind: EventKind
    text: str
    gpu: int | None


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Report:
    """A run, concluded. `findings` has out of memory or not first, then by weight."""

    run: str  # its id
    command: tuple[str, ...]
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    lasted_s: float
    halted_s: float  # of it the command stood still, as by Ctrl-Z: figures lack that time
    halts: tuple[Halt, ...]  # by time; of more than 200 the longest
    exit_code: int | None
    signal: str | None
    has_ended: bool
    findings: tuple[Finding, ...]
    gpus: tuple[GpuFigures, ...]  # those that the run used; all that were watched if it used none
    steps: tuple[StepFigures, ...]  # by rank
    host_figures: HostFigures
    phases: tuple[Phase, ...]  # by time; of more than 200 the longest of each name
    num_phases: int  # in all
    marks: tuple[Mark, ...]
    num_marks: int  # in all: `marks` are the first of them

    @property
    def verdict(self) -> Finding:
        """What to look at first: a failure, else the finding that leads."""
        first, *rest = self.findings
        is_told = first.kind in ("out-of-memory", "maybe-out-of-memory", "recovered")
        return first if is_told or not rest else rest[0]

    def __repr__(self) -> str:
        """What was found, and not the thousand figures that it rests on."""
        told = [f"  {found.sentence} [{found.confidence}]" for found in self.findings]
        lasted = format_duration(self.lasted_s)
        head = f"<Report of {self.run}: {shlex.join(self.command)!r}, {lasted}, {self._end()}"
        return "\n".join([head, *told]) + ">"

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
    is_better: bool | None  # None: it cannot be said, or it is (nearly) the same


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What changed from one run to another."""

    before: str  # its id
    after: str
    cautions: tuple[str, ...]  # what is not the same, so that figures say less
    changes: tuple[Change, ...]
    gone: tuple[Finding, ...]
    new: tuple[Finding, ...]
