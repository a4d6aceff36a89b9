"""Machine, Device, Process, GpuReading: what hardware there is, and who has taken what of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomph.units import GIB

# this-run: this process, its children, or a process that carries this run's token.
# mine: this user's, of another run. unknown: there, but nobody could say whose.
Owner = Literal["this-run", "mine", "others", "unknown"]

# How the GPU behind a torch index was found; the last one is a guess, and says so.
MappedBy = Literal[
    "torch",  # CUDA runs in this process: torch told the UUID
    "uuid",  # CUDA_VISIBLE_DEVICES names it by UUID
    "pci-order",  # by index, where CUDA's order and NVML's are the same one
    "cuda",  # by index, and CUDA itself was asked for its order
    "assumed",  # by index; the orders may differ and CUDA could not be asked
]

MemorySource = Literal[
    "nvml-v2",  # used excludes what the driver reserves for itself
    "nvml-v1",  # used includes it: an older driver
    "unified",  # the GPU shares the host's memory: used is the sum of its processes
]

# Drivers, displays and idle contexts hold some hundred MiB on a GPU that nobody computes on.
# More than this that no process in sight holds means that one is there which we cannot see.
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
    note: str | None = None  # how the owner was found, or why it could not be


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU, or one MIG slice of a GPU, at one moment."""

    index: int  # NVML's: the order of the PCI bus, as nvidia-smi counts
    uuid: str | None
    name: str | None
    total_bytes: int | None
    used_bytes: int | None
    memory_source: MemorySource | None
    busy_ratio: float | None  # share of the last sample period with at least one kernel running
    temperature_c: int | None
    power_w: float | None
    processes: tuple[Process, ...] | None  # None: the list could not be read; () is nobody
    problem: str | None  # what could not be read, and why
    cuda_index: int | None = None  # among the visible ones, where that was asked for
    mig_enabled: bool | None = False  # None: that could not be read
    is_slice: bool = False
    slices: tuple[Device, ...] = ()  # of a GPU in MIG mode
    mig_instance: tuple[int, int] | None = None  # of a slice: GPU instance, compute instance

    @property
    def is_free(self) -> bool | None:
        """Is nobody on it? None: cannot be known.

        A display server is not somebody, a compute process is. Memory that is taken, or kernels
        that run, without a process to show for it: somebody may be there, in another container.
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
    is_readable: bool = True  # False: there may well be GPUs, but nobody answers for them
    driver_version: str | None = None
    emulated: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """What `gpu_utilisation` returns: one GPU, seen from one process that uses it."""

    nvml_index: int | None
    cuda_index: int | None
    uuid: str | None
    name: str | None
    total_bytes: int | None
    used_bytes: int | None
    this_process_bytes: int | None
    mine_bytes: int | None  # this user's processes, this one included
    others_bytes: int | None
    busy_ratio: float | None  # kernel-active share; says nothing of how well the GPU is used
    mapped_by: MappedBy | None
    problem: str | None
