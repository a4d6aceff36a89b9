"""A GPU that is here -> Calibration: what CUDA takes on it, measured from outside.

CUDA is started in a child, stage by stage, and NVML is read between the stages, so this process
never has a context. The driver's figure for the child is taken where it tells one. Where it does
not (WSL, some containers), what the GPU held before is subtracted, and that is refused as soon as
somebody else is on the GPU or its memory has moved.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomph.errors import Unreadable
from oomph.records.calibration import Calibration, MeasuredBy
from oomph.records.machine import Device, Machine
from oomph.sensing.cuda_child import CudaChild
from oomph.sensing.gpus import read_machine
from oomph.sensing.mapping import only_visible
from oomph.sensing.ownership import pids_are_the_hosts
from oomph.units import MIB, format_bytes

# What a driver takes and gives back by itself while a process comes and goes. Judgement.
_STILL_BYTES = 16 * MIB
_SETTLES_S, _LOOK_EVERY_S = 2.0, 0.1  # a driver frees a process's memory soon after its end


def kinds_here() -> tuple[tuple[Device, ...], str]:
    """One visible GPU of each name, a free one if there is one; and the driver's version."""
    machine = only_visible(read_machine())
    readable = [gpu for gpu in machine.gpus if gpu.uuid and gpu.name]
    if not readable:
        raise Unreadable(_why_none(machine))
    kinds: dict[str | None, Device] = {}
    for gpu in sorted(readable, key=lambda gpu: gpu.is_free is False):
        kinds.setdefault(gpu.name, gpu)
    return tuple(kinds.values()), machine.driver_version or "unknown"


def _why_none(machine: Machine) -> str:
    told = [machine.problem, *(gpu.problem for gpu in machine.gpus)]
    return "; ".join(filter(None, told)) or "there is no GPU that can be read"


def measure(gpu: Device, driver_version: str, *, with_rates: bool = True) -> Calibration:
    """Start CUDA on one GPU in a child, and tell what it took. Raises Unreadable."""
    uuid = str(gpu.uuid)
    with CudaChild(uuid) as probe:
        started = _checked(probe.next())
        before = _seen(uuid)
        bare, at_bare = probe.next(), _seen(uuid)
        loaded, at_loaded = probe.next(), _seen(uuid)
        own = _own_pid(before, at_loaded, probe.pid)
        has_neighbours = bool(before.others(own))
        rates = probe.next() if with_rates and not has_neighbours else {}
    taken = [_own_bytes(seen, own) for seen in (at_bare, at_loaded)]
    measured_by: MeasuredBy = "process"
    if None in taken:
        _check_nobody_moved(uuid, gpu, before, own)
        measured_by = "difference"
        taken = [seen.used_bytes - before.used_bytes for seen in (at_bare, at_loaded)]
    return Calibration(
        gpu_name=str(gpu.name),
        driver_version=driver_version,
        torch_version=started["torch_version"],
        cuda_version=started["cuda_version"],
        context_bytes=_beside_torch(taken[0], bare, gpu),
        context_with_libraries_bytes=_beside_torch(taken[1], loaded, gpu),
        total_bytes=bare["total_bytes"],
        matmul_flops=rates.get("matmul_flops", {}),
        bandwidth_bytes_per_s=rates.get("bandwidth_bytes_per_s"),
        measured_by=measured_by,
        measured_at=time.time(),
    )


def _checked(started: dict[str, Any]) -> dict[str, Any]:
    version = started["torch_version"]
    if started["cuda_version"] is None:
        raise Unreadable(
            f"torch {version} cannot use a GPU",
            because="it was built without CUDA",
            attempt="pip install torch, in the build for your driver",
        )
    if not started["is_available"]:
        raise Unreadable(
            f"torch {version} finds no GPU, though the driver has one",
            because=f"it was built for CUDA {started['cuda_version']}, or may not open the device",
            attempt="python -c 'import torch; torch.ones(1).cuda()', which says more",
        )
    return started


def _beside_torch(taken_bytes: int | None, stage: Mapping[str, Any], gpu: Device) -> int:
    context_bytes = (taken_bytes or 0) - int(stage["reserved_bytes"])
    if context_bytes <= 0:
        raise Unreadable(
            f"what CUDA takes on {gpu.name} cannot be read",
            because=f"the driver says {format_bytes(taken_bytes or 0)}, less than torch holds",
            attempt="oomph gpus, to see what the driver tells",
        )
    return context_bytes


# ---- what the driver says --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Seen:
    """One GPU at one moment: what is taken, and by which process (None: nobody tells)."""

    used_bytes: int
    by_pid: Mapping[int, int | None] | None
    computing: frozenset[int] = frozenset()

    def others(self, own: int | None) -> frozenset[int]:
        return self.computing - {own}


def _seen(uuid: str) -> _Seen:
    machine = read_machine()
    devices = [device for gpu in machine.gpus for device in (gpu, *gpu.slices)]
    found = next((device for device in devices if device.uuid == uuid), None)
    if found is None or found.used_bytes is None:
        because = machine.problem or (found.problem if found else "it is not listed any more")
        raise Unreadable("the memory of the GPU cannot be read", because=because)
    if found.processes is None:
        return _Seen(found.used_bytes, None)
    return _Seen(
        found.used_bytes,
        {process.pid: process.used_bytes for process in found.processes},
        frozenset(process.pid for process in found.processes if process.kind == "compute"),
    )


def _own_pid(before: _Seen, now: _Seen, child_pid: int) -> int | None:
    """The child in the driver's list: by number, or as the new one where numbers are the host's."""
    if now.by_pid is None:
        return None
    if not pids_are_the_hosts():
        return child_pid if child_pid in now.by_pid else None
    new = now.by_pid.keys() - (before.by_pid or {}).keys()
    return next(iter(new)) if len(new) == 1 else None


def _own_bytes(seen: _Seen, own: int | None) -> int | None:
    return None if own is None or seen.by_pid is None else seen.by_pid.get(own)


def _check_nobody_moved(uuid: str, gpu: Device, before: _Seen, own: int | None) -> None:
    """Refuse a difference that is not the child's alone. To be called when that has ended."""
    attempt = "again when nobody else is on it: oomph gpus --free names such a one"
    if before.others(own):
        raise Unreadable(
            f"what CUDA takes on {gpu.name} cannot be told from what others take",
            because=f"{len(before.others(own))} other processes are on it, and the driver does"
            " not tell what each one holds",
            attempt=attempt,
        )
    after = _settled(uuid, before)
    if abs(after.used_bytes - before.used_bytes) > _STILL_BYTES or after.others(own):
        raise Unreadable(
            f"somebody else's memory on {gpu.name} moved while it was measured",
            because=f"{format_bytes(before.used_bytes)} were taken before and"
            f" {format_bytes(after.used_bytes)} after, and the driver does not tell by whom",
            attempt=attempt,
        )


def _settled(uuid: str, before: _Seen) -> _Seen:
    """The GPU when what the child held is free again, or when that was waited for in vain."""
    until = time.monotonic() + _SETTLES_S
    after = _seen(uuid)
    while after.used_bytes - before.used_bytes > _STILL_BYTES and time.monotonic() < until:
        time.sleep(_LOOK_EVERY_S)
        after = _seen(uuid)
    return after
