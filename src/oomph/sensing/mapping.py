"""A torch device -> the NVML handle of the same GPU.

By UUID wherever there is one: from torch if CUDA runs in this process, else from
CUDA_VISIBLE_DEVICES, else by index, which is exact where CUDA counts as NVML does
(CUDA_DEVICE_ORDER=PCI_BUS_ID, or all GPUs alike) and where CUDA itself can be asked.
CUDA is never initialised here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oomph.errors import Unreadable
from oomph.records.machine import Device, Machine, MappedBy
from oomph.sensing import cuda_order
from oomph.sensing.gpus import read_instance, slice_pointer
from oomph.sensing.nvml import Handle, Nvml, Refusal
from oomph.sensing.torch_cuda import cuda_index_of, not_visible, running_torch, uuid_from_torch
from oomph.sensing.visible import (
    GpuIdentity,
    Shown,
    SliceIdentity,
    names_by_uuid,
    shown_by_cuda,
)


@dataclass(frozen=True, slots=True)
class Visible:
    """What CUDA shows to this process, and how we know."""

    shown: tuple[Shown, ...]
    mapped_by: MappedBy
    problem: str | None = None


def visible_gpus(gpus: Sequence[GpuIdentity], *, may_ask_cuda: bool = True) -> Visible:
    """What this process's environment makes CUDA show of these GPUs."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    in_pci_order = shown_by_cuda(variable, gpus)
    if names_by_uuid(variable):
        return Visible(in_pci_order, "uuid")
    if order_is_certain(gpus) or not in_pci_order:
        return Visible(in_pci_order, "pci-order")
    told = cuda_order.ask_in_a_child() if may_ask_cuda else None
    if told is not None:
        shown = _with_uuids(told, gpus)
        if shown is not None:
            return Visible(shown, "cuda")
    return Visible(
        in_pci_order,
        "assumed",
        "the GPUs are not all alike and CUDA could not tell their order: taken in the order of"
        " the PCI bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID to be sure",
    )


def order_is_certain(gpus: Sequence[GpuIdentity]) -> bool:
    """Does an index mean the same GPU to CUDA as to NVML?"""
    if any(gpu.slices for gpu in gpus):
        return False  # the rules for MIG have changed with the driver
    if os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID":
        return True
    names = {gpu.name for gpu in gpus}
    return len(names) <= 1 and (None not in names or len(gpus) <= 1)


def _with_uuids(bare_uuids: Sequence[str], gpus: Sequence[GpuIdentity]) -> tuple[Shown, ...] | None:
    """CUDA's answer in terms of NVML's GPUs; None if NVML does not know one of them."""
    known = {_bare(shown.uuid): shown for shown in _all_shown(gpus) if shown.uuid}
    found = [known.get(bare) for bare in bare_uuids]
    return None if None in found else tuple(shown for shown in found if shown)


def _all_shown(gpus: Sequence[GpuIdentity]) -> list[Shown]:
    whole = [Shown(gpu) for gpu in gpus]
    return whole + [Shown(gpu, part) for gpu in gpus for part in gpu.slices]


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-")


def identities_of(machine: Machine) -> tuple[GpuIdentity, ...]:
    """The GPUs of a machine that was read before, or that is only described."""
    return tuple(
        GpuIdentity(gpu.index, gpu.uuid, gpu.name, _slice_identities(gpu)) for gpu in machine.gpus
    )


def _slice_identities(gpu: Device) -> tuple[SliceIdentity, ...]:
    return tuple(SliceIdentity(part.uuid, part.mig_instance) for part in gpu.slices if part.uuid)


def only_visible(machine: Machine) -> Machine:
    """The same machine as CUDA shows it to this process, in CUDA's order."""
    visible = visible_gpus(identities_of(machine), may_ask_cuda=not machine.emulated)
    shown = tuple(
        replace(_device(machine, device), index=device.gpu.index, cuda_index=cuda_index)
        for cuda_index, device in enumerate(visible.shown)
    )
    told = [problem for problem in (machine.problem, visible.problem) if problem]
    return replace(machine, gpus=shown, problem="; ".join(told) or None)


def _device(machine: Machine, shown: Shown) -> Device:
    gpu = next(gpu for gpu in machine.gpus if gpu.index == shown.gpu.index)
    parts = [part for part in gpu.slices if shown.slice and part.uuid == shown.slice.uuid]
    return parts[0] if parts else gpu


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The NVML handle behind a torch device."""

    handle: Handle
    shown: Shown
    cuda_index: int
    mapped_by: MappedBy
    problem: str | None = None


def find_target(nvml: Nvml, device: Any) -> Target:
    """The GPU that torch calls `device`. Raises OomphError where there is none."""
    wanted = cuda_index_of(device)
    torch = running_torch()
    gpus = identify_gpus(nvml)
    if torch is not None:
        index = torch.cuda.current_device() if wanted is None else wanted
        shown = _with_uuids([uuid_from_torch(torch, index)], gpus)
        if not shown:
            raise Unreadable("NVML does not know the GPU that torch uses", attempt="nvidia-smi -L")
        return Target(_handle(nvml, shown[0]), shown[0], index, "torch")
    index = wanted or 0
    visible = visible_gpus(gpus)
    if not 0 <= index < len(visible.shown):
        raise not_visible(index, len(visible.shown))
    found = visible.shown[index]
    return Target(_handle(nvml, found), found, index, visible.mapped_by, visible.problem)


def identify_gpus(nvml: Nvml) -> tuple[GpuIdentity, ...]:
    """Every GPU and slice, in NVML's order."""
    count = nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Refusal):
        raise Unreadable("the GPUs could not be counted", because=count.text)
    return tuple(_identify(nvml, index) for index in range(count))


def _identify(nvml: Nvml, index: int) -> GpuIdentity:
    pointer = nvml.ask("nvmlDeviceGetHandleByIndex", index)
    if isinstance(pointer, Refusal):
        return GpuIdentity(index, None, None)
    uuid = nvml.ask("nvmlDeviceGetUUID", pointer)
    name = nvml.ask("nvmlDeviceGetName", pointer)
    return GpuIdentity(index, _text(uuid), _text(name), _identify_slices(nvml, pointer))


def _identify_slices(nvml: Nvml, pointer: Any) -> tuple[SliceIdentity, ...]:
    mode = nvml.ask("nvmlDeviceGetMigMode", pointer)
    most = nvml.ask("nvmlDeviceGetMaxMigDeviceCount", pointer)
    if isinstance(mode, Refusal) or not mode[0] or isinstance(most, Refusal):
        return ()
    slots = [slice_pointer(nvml, pointer, slot) for slot in range(most)]
    slices = [_identify_slice(nvml, slot) for slot in slots if not isinstance(slot, Refusal)]
    return tuple(part for part in slices if part is not None)


def _identify_slice(nvml: Nvml, pointer: Any) -> SliceIdentity | None:
    uuid = None if pointer is None else _text(nvml.ask("nvmlDeviceGetUUID", pointer))
    if uuid is None:
        return None
    return SliceIdentity(uuid, read_instance(nvml, Handle(pointer)))


def _handle(nvml: Nvml, shown: Shown) -> Handle:
    if shown.uuid is None:
        pointer = nvml.ask("nvmlDeviceGetHandleByIndex", shown.gpu.index)
    else:
        pointer = nvml.ask("nvmlDeviceGetHandleByUUID", shown.uuid)
    if isinstance(pointer, Refusal):
        raise Unreadable(f"GPU {shown.gpu.index} cannot be read", because=pointer.text)
    return Handle(pointer)


def _text(answer: Any) -> str | None:
    return None if isinstance(answer, Refusal) else str(answer)
