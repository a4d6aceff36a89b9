"""One NVML handle -> how much of its memory is taken, and by whom."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass

from oomph.records.machine import MemorySource, Process
from oomph.sensing.nvml import NOT_SUPPORTED, UNREADABLE, Handle, Nvml, Refusal
from oomph.sensing.ownership import Facts, facts_about
from oomph.sensing.problems import Problems
from oomph.sensing.processes import Listed, running_processes

_UNIFIED = "memory: shared with the host; used counts the GPU's processes only"


@dataclass(frozen=True, slots=True)
class Memory:
    total_bytes: int | None
    used_bytes: int | None
    source: MemorySource | None


_UNKNOWN = Memory(None, None, None)

# GPUs that have no memory of their own and whose driver therefore tells none (nvitop#208, #168;
# nvtop#411, #449). Any other GPU without a memory figure is simply unknown.
_INTEGRATED = re.compile(r"\b(GB10|Orin|Thor|Xavier|Tegra|Jetson|nvgpu)\b", re.IGNORECASE)


def read_memory(nvml: Nvml, handle: Handle) -> Memory | Refusal:
    """Used and total, as the newest function that the driver has tells them.

    Not through the binding's function of that name: gpustat 1.1.1 replaces it, for everybody in
    the process, by one that takes no version.
    """
    info = nvml.constant("c_nvmlMemory_v2_t")(version=nvml.constant("nvmlMemory_v2"))
    source: MemorySource = "nvml-v2"
    refusal = nvml.call_gpu(handle, "nvmlDeviceGetMemoryInfo_v2", ctypes.byref(info))
    if refusal and refusal.is_missing:
        info = nvml.constant("c_nvmlMemory_t")()
        source = "nvml-v1"
        refusal = nvml.call_gpu(handle, "nvmlDeviceGetMemoryInfo", ctypes.byref(info))
    if refusal:
        return refusal
    if not info.total:  # Jetson answers with success, and zeros
        return nvml.refuse(NOT_SUPPORTED)
    if info.used > info.total:
        return Refusal(UNREADABLE, "the driver's figures make no sense: used is above total")
    return Memory(info.total, info.used, source)


def read_processes(
    nvml: Nvml, handle: Handle, memory: Memory | Refusal, problems: Problems
) -> tuple[Process, ...] | None:
    """Who is on it; None if that cannot be told. Nobody is the empty tuple."""
    total_bytes = None if isinstance(memory, Refusal) else memory.total_bytes
    listed = running_processes(nvml, handle, total_bytes)
    if isinstance(listed, Refusal):
        problems.add("processes", listed)
        return None
    return tuple(process_of(process, facts_about(process.pid)) for process in listed)


def settle_memory(
    memory: Memory | Refusal,
    processes: tuple[Process, ...] | None,
    problems: Problems,
    *,
    name: str | None = None,
) -> Memory:
    """The memory as read, or what can be said of it where the driver does not tell."""
    if not isinstance(memory, Refusal):
        return memory
    if memory.code == NOT_SUPPORTED and name and _INTEGRATED.search(name):
        return _unified_memory(processes, problems)
    problems.add("memory", memory)
    return _UNKNOWN


def _unified_memory(processes: tuple[Process, ...] | None, problems: Problems) -> Memory:
    """A GPU with no memory of its own has what its processes hold and what the host has left."""
    import psutil

    problems.note(_UNIFIED)
    used_bytes = sum_bytes(processes)
    if used_bytes is None:
        return Memory(None, None, "unified")
    return Memory(used_bytes + psutil.virtual_memory().available, used_bytes, "unified")


def sum_bytes(processes: tuple[Process, ...] | None) -> int | None:
    """What they hold together; unknown as soon as one part of it is."""
    if processes is None:
        return None
    total_bytes = 0
    for process in processes:
        if process.used_bytes is None:
            return None
        total_bytes += process.used_bytes
    return total_bytes


def process_of(listed: Listed, facts: Facts) -> Process:
    """What the driver lists and what the system tells of it, as one."""
    return Process(
        pid=listed.pid,
        owner=facts.owner,
        user=facts.user,
        command=facts.command,
        used_bytes=listed.used_bytes,
        started_at=facts.started_at,
        kind=listed.kind,
        note=facts.note,
    )
