"""A torch device -> GpuReading: its GPU, seen from this process. The hot path.

After the first call the GPU is known; a reading then takes four NVML calls and one look at /proc
for each process on it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from oomph.errors import OomphError
from oomph.records.machine import NOBODYS_BYTES, GpuReading, Owner, Process
from oomph.sensing.backends import Backend
from oomph.sensing.backends.session import with_backend
from oomph.sensing.devices import (
    NO_BUSY_RATIO_UNDER_MIG,
    Problems,
    read_busy_ratio,
    read_processes,
    settle_memory,
    sum_bytes,
)
from oomph.sensing.mapping import MappedGpu, environment, find_mapped
from oomph.sensing.ownership import pids_are_the_hosts
from oomph.sensing.running_torch import cuda_index_of, reserved_bytes, running_torch
from oomph.units import GIB, format_bytes

# Size of a CUDA context next to torch's own memory: published figures are 0.25 to 1.8 GiB (V100,
# A100, RTX 3090; torch 1.8 to 2.7).
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


def read_gpu(device: object = None) -> GpuReading:
    """Read the GPU that torch calls `device`; if that fails, `problem` says why."""
    try:
        return with_backend(lambda backend: _read(_mapped(backend, device)))
    except OomphError as error:
        return replace(_NOTHING_READ, problem=error.in_one_line())
    except Exception as error:  # noqa: BLE001 - torch after a CUDA error, say: it must not end a run
        problem = " ".join(f"{type(error).__name__}: {error}".split())
        return replace(_NOTHING_READ, problem=problem)


def _mapped(backend: Backend, device: object) -> MappedGpu:
    index, torch = cuda_index_of(device), running_torch()
    if index is None:
        index = 0 if torch is None else torch.cuda.current_device()
    return find_mapped(backend, index, torch, environment())


def _read(mapped: MappedGpu) -> GpuReading:
    problems, shown = Problems(), mapped.shown
    if mapped.problem:
        problems.note(mapped.problem)
    if shown.slice is not None:
        problems.note(NO_BUSY_RATIO_UNDER_MIG)
    busy_ratio = None if shown.slice is not None else read_busy_ratio(mapped.gpu, problems)
    memory = mapped.gpu.memory()
    processes = read_processes(mapped.gpu, memory, problems)
    settled = settle_memory(memory, processes, problems, name=shown.gpu.name)
    shares = _shares(processes, settled.used_bytes, mapped.cuda_index, problems)
    return GpuReading(
        nvml_index=shown.gpu.index,
        cuda_index=mapped.cuda_index,
        uuid=shown.uuid,
        name=shown.gpu.name,
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        this_process_bytes=shares.this_process_bytes,
        mine_bytes=shares.mine_bytes,
        others_bytes=shares.others_bytes,
        busy_ratio=busy_ratio,
        mapped_by=mapped.mapped_by,
        problem=problems.in_words(),
    )


@dataclass(frozen=True, slots=True)
class Shares:
    """How much memory each party holds; None if there may be a process with an unknown owner."""

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
    held_bytes = reserved_bytes(cuda_index)
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
    """Return whether memory is in use that no listed process holds."""
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
    """Mark this process in a list of host PIDs, if exactly one entry can be it.

    An entry can be it if it holds what torch holds here, plus the size of a CUDA context.
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
