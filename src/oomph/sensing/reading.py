"""A torch device -> GpuReading: its GPU, seen from this process. The hot path.

After the first call the GPU is known, and a reading is four NVML calls and one look at
/proc for each process on it.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from oomph.errors import OomphError
from oomph.records.machine import GpuReading, Owner, Process
from oomph.sensing.gpus import NO_BUSY_RATIO_UNDER_MIG, read_busy_ratio
from oomph.sensing.mapping import Target, find_target
from oomph.sensing.nvml import Nvml, with_nvml
from oomph.sensing.occupancy import read_memory, read_processes, settle_memory, sum_bytes
from oomph.sensing.ownership import pids_are_the_hosts
from oomph.sensing.problems import Problems
from oomph.sensing.torch_cuda import running_torch
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


_targets: dict[tuple[Any, ...], tuple[Nvml, Target]] = {}


def _target(nvml: Nvml, device: Any) -> Target:
    """The handle for a device, looked up anew when anything that decides it has changed."""
    torch = running_torch()
    if torch is not None and device is None:
        device = torch.cuda.current_device()
    order = (os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER"))
    decided_by = (str(device), torch is not None, *order)
    if decided_by not in _targets or _targets[decided_by][0] is not nvml:
        _targets[decided_by] = (nvml, find_target(nvml, device))
    return _targets[decided_by][1]


def _read(nvml: Nvml, target: Target) -> GpuReading:
    handle, problems = target.handle, Problems()
    if target.problem:
        problems.note(target.problem)
    is_mig = target.shown.slice is not None
    if is_mig:
        problems.note(NO_BUSY_RATIO_UNDER_MIG)
    busy_ratio = None if is_mig else read_busy_ratio(nvml, handle, problems)
    memory = read_memory(nvml, handle)
    processes = read_processes(nvml, handle, memory, problems)
    settled = settle_memory(memory, processes, problems, is_mig=is_mig)
    processes = _find_myself(processes, target, problems)
    return GpuReading(
        nvml_index=target.shown.gpu.index,
        cuda_index=target.cuda_index,
        uuid=target.shown.uuid,
        name=target.shown.gpu.name,
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        this_process_bytes=_bytes_of_this_process(processes),
        mine_bytes=_bytes_of(processes, "this-run", "mine"),
        others_bytes=_bytes_of(processes, "others"),
        busy_ratio=busy_ratio,
        mapped_by=target.mapped_by,
        problem=problems.told(),
    )


def _bytes_of(processes: tuple[Process, ...] | None, *owners: Owner) -> int | None:
    """What these owners hold; unknown while there is a process that may be theirs."""
    if processes is None or any(process.owner == "unknown" for process in processes):
        return None
    return sum_bytes(tuple(process for process in processes if process.owner in owners))


def _bytes_of_this_process(processes: tuple[Process, ...] | None) -> int | None:
    if processes is None:
        return None
    mine = tuple(process for process in processes if _is_this_process(process))
    if not mine and any(process.owner == "unknown" for process in processes):
        return None
    return sum_bytes(mine)


def _is_this_process(process: Process) -> bool:
    is_recognised = process.note == _RECOGNISED
    return is_recognised or (process.pid == os.getpid() and process.owner == "this-run")


# ---- in a container --------------------------------------------------------------------------

_RECOGNISED = "recognised by what torch holds"


def _find_myself(
    processes: tuple[Process, ...] | None, target: Target, problems: Problems
) -> tuple[Process, ...] | None:
    """Among PIDs of the host, the process that must be this one, if there is just one such."""
    unknown = [process for process in processes or () if process.owner == "unknown"]
    if not unknown or processes is None:
        return processes
    me = _must_be_me(unknown, alone=len(processes) == 1, target=target)
    if me is not None:
        problems.note(f"this process inferred to be PID {me.pid} of the host")
        unknown.remove(me)
        recognised = replace(me, owner="this-run", note=_RECOGNISED)
        processes = tuple(recognised if process is me else process for process in processes)
    if unknown:
        problems.note(_whose(unknown))
    return processes


def _must_be_me(unknown: list[Process], *, alone: bool, target: Target) -> Process | None:
    torch = running_torch()
    if torch is None or not pids_are_the_hosts():
        return None
    if alone:
        return unknown[0]
    reserved_bytes = torch.cuda.memory_reserved(target.cuda_index)
    fitting = [
        process
        for process in unknown
        if process.used_bytes is not None
        and reserved_bytes <= process.used_bytes <= reserved_bytes + _MOST_CONTEXT_BYTES
    ]
    return fitting[0] if len(fitting) == 1 else None


def _whose(unknown: list[Process]) -> str:
    held = sum_bytes(tuple(unknown))
    amount = "" if held is None else f", which hold {format_bytes(held)}"
    return f"cannot tell whose {len(unknown)} of the processes are{amount} ({unknown[0].note})"
