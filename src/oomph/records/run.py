"""Run and what it is made of: what really happened while a command ran.

Times are seconds of the run's own clock, which starts with the run and never jumps. A *span* is a
stretch of time with what was seen in it: short at first, merged into longer ones as they age, so
that a run of weeks stays small. What nobody could read is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Where a figure of kernel-active time comes from.
BusySource = Literal[
    "buffered",  # the driver's own buffer of samples: no gap between them
    "polled",  # looked at now and then: what is shorter than the period can be missed
]

PeakSource = Literal[
    "torch",  # the allocator's own counters, of one process: exact
    "accounting",  # the driver's accounting of a process: exact
    "polled",  # looked at now and then: a shorter peak can be missed
]

EventKind = Literal[
    "phase",  # text: "start-up", "training", "evaluation", "epoch 3", ...
    "lost",  # a GPU, or NVML as a whole where `gpu` is None, does not answer
    "back",  # it answers again
    "neighbour",  # another job's process came to a GPU of this run
    "out-of-memory",  # the run says that it ran out of memory
    "warning",  # what could not be watched or kept, in words
    "stopped",  # oomph stopped the command, because what was asked for has been seen
    "halted",  # the command stands still, as by Ctrl-Z, and can go on
    "resumed",  # it goes on
    "alert",  # something goes wrong while it runs, in words; each cause once
]


# Memory has no buffer in the driver: it is looked at five times a second, unless a run says else.
LOOKS_APART_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchedGpu:
    """A GPU that was watched, as far as it does not change."""

    index: int  # NVML's
    uuid: str | None
    name: str | None
    total_bytes: int | None
    power_limit_w: float | None
    busy_source: BusySource | None
    is_used: bool  # by this run, at any time
    cuda_index: int | None = None  # among those that the run sees
    looks_apart_s: float = LOOKS_APART_S  # at its memory: what is shorter can be missed
    link_bytes_per_s: float | None = None  # what its PCIe link carries at most, each way


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchGpu:
    """A GPU as torch knows it, in the script."""

    cuda_index: int
    name: str | None
    total_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSpan:
    """One GPU over a stretch of time."""

    gpu: int  # its place in Run.gpus
    began_s: float
    ended_s: float
    used_bytes: int | None  # mean of the looks, by everybody
    most_used_bytes: int | None
    run_bytes: int | None  # of this run's processes, at the last look
    others_bytes: int | None  # of everybody else's
    num_others: int | None  # processes that are not of this run
    busy_ratio: float | None  # mean share of the time with at least one kernel running
    least_busy_ratio: float | None  # of the driver's samples in the span
    most_busy_ratio: float | None
    power_w: float | None  # mean, by the energy counter where there is one
    temperature_c: int | None  # highest
    throttled_ratio: float | None  # share of the looks at which clocks were held down
    throttled_by: tuple[str, ...] = ()  # "power", "heat", "hardware"
    sm_active_ratio: float | None = None  # GPM: Hopper and later
    memory_active_ratio: float | None = None  # GPM: share of the time that DRAM was moving data
    received_bytes: int | None = None  # over PCIe
    sent_bytes: int | None = None  # over PCIe


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpan:
    """The run's process tree over a stretch of time."""

    began_s: float
    ended_s: float
    cpu_cores: float | None  # CPU seconds a second, of all its processes
    busiest_cpu_cores: (
        float | None
    )  # of the busiest process alone: 1.0 is a thread that never waits
    memory_bytes: int | None  # resident, highest
    num_processes: int | None
    others_cpu_cores: float | None = None  # by everybody else, on the CPUs that the run may use
    stolen_cpu_cores: float | None = None  # of those CPUs, by other machines of the hypervisor
    throttled_ratio: float | None = None  # share of the periods in which its CPU limit held it back
    swapped_in_bytes: int | None = None  # that the machine read back from swap


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpan:
    """What the training script told about some of its steps."""

    rank: int
    began_s: float
    ended_s: float
    num_steps: int
    num_samples: int | None
    step_s: float  # mean
    longest_step_s: float
    data_wait_s: float | None  # in all: waiting for the loader


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The most memory of a process, or of a GPU, and who says so."""

    source: PeakSource
    gpu: int | None  # its place in Run.gpus
    rank: int | None = None
    pid: int | None = None
    allocated_bytes: int | None = None  # torch alone knows it
    used_bytes: int  # reserved by torch, or used as the driver counts
    before_steps_bytes: int | None = None  # with model and optimizer, before the first step


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened at a moment."""

    at_s: float
    kind: EventKind
    text: str
    gpu: int | None = None  # its place in Run.gpus
    rank: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the command ended."""

    at_s: float
    exit_code: int | None  # as a shell reports it; None: it was not seen to end
    signal: str | None = None  # "SIGKILL"
    out_of_memory: Literal["gpu", "host"] | None = None  # as far as it could be seen


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """All that is known of a run. While it goes on, and after a kill -9, it has no ending."""

    id: str
    command: tuple[str, ...]  # of `with oomph.watching()`, the script's own
    directory: str | None  # where it was started
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    oomph_version: str
    num_cpus: int | None  # that the run may use
    gpus: tuple[WatchedGpu, ...]
    gpu_spans: tuple[GpuSpan, ...]  # by time
    host_spans: tuple[HostSpan, ...]
    step_spans: tuple[StepSpan, ...]
    peaks: tuple[Peak, ...]
    events: tuple[Event, ...]
    ending: Ending | None
    last_seen_s: float  # until when something was written
