"""A torch device -> GpuReading: its GPU, seen from this process. The hot path.

After the first call the GPU is known, and a reading is four NVML calls and one look at
/proc for each process on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

from oomph.errors import OomphError
from oomph.records.machine import NOBODYS_BYTES, GpuReading, Owner, Process
from oomph.sensing.gpus import NO_BUSY_RATIO_UNDER_MIG, read_busy_ratio
from oomph.sensing.mapping import Target, environment, find_target
from oomph.sensing.nvml import Nvml, with_nvml
from oomph.sensing.occupancy import read_memory, read_processes, settle_memory, sum_bytes
from oomph.sensing.ownership import pids_are_the_hosts
from oomph.sensing.problems import Problems
from oomph.sensing.torch_cuda import cuda_index_of, held_by_torch, running_torch
from oomph.units import GIB, format_bytes

# The CUDA context beside torch's own memory: 0.25 to 1.8 GiB were published (V100, A100,
# RTX 3090; torch 1.8 to 2.7).
_MOST_CONTEXT_BYTES = 2 * GIB

_NOTHING_READ = GpuReading(
    nvml_index=None,
    cuda_index=None,
    uuid=None,
    name=None,
    total_bytes=None,
    used_bytes=None,
    this_process_bytes=None,
    mine_bytes=None,
    others_bytes=None,
    busy_ratio=None,
    mapped_by=None,
    problem=None,
)


def read_gpu(device: Any = None) -> GpuReading:
    """The GPU that torch calls `device`; where that cannot be read, `problem` says why."""
    try:
        return with_nvml(lambda nvml: _read(nvml, _target(nvml, device)))
    except OomphError as error:
        return replace(_NOTHING_READ, problem=error.in_one_line())
    except Exception as error:  # noqa: BLE001 - torch after a CUDA error, say: it must not end a run
        told = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(_NOTHING_READ, problem=told)


def _target(nvml: Nvml, device: Any) -> Target:
    """The handle for a device, looked up anew when anything that decides it has changed."""
    index = cuda_index_of(device)
    torch = running_torch()
    if torch is not None and index is None:
        index = torch.cuda.current_device()
    decided_by = (index, torch is not None, *environment())
    target: Target | None = nvml.kept.get(decided_by)
    if target is None:
        target = nvml.kept[decided_by] = find_target(nvml, index)
    return target


def _read(nvml: Nvml, target: Target) -> GpuReading:
    handle, problems = target.handle, Problems()
    if target.problem:
        problems.note(target.problem)
    is_slice = target.shown.slice is not None
    if is_slice:
        problems.note(NO_BUSY_RATIO_UNDER_MIG)
    busy_ratio = None if is_slice else read_busy_ratio(nvml, handle, problems)
    memory = read_memory(nvml, handle)
    processes = read_processes(nvml, handle, memory, problems)
    settled = settle_memory(memory, processes, problems, name=target.shown.gpu.name)
    shares = _shares(processes, settled.used_bytes, target.cuda_index, problems)
    return GpuReading(
        nvml_index=target.shown.gpu.index,
        cuda_index=target.cuda_index,
        uuid=target.shown.uuid,
        name=target.shown.gpu.name,
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        this_process_bytes=shares.this_process_bytes,
        mine_bytes=shares.mine_bytes,
        others_bytes=shares.others_bytes,
        busy_ratio=busy_ratio,
        mapped_by=target.mapped_by,
        problem=problems.told(),
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """Who holds how much; None as soon as somebody may be there whom we cannot place."""

    this_process_bytes: int | None = None
    mine_bytes: int | None = None
    others_bytes: int | None = None


def _shares(
    processes: tuple[Process, ...] | None,
    used_bytes: int | None,
    cuda_index: int,
    problems: Problems,
) -> Shares:
    if processes is None:
        return Shares()
    held_bytes = held_by_torch(cuda_index)
    processes = _find_myself(processes, held_bytes, problems)
    this_process = tuple(process for process in processes if _is_this_process(process))
    unknown = tuple(process for process in processes if process.owner == "unknown")
    if unknown:
        problems.note(_whose(unknown))
    is_listed = bool(this_process) or (not held_bytes and not unknown)
    this_process_bytes = sum_bytes(this_process) if is_listed else None
    if unknown or not is_listed or _is_somebody_hidden(processes, used_bytes, problems):
        return Shares(this_process_bytes)
    return Shares(
        this_process_bytes,
        _bytes_of(processes, "this-run", "mine"),
        _bytes_of(processes, "others"),
    )


def _bytes_of(processes: tuple[Process, ...], *owners: Owner) -> int | None:
    return sum_bytes(tuple(process for process in processes if process.owner in owners))


def _is_somebody_hidden(
    processes: tuple[Process, ...], used_bytes: int | None, problems: Problems
) -> bool:
    """Is memory taken that no process in the list holds?"""
    listed_bytes = sum_bytes(processes)
    if used_bytes is None or listed_bytes is None or used_bytes - listed_bytes <= NOBODYS_BYTES:
        return False
    hidden = format_bytes(used_bytes - listed_bytes)
    problems.note(f"{hidden} are held by no process in sight: another container?")
    return True


def _is_this_process(process: Process) -> bool:
    is_recognised = process.note == _RECOGNISED
    return is_recognised or (process.pid == os.getpid() and process.owner == "this-run")


def _whose(unknown: tuple[Process, ...]) -> str:
    held = sum_bytes(unknown)
    amount = "" if held is None else f", which hold {format_bytes(held)}"
    return f"cannot tell whose {len(unknown)} of the processes are{amount} ({unknown[0].note})"


# ---- in a container --------------------------------------------------------------------------

_RECOGNISED = "recognised by what torch holds"


def _find_myself(
    processes: tuple[Process, ...], held_bytes: int, problems: Problems
) -> tuple[Process, ...]:
    """Among PIDs of the host, the process that must be this one, if there is just one such.

    It must hold what torch holds here, and a context beside it.
    """
    if not held_bytes or not pids_are_the_hosts():
        return processes
    fitting = [
        process
        for process in processes
        if process.used_bytes is not None
        and held_bytes <= process.used_bytes <= held_bytes + _MOST_CONTEXT_BYTES
    ]
    if len(fitting) != 1:
        return processes
    me = fitting[0]
    problems.note(f"this process inferred to be PID {me.pid} of the host")
    recognised = replace(me, owner="this-run", note=_RECOGNISED)
    return tuple(recognised if process is me else process for process in processes)
