"""The GPU library -> Machine, Device: every GPU, what it is doing and who is using it.

A figure that cannot be read is None, and `problem` gives the reason. Each GPU and each MIG slice
takes at most ten library calls, because calls are what costs time on a real machine. This module
also makes emulated machines ("8xa100-80gb").
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from oomph.errors import Unreadable, UsageError
from oomph.records.gpu_model import Found, GpuModel
from oomph.records.machine import Device, Machine, Owner, Process
from oomph.sensing.backends import Backend, Gpu, ListedProcess, Memory, Refusal
from oomph.sensing.backends.session import with_backend
from oomph.sensing.catalog import find
from oomph.sensing.ownership import find_process
from oomph.units import MIB

Figure = TypeVar("Figure")


@dataclass(slots=True)
class Problems:
    """Collect what could not be read from a GPU; report a cause once for all figures it hides."""

    _labels_by_cause: dict[str, list[str]] = field(default_factory=dict)
    _notes: list[str] = field(default_factory=list)

    def add(self, label: str, refusal: Refusal) -> None:
        self._labels_by_cause.setdefault(refusal.text, []).append(label)

    def note(self, text: str) -> None:
        self._notes.append(text)

    def value(
        self, label: str, answer: Figure | Refusal, *, among: Container[Figure] | None = None
    ) -> Figure | None:
        """Return the answer; None if it was refused, or is not `among` the possible values.

        A missing sensor makes the figure unknown; that is not reported as a problem.
        """
        if isinstance(answer, Refusal):
            if not answer.is_unsupported:
                self.add(label, answer)
            return None
        if among is not None and answer not in among:
            self.note(f"{label}: the driver's figure makes no sense ({answer})")
            return None
        return answer

    def in_words(self) -> str | None:
        causes = [
            f"{', '.join(labels)}: {cause}" for cause, labels in self._labels_by_cause.items()
        ]
        return "; ".join([*causes, *self._notes]) or None


# ---- memory and processes of one GPU ----

_UNIFIED = "memory: shared with the host; used counts the GPU's processes only"
_UNKNOWN = Memory(None, None, None)

# GPUs without memory of their own, whose driver therefore reports none (nvitop#208, #168;
# nvtop#411, #449). Any other GPU without a memory figure is simply unknown.
_INTEGRATED = re.compile(r"\b(GB10|Orin|Thor|Xavier|Tegra|Jetson|nvgpu)\b", re.IGNORECASE)


def read_processes(
    gpu: Gpu, memory: Memory | Refusal, problems: Problems
) -> tuple[Process, ...] | None:
    """List the processes on the GPU; None if the list is unknown, () if there are none."""
    total_bytes = None if isinstance(memory, Refusal) else memory.total_bytes
    compute = gpu.processes("compute", total_bytes)
    if isinstance(compute, Refusal):
        problems.add("processes", compute)
        return None
    graphics = gpu.processes("graphics", total_bytes)
    if isinstance(graphics, Refusal):
        # MIG slices and some data-centre drivers have no graphics processes. Any other refusal may
        # hide a process.
        if not graphics.is_unsupported:
            problems.add("processes", graphics)
            return None
        graphics = ()
    return with_owners(compute, graphics)


def with_owners(
    compute: Sequence[ListedProcess], graphics: Sequence[ListedProcess]
) -> tuple[Process, ...]:
    """Merge the driver's lists, and add owners. Who both computes and draws is listed once."""
    computing = {process.pid for process in compute}
    listed = (*compute, *(process for process in graphics if process.pid not in computing))
    return tuple(find_process(each.pid, each.used_bytes, each.kind) for each in listed)


def settle_memory(
    memory: Memory | Refusal,
    processes: tuple[Process, ...] | None,
    problems: Problems,
    *,
    name: str | None = None,
) -> Memory:
    """Return the memory as read; of a GPU without its own memory, an estimate; else unknown."""
    if not isinstance(memory, Refusal):
        return memory
    if memory.is_unsupported and name and _INTEGRATED.search(name):
        return _unified_memory(processes, problems)
    problems.add("memory", memory)
    return _UNKNOWN


def _unified_memory(processes: tuple[Process, ...] | None, problems: Problems) -> Memory:
    """Count what its processes hold as used, and what the host has left as free."""
    import psutil

    problems.note(_UNIFIED)
    used_bytes = sum_bytes(processes)
    if used_bytes is None:
        return Memory(None, None, "unified")
    return Memory(used_bytes + psutil.virtual_memory().available, used_bytes, "unified")


def sum_bytes(processes: tuple[Process, ...] | None) -> int | None:
    """Sum the memory of the processes; None if any of it is unknown."""
    held = [process.used_bytes for process in processes or ()]
    known = [used_bytes for used_bytes in held if used_bytes is not None]
    return None if processes is None or len(known) < len(held) else sum(known)


# The driver does not measure this in MIG mode. Unknown does not mean idle.
NO_BUSY_RATIO_UNDER_MIG = "kernel-active share: not available under MIG"

# No GPU is outside these bounds: a driver that reports such a value has no real one.
_TEMPERATURES_C = range(-60, 200)
_POWERS_MW = range(10_000_000)

NOTHING_READ = Device(
    index=0,
    uuid=None,
    name=None,
    total_bytes=None,
    used_bytes=None,
    memory_source=None,
    busy_ratio=None,
    temperature_c=None,
    power_w=None,
    processes=None,
    problem=None,
)


def read_machine(*, with_power_limit: bool = False) -> Machine:
    """Read all GPUs of this machine. Without a GPU library: no GPUs, and the reason.

    A power limit is one call more for each GPU.
    """
    try:
        return with_backend(lambda backend: _read_machine(backend, with_power_limit))
    except Unreadable as error:
        return Machine(gpus=(), is_readable=False, problem=error.in_one_line())


def _read_machine(backend: Backend, with_power_limit: bool) -> Machine:
    count = backend.num_gpus()
    return Machine(
        driver_version=backend.driver_version(),
        gpus=tuple(
            _read_gpu(index, backend.gpu(index), with_power_limit) for index in range(count)
        ),
        problem=None if count else backend.no_gpu,
    )


def _read_gpu(index: int, gpu: Gpu | Refusal, with_power_limit: bool) -> Device:
    if isinstance(gpu, Refusal):
        return replace(NOTHING_READ, index=index, problem=gpu.text)
    problems, no_uuid = Problems(), gpu.why_no_uuid()
    if no_uuid:
        problems.add("UUID", no_uuid)
    name, cut = problems.value("name", gpu.name()), gpu.slices()
    if cut.refusal:
        problems.add("MIG slices" if cut.is_cut else "MIG mode", cut.refusal)
    slices = tuple(_read_slice(slot, part) for slot, part in (cut.by_slot or {}).items())
    memory = gpu.memory()
    if cut.is_cut:
        problems.note(NO_BUSY_RATIO_UNDER_MIG)
        busy_ratio = None
        processes = None if cut.by_slot is None else on_all(slices)
    else:
        busy_ratio = read_busy_ratio(gpu, problems)
        processes = read_processes(gpu, memory, problems)
    settled = settle_memory(memory, processes, problems, name=name)
    return Device(
        index=index,
        uuid=gpu.uuid,
        name=name,
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        memory_source=settled.source,
        busy_ratio=busy_ratio,
        temperature_c=read_temperature_c(gpu, problems),
        power_w=read_power_w(gpu, problems),
        power_limit_w=gpu.power_limit_w() if with_power_limit else None,
        processes=processes,
        mig_enabled=cut.is_cut,
        slices=slices,
        problem=problems.in_words(),
    )


def read_temperature_c(gpu: Gpu, problems: Problems) -> int | None:
    return problems.value("temperature", gpu.temperature_c(), among=_TEMPERATURES_C)


def read_power_w(gpu: Gpu, problems: Problems) -> float | None:
    milliwatts = problems.value("power", gpu.power_mw(), among=_POWERS_MW)
    return None if milliwatts is None else milliwatts / 1000


def read_busy_ratio(gpu: Gpu, problems: Problems) -> float | None:
    """Return the share of the last sample period (1/6 to 1 s) with at least one kernel running."""
    percent = problems.value("kernel-active share", gpu.busy_percent(), among=range(101))
    return None if percent is None else percent / 100


def _read_slice(slot: int, part: Gpu | Refusal) -> Device:
    if isinstance(part, Refusal):
        return replace(NOTHING_READ, index=slot, is_slice=True, problem=part.text)
    problems, memory = Problems(), part.memory()
    processes = read_processes(part, memory, problems)
    settled = settle_memory(memory, processes, problems)
    return replace(
        NOTHING_READ,
        index=slot,
        uuid=part.uuid,
        name=problems.value("name", part.name()),
        total_bytes=settled.total_bytes,
        used_bytes=settled.used_bytes,
        memory_source=settled.source,
        processes=processes,
        is_slice=True,
        mig_instance=part.slice_instance(),
        problem=problems.in_words(),
    )


def on_all(slices: Sequence[Device]) -> tuple[Process, ...] | None:
    """Return the processes on all slices of a GPU; None if any list is unknown."""
    known = [part.processes for part in slices if part.processes is not None]
    return None if len(known) < len(slices) else tuple(itertools.chain.from_iterable(known))


# ---- "8xa100-80gb" -> an emulated Machine, for demos and planning ----
# The GPUs come from the catalogue. Users and processes are invented, always the same ones, and
# together show everything `oomph gpus` can say. The Machine is marked as emulated.

_MOST_GPUS = 64  # judgement: more than one machine has
_COUNT_AND_NAME = re.compile(r"(?:(\d{1,9})\s*[x*\u00d7]\s*)?(.*)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class _Tenant:
    """An invented user who holds a share of a GPU."""

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
    """Return the Machine for "8xa100-80gb", or for a list such as "2xa100-80gb,t4"."""
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
            because="a machine is a count and the name of a GPU, or a list of these",
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
