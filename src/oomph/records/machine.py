"""Machine, Device, Process, GpuReading: the hardware, and who uses how much of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from oomph.records.run import GpuSpan, WatchedGpu
from oomph.units import GIB

# this-run: this process, its children, or a process with this run's token. mine: this user's, from
# another run. unknown: present, but its owner is not known.
Owner = Literal["this-run", "mine", "others", "unknown"]

# How the GPU behind a torch index was found; "assumed" is a guess.
MappedBy = Literal[
    "torch",  # CUDA runs in this process, and torch reported the UUID
    "uuid",  # CUDA_VISIBLE_DEVICES names it by UUID
    "pci-order",  # by index; CUDA and NVML use the same order
    "cuda",  # by index; CUDA was asked for its order
    "assumed",  # by index; CUDA's order may differ and could not be asked
]

MemorySource = Literal[
    "nvml-v2",  # `used` excludes the driver's own reserve
    "nvml-v1",  # `used` includes it (older drivers)
    "unified",  # the GPU shares host memory; `used` is the sum over its processes
]

# Drivers, displays and idle contexts hold a few hundred MiB on an idle GPU. If more than this
# belongs to no visible process, there is a process that oomph cannot see.
NOBODYS_BYTES = GIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process on one GPU."""

    pid: int
    owner: Owner
    user: str | None
    command: str | None
    used_bytes: int | None
    started_at: float | None  # seconds since the epoch
    kind: Literal["compute", "graphics"]
    note: str | None = None  # how the owner was found, or why not
    # Means of the last seconds; None where nobody asked, or it cannot be read.
    sm_ratio: float | None = None  # share of the GPU's multiprocessors over time, by the driver
    cpu_cores: float | None = None  # CPU seconds per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or one MIG slice of a GPU, at one moment."""

    index: int  # NVML's: PCI bus order, as in nvidia-smi
    uuid: str | None
    name: str | None
    total_bytes: int | None
    used_bytes: int | None
    memory_source: MemorySource | None
    busy_ratio: float | None  # share of the last sample period with at least one kernel running
    temperature_c: int | None
    power_w: float | None
    processes: tuple[Process, ...] | None  # None: could not be read; (): no processes
    problem: str | None  # what could not be read, and why
    cuda_index: int | None = None  # among the visible GPUs, if requested
    mig_enabled: bool | None = False  # None: could not be read
    is_slice: bool = False
    slices: tuple[Device, ...] = ()  # of a GPU in MIG mode
    mig_instance: tuple[int, int] | None = None  # of a slice: GPU instance, compute instance
    power_limit_w: float | None = None  # power cap

    @property
    def is_free(self) -> bool | None:
        """Return whether the GPU is free; None if unknown.

        A display server does not count as a user, a compute process does. If memory is taken or
        kernels run without a visible process, there may be a user in another container.
        """
        if self.processes is None or self.used_bytes is None or self.mig_enabled is None:
            return None
        if any(process.kind == "compute" for process in self.processes):
            return False
        if self.processes:
            return self.used_bytes <= NOBODYS_BYTES
        return None if self.used_bytes > NOBODYS_BYTES or self.busy_ratio else True


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The GPUs of one machine at one moment."""

    gpus: tuple[Device, ...]
    problem: str | None = None  # why there are no GPUs, or why there may be more
    is_readable: bool = True  # False: there may be GPUs, but they cannot be read
    driver_version: str | None = None
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What `gpu_utilisation` returns: one GPU, seen from a process that uses it."""

    nvml_index: int | None
    cuda_index: int | None
    uuid: str | None
    name: str | None
    total_bytes: int | None
    used_bytes: int | None
    this_process_bytes: int | None
    mine_bytes: int | None  # this user's processes, including this one
    others_bytes: int | None
    busy_ratio: float | None  # kernel-active share; not a measure of efficiency
    mapped_by: MappedBy | None
    problem: str | None


# ---- Look, Job: the machine at one moment, for the live view -------------------------------------


@dataclass(frozen=True, slots=True)
class Ancestor:
    """A process above a process on a GPU."""

    pid: int
    command: str | None  # None: not visible


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLook:
    """The CPUs and the memory of the machine. A figure that cannot be read is None."""

    num_cpus: int
    cpu_ratio: float | None  # mean of the last seconds
    total_bytes: int | None
    used_bytes: int | None  # what is not free for a new process
    load: float | None  # processes that run or wait to, mean of a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """The job that a process belongs to, judging from its ancestors and its environment."""

    pid: int
    parent_pid: int | None
    launcher: str | None  # "torchrun", "accelerate", "deepspeed", "ray", "multiprocessing"
    launcher_pid: int | None
    ancestors: tuple[Ancestor, ...] = ()  # the parent first, without PID 1
    # Only for this user's own processes: the environment of others is not read.
    run_id: str | None = None  # of `oomph watch -- COMMAND`
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at everything. Busy is the mean since the previous look, if there was one."""

    at: float  # seconds since the epoch
    machine: Machine
    jobs: tuple[Job, ...] = ()  # of the visible processes on its GPUs
    visible: tuple[str, ...] | None = (
        None  # UUIDs in CUDA's order, "" if lost; None: all are visible
    )
    sm_active_ratios: Mapping[str, float] = field(default_factory=dict)  # by UUID: Hopper and later
    notes: tuple[str, ...] = ()  # what cannot be watched, and why
    host: HostLook | None = None  # not of an emulated machine


# ---- Sighting, SeenGpu, Totals: a watched machine at one moment, with totals ---------------------
# A total only grows, from the moment watching began. The difference of two totals covers all the
# time between them, however rarely they are read.


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Totals of one GPU since the watch began. A figure that was never known is None."""

    num_spans: int = 0
    watched_s: float = 0.0  # in total
    busy_known_s: float = 0.0  # with known kernel-active time
    active_s: float | None = None  # with at least one kernel running
    energy_j: float | None = None
    received_bytes: int | None = None  # over PCIe
    throttled_s: Mapping[str, float] = field(default_factory=dict)  # by "power", "heat", ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenGpu:
    """One GPU, or one MIG slice of a GPU."""

    watched: WatchedGpu
    device: Device
    span: GpuSpan | None  # the last second; None: no answer
    totals: Totals


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """The watched machine at one moment."""

    number: int  # counts from 0
    at: float  # seconds since the epoch
    gpus: tuple[SeenGpu, ...]
    problem: str | None  # why there are no GPUs, or why their figures are old
    notes: tuple[str, ...] = ()  # what cannot be watched, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What is stored of a Sighting: figures of its GPUs, in order."""

    at: float  # seconds since the epoch
    used_bytes: tuple[int | None, ...]
    busy_ratios: tuple[float | None, ...]
    power_w: tuple[float | None, ...]
