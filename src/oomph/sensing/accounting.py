"""The driver's accounting -> Peak: the most memory that each process of a run ever held.

Exact, because the driver itself keeps the maximum, also of a process that has ended. It must
be on before the process starts (`sudo nvidia-smi -am 1`), and is off by default.
"""

from __future__ import annotations

from collections.abc import Iterable

from oomph.records.run import Peak
from oomph.sensing.nvml import Nvml, Refusal
from oomph.sensing.watched import Watch


def accounted_peaks(
    nvml: Nvml, watches: Iterable[Watch], run_pids: frozenset[int]
) -> tuple[Peak, ...]:
    """Of every process of the run on every GPU that keeps accounts."""
    return tuple(peak for watch in watches for peak in _of_gpu(nvml, watch, run_pids))


def _of_gpu(nvml: Nvml, watch: Watch, run_pids: frozenset[int]) -> list[Peak]:
    handle = watch.handle
    mode = nvml.ask_gpu(handle, "nvmlDeviceGetAccountingMode")
    if isinstance(mode, Refusal) or not mode:
        return []
    listed = nvml.ask_gpu(handle, "nvmlDeviceGetAccountingPids")
    if isinstance(listed, Refusal):
        return []
    found = []
    for pid in sorted(set(listed) & (run_pids | watch.occupants.run_pids)):
        stats = nvml.ask("nvmlDeviceGetAccountingStats", handle.pointer, pid)
        if not isinstance(stats, Refusal) and stats.maxMemoryUsage is not None:
            place = watch.identity.place
            found.append(
                Peak(source="accounting", gpu=place, pid=pid, used_bytes=stats.maxMemoryUsage)
            )
    return found
