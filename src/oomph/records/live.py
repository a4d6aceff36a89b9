"""Look, Job: the machine at one moment, as the live view has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from oomph.records.machine import Machine


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a process is part of, as far as its ancestors and its environment tell."""

    pid: int
    parent_pid: int | None
    launcher: str | None  # "torchrun", "accelerate", "deepspeed", "ray", "multiprocessing"
    launcher_pid: int | None
    # Only of this user's own processes: nobody looks into the environment of others'.
    run_id: str | None = None  # of `oomph watch -- COMMAND`
    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One look at everything. Busy is a mean since the look before, where there was one."""

    at: float  # seconds since the epoch
    machine: Machine
    jobs: tuple[Job, ...] = ()  # of the processes on its GPUs, as far as they can be seen
    visible: tuple[str, ...] | None = None  # UUIDs in CUDA's order; None: nothing is hidden
    sm_active_ratios: Mapping[str, float] = field(default_factory=dict)  # by UUID: Hopper and later
    notes: tuple[str, ...] = ()  # what cannot be watched, and why
