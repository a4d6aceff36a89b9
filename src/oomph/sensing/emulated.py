"""A description such as "8xa100-80gb" -> a Machine that is not there, for demos and planning.

The GPUs are the catalogue's; the users and processes on them are made up, always the same
ones, and between them show what `oomph gpus` can say. The Machine is marked as emulated.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from oomph.errors import UsageError
from oomph.records.catalog import Found, GpuModel
from oomph.records.machine import Device, Machine, Owner, Process
from oomph.sensing.catalog import find
from oomph.units import MIB

_MOST_GPUS = 64
_COUNT_AND_NAME = re.compile(r"(?:(\d{1,9})\s*[x*\u00d7]\s*)?(.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Tenant:
    """Somebody made up, who holds a share of a GPU."""

    owner: Owner
    user: str | None
    command: str | None
    share: float
    hours: float | None


_MY_TRAINING = "python train.py --config base.yaml"
_SCENES: tuple[tuple[float, tuple[_Tenant, ...]], ...] = (
    (0.97, (_Tenant("mine", "you", _MY_TRAINING, 0.71, 2.2),)),
    (0.96, (_Tenant("mine", "you", _MY_TRAINING, 0.71, 2.2),)),
    (1.00, (_Tenant("others", "alice", "python finetune.py --lora-rank 16", 0.88, 51.0),)),
    (0.00, ()),
    (
        0.41,
        (
            _Tenant("others", "bob", "python -m ipykernel_launcher -f kernel.json", 0.12, 300.0),
            _Tenant("mine", "you", "python evaluate.py --split test", 0.31, 0.1),
        ),
    ),
    (0.00, ()),
    (0.64, (_Tenant("unknown", None, None, 0.55, None),)),
    (0.00, (_Tenant("others", "carol", "python serve.py", 0.93, 770.0),)),
)


def emulated_machine(description: str, now: float) -> Machine:
    """The Machine for "8xa100-80gb", or for a list such as "2xa100-80gb,t4"."""
    parts = [_part(part.strip()) for part in description.split(",")]
    total = sum(count for count, _ in parts)
    if total > _MOST_GPUS:
        raise UsageError(
            f"{total} GPUs are too many to emulate",
            because=f"the most is {_MOST_GPUS}",
            attempt=f"{_MOST_GPUS}x{parts[0][1].model.name}",
        )
    models = [found.model for count, found in parts for _ in range(count)]
    assumed = [found.assumed for _, found in parts if found.assumed]
    return Machine(
        gpus=tuple(_emulated_gpu(index, model, now) for index, model in enumerate(models)),
        emulated=True,
        problem="; ".join(assumed) or None,
    )


def _part(part: str) -> tuple[int, Found]:
    match = _COUNT_AND_NAME.fullmatch(part)
    count = int(match[1] or 1) if match else 0
    if match is None or not count or not match[2]:
        raise UsageError(
            f"{part!r:.80} does not describe a machine",
            because="a machine is a number of GPUs of a name, or a list of such",
            attempt="8xa100-80gb, or 2xa100-80gb,t4",
        )
    return count, find(match[2])


def _emulated_gpu(index: int, model: GpuModel, now: float) -> Device:
    total_bytes = model.measured_bytes or model.memory_bytes
    busy_ratio, tenants = _SCENES[index % len(_SCENES)]
    processes = tuple(
        _process(4000 + 100 * index + i, tenant, total_bytes, now)
        for i, tenant in enumerate(tenants)
    )
    return Device(
        index=index,
        uuid=f"GPU-{uuid.uuid5(uuid.NAMESPACE_OID, f'oomph emulated {index} {model.name}')}",
        name=model.title,
        total_bytes=total_bytes,
        used_bytes=4 * MIB + sum(process.used_bytes or 0 for process in processes),
        memory_source="nvml-v2",
        busy_ratio=busy_ratio,
        temperature_c=34 + round(35 * busy_ratio),
        power_w=None,  # the catalogue has no power figures
        processes=processes,
        problem=None,
    )


def _process(pid: int, tenant: _Tenant, total_bytes: int, now: float) -> Process:
    return Process(
        pid=pid,
        owner=tenant.owner,
        user=tenant.user,
        command=tenant.command,
        used_bytes=int(tenant.share * total_bytes) // MIB * MIB,
        started_at=None if tenant.hours is None else now - tenant.hours * 3600,
        kind="compute",
        note="a PID of another container: cannot tell whose" if tenant.user is None else None,
    )
