"""Run and its parts: what happened while a command ran.

Times are seconds of the run's own clock, which starts with the run and never jumps. A *span* is a
stretch of time with its observations: short at first, merged into longer ones as they age, so that
a run of weeks stays small. Unreadable values are None.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from oomph.units import GIB, format_duration

# The source of kernel-active time.
BusySource = Literal[
    "buffered",  # the driver's sample buffer, without gaps
    "polled",  # sampled; anything shorter than the period can be missed
]

PeakSource = Literal[
    "torch",  # the allocator's counters in one process: exact
    "accounting",  # the driver's accounting of a process: exact
    "polled",  # sampled; a shorter peak can be missed
]

EventKind = Literal[
    "phase",  # text: "start-up", "training", "evaluation", "epoch 3", ...
    "lost",  # a GPU does not answer; the driver as a whole if `gpu` is None
    "back",  # it answers again
    "neighbour",  # another job's process appeared on a GPU of this run
    "out-of-memory",  # the run reported that it ran out of memory
    "warning",  # what could not be watched or stored
    "stopped",  # oomph stopped the command, because it has seen enough
    "halted",  # the command was suspended, as by Ctrl-Z, and can go on
    "resumed",  # it goes on
    "alert",  # something is going wrong during the run; each cause once
    "unstable",  # the training itself is: a StabilityWarning in words; each cause once
    "noise-scale",  # what is known of it, in words
]


# The driver does not buffer memory use, so it is sampled five times a second by default.
LOOKS_APART_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedGpu:
    """The fixed properties of a watched GPU."""

    index: int  # NVML's
    uuid: str | None
    name: str | None
    total_bytes: int | None
    power_limit_w: float | None
    busy_source: BusySource | None
    is_used: bool  # by this run, at any time
    cuda_index: int | None = None  # among the GPUs visible to the run
    looks_apart_s: float = LOOKS_APART_S  # sampling period of memory: shorter peaks can be missed
    link_bytes_per_s: float | None = None  # peak rate of its PCIe link, each way


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGpu:
    """A GPU as torch reports it in the script."""

    cuda_index: int
    name: str | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpan:
    """One GPU over a stretch of time."""

    gpu: int  # index into Run.gpus
    began_s: float
    ended_s: float
    used_bytes: int | None  # mean of the samples, all processes
    most_used_bytes: int | None
    run_bytes: int | None  # this run's processes, at the last sample
    others_bytes: int | None  # all other processes
    num_others: int | None  # processes of others
    busy_ratio: float | None  # mean share of the time with at least one kernel running
    least_busy_ratio: float | None  # of the driver's samples in the span
    most_busy_ratio: float | None
    power_w: float | None  # mean, from the energy counter if there is one
    temperature_c: int | None  # highest
    throttled_ratio: float | None  # share of the samples with reduced clocks
    throttled_by: tuple[str, ...] = ()  # "power", "heat", "hardware"
    sm_active_ratio: float | None = None  # GPM: Hopper and later
    memory_active_ratio: float | None = None  # GPM: share of the time with DRAM traffic
    received_bytes: int | None = None  # over PCIe
    sent_bytes: int | None = None  # over PCIe


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """The run's process tree over a stretch of time."""

    began_s: float
    ended_s: float
    cpu_cores: float | None  # CPU seconds per second, all its processes
    busiest_cpu_cores: float | None  # of the busiest process; 1.0: one thread that never waits
    memory_bytes: int | None  # resident, highest
    num_processes: int | None
    others_cpu_cores: float | None = None  # other processes, on the CPUs the run may use
    stolen_cpu_cores: float | None = None  # of those CPUs, by other virtual machines
    throttled_ratio: float | None = None  # share of the periods throttled by its CPU limit
    swapped_in_bytes: int | None = None  # read back from swap by the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """Some steps, as the training script reported them."""

    rank: int
    began_s: float
    ended_s: float
    num_steps: int
    num_samples: int | None
    step_s: float  # mean
    longest_step_s: float
    data_wait_s: float | None  # total time waiting for the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The peak memory of a process or a GPU, and its source."""

    source: PeakSource
    gpu: int | None  # index into Run.gpus
    rank: int | None = None
    pid: int | None = None
    allocated_bytes: int | None = None  # only known from torch
    used_bytes: int  # reserved by torch, or used as the driver counts
    before_steps_bytes: int | None = None  # with model and optimizer, before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a moment."""

    at_s: float
    kind: EventKind
    text: str
    gpu: int | None = None  # index into Run.gpus
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the command ended."""

    at_s: float
    exit_code: int | None  # as in a shell; None: the end was not seen
    signal: str | None = None  # "SIGKILL"
    out_of_memory: Literal["gpu", "host"] | None = None  # if it was seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that is known of a run. A running or kill -9'ed run has no ending."""

    id: str
    command: tuple[str, ...]  # with `with oomph.watching()`, the script's own
    directory: str | None  # where it was started
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    oomph_version: str
    num_cpus: int | None  # available to the run
    gpus: tuple[WatchedGpu, ...]
    gpu_spans: tuple[GpuSpan, ...]  # by time
    host_spans: tuple[HostSpan, ...]
    step_spans: tuple[StepSpan, ...]
    peaks: tuple[Peak, ...]
    events: tuple[Event, ...]
    ending: Ending | None
    last_seen_s: float  # time of the last write


# ---- Probe, Progress: how much of a run is wanted, and how far it is -----------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How much of the run is wanted; None: all of it."""

    time_s: float | None = None
    num_steps: int | None = None
    num_epochs: int | None = None

    @property
    def is_of_all(self) -> bool:
        return self.time_s is None and not self.counts

    @property
    def counts(self) -> bool:
        """Return whether it needs a script that reports its steps."""
        return self.num_steps is not None or self.num_epochs is not None

    def in_words(self) -> str:
        if self.num_steps is not None:
            return f"{self.num_steps} steps"
        if self.num_epochs is not None:
            return f"{self.num_epochs} epoch{'s' if self.num_epochs > 1 else ''}"
        return format_duration(self.time_s or 0.0)

    def is_seen(self, worked_s: float, progress: Progress) -> bool:
        """Return whether enough was seen. Time while the command was suspended does not count."""
        return (
            (self.time_s is not None and worked_s >= self.time_s)
            or (self.num_steps is not None and progress.num_steps >= self.num_steps)
            or (self.num_epochs is not None and progress.num_epochs >= self.num_epochs)
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the rank is that has reported the most."""

    num_steps: int = 0
    num_epochs: int = 0
    is_reported: bool = False


# ---- EmulatedRun: a command that ran with an emulated GPU, and whether it fitted.


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """A command that ran with an emulated GPU in each of its processes."""

    exit_code: int
    total_bytes: int  # of each process's GPU
    num_processes: int  # that reported on their GPU; 0 if none imported torch
    peak_allocated_bytes: int | None  # of the process with the highest peak
    peak_reserved_bytes: int | None
    num_out_of_memory: int

    @property
    def fits(self) -> bool | None:
        """Return whether it fitted; None if the GPU was not used."""
        return self.num_out_of_memory == 0 if self.num_processes else None


# ---- Pace: how training went recently, as the script itself saw it -------------------------------

SWITCH = "OOMPH_WATCHING"  # "off": scripts report nothing, as in a rehearsal


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Recent steps, the GPU that they ran on, and torch's peak so far."""

    num_steps: int
    step_s: float | None  # mean
    samples_per_s: float | None  # of this process
    data_wait_ratio: float | None  # share of the step; None: not measured
    gpu: WatchedGpu | None  # of this process
    span: GpuSpan | None  # of that GPU, over the same time
    gpu_problem: str | None  # why the GPU is unknown
    peak: Peak | None  # on that GPU, by torch

    @property
    def used_ratio(self) -> float | None:
        """Return the share of the GPU's memory in use, by all processes."""
        if self.gpu is None or self.span is None or self.span.used_bytes is None:
            return None
        return self.span.used_bytes / self.gpu.total_bytes if self.gpu.total_bytes else None

    def scalars(self) -> dict[str, float]:
        """Return at most eight figures for a logger, by the names they are logged under."""
        span = self.span
        figures = {
            "gpu/util": span.busy_ratio if span else None,
            "gpu/mem_used_ratio": self.used_ratio,
            "gpu/mem_peak_reserved_gib": self.peak.used_bytes / GIB if self.peak else None,
            "gpu/power_w": span.power_w if span else None,
            "gpu/sm_active": span.sm_active_ratio if span else None,
            "time/step_s": self.step_s,
            "time/data_wait_ratio": self.data_wait_ratio,
            "throughput/samples_s": self.samples_per_s,
        }
        return {name: figure for name, figure in figures.items() if figure is not None}


# ---- RunSummary: one line on a stored run, without reading all of it -----------------------------

RunState = Literal[
    "running",
    "ended",
    "unknown",  # its end was not recorded, because the watcher was killed
]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSummary:
    """A run as `oomph runs` lists it."""

    id: str
    path: str
    command: tuple[str, ...]
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    duration_s: float  # so far
    state: RunState
    exit_code: int | None
    signal: str | None
    out_of_memory: Literal["gpu", "host"] | None

    def __repr__(self) -> str:
        """Return one line, because `oomph.runs()` has hundreds."""
        end = f"exit {self.exit_code}" if self.state == "ended" else self.state
        if self.out_of_memory:
            end += f", {self.out_of_memory} out of memory"
        return (
            f"<RunSummary {self.id}: {shlex.join(self.command)!r},"
            f" {format_duration(self.duration_s)}, {end}>"
        )


# ---- Events -> when the command was suspended: neither work nor idle time ------------------------

Span = TypeVar("Span", GpuSpan, HostSpan)


@dataclass(frozen=True, slots=True)
class Halt:
    """A time in which the command was suspended."""

    began_s: float
    ended_s: float


def halts_of(events: Sequence[Event], end_s: float) -> tuple[Halt, ...]:
    """Return the halts by time; one without a seen end lasts to the end of the run.

    >>> at = lambda at_s, kind: Event(at_s=at_s, kind=kind, text="")
    >>> halts_of([at(3, "halted"), at(5, "resumed"), at(8, "halted")], 9.0)
    (Halt(began_s=3, ended_s=5), Halt(began_s=8, ended_s=9.0))
    """
    found, began_s = list[Halt](), None
    for event in sorted(events, key=lambda event: event.at_s):
        if event.kind == "halted" and began_s is None:
            began_s = event.at_s
        elif event.kind == "resumed" and began_s is not None:
            found.append(Halt(began_s, event.at_s))
            began_s = None
    if began_s is not None and began_s < end_s:
        found.append(Halt(began_s, end_s))
    return tuple(found)


def halted_s(halts: Sequence[Halt]) -> float:
    return sum(halt.ended_s - halt.began_s for halt in halts)


def outside(spans: Sequence[Span], halts: Sequence[Halt]) -> list[Span]:
    """Return the spans that do not lie in halts for most of their time."""
    return [span for span in spans if not _lies_in(span, halts)]


def shortened(span: StepSpan, halts: Sequence[Halt]) -> StepSpan:
    """Remove the halts within a step, because the script's own clock kept running.

    A halt that is longer than the longest step lay between steps, as in an evaluation.
    """
    stood_s = _common_s(span, halts)
    if not stood_s or span.longest_step_s < stood_s or span.num_steps < 1:
        return span
    step_s = max(span.step_s - stood_s / span.num_steps, 0.0)
    wait_s = span.data_wait_s
    if wait_s is not None and wait_s > step_s * span.num_steps:  # it was halted while it waited
        wait_s = max(wait_s - stood_s, 0.0)
    longest_s = max(span.longest_step_s - stood_s, step_s)
    return replace(span, step_s=step_s, longest_step_s=longest_s, data_wait_s=wait_s)


def pieces(span: StepSpan, halts: Sequence[Halt]) -> list[StepSpan]:
    """Return the span before, between and after the halts in it, each with the same figures."""
    inside = [one for one in halts if span.began_s < one.ended_s and one.began_s < span.ended_s]
    starts = [span.began_s, *(max(one.ended_s, span.began_s) for one in inside)]
    ends = [*(min(one.began_s, span.ended_s) for one in inside), span.ended_s]
    cut = [
        replace(span, began_s=began_s, ended_s=ended_s)
        for began_s, ended_s in zip(starts, ends, strict=True)
        if began_s < ended_s
    ]
    return cut or [span]


def _lies_in(span: GpuSpan | HostSpan, halts: Sequence[Halt]) -> bool:
    return _common_s(span, halts) > (span.ended_s - span.began_s) / 2


def _common_s(span: GpuSpan | HostSpan | StepSpan, halts: Sequence[Halt]) -> float:
    """Return for how long the span was halted."""
    common = (min(span.ended_s, one.ended_s) - max(span.began_s, one.began_s) for one in halts)
    return sum(max(seconds, 0.0) for seconds in common)
