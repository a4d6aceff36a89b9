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
from oomph.sensing.mig import Slice, read_instance, read_mig_mode
from oomph.sensing.nvml import NO_GPU, Handle, Nvml, Refusal
from oomph.sensing.torch_cuda import not_visible, running_torch, uuid_from_torch
from oomph.sensing.visible import (
    GpuIdentity,
    Shown,
    SliceIdentity,
    names_by_uuid,
    shown_by_cuda,
)

_UNKNOWN_ORDER = (
    "the GPUs are not all alike and CUDA could not tell their order: taken in the order of the"
    " PCI bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID to be sure"
)
_UNKNOWN_SLICE = (
    "a GPU is in MIG mode and CUDA could not tell what it shows: set CUDA_VISIBLE_DEVICES to the"
    " UUID of the slice to be sure"
)


@dataclass(frozen=True, slots=True)
class Visible:
    """What CUDA shows to this process, and how we know."""

    shown: tuple[Shown, ...]
    mapped_by: MappedBy
    problem: str | None = None


def environment() -> tuple[str | None, str | None]:
    """All that decides what CUDA shows, while it is not running yet."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


def visible_gpus(gpus: Sequence[GpuIdentity], *, may_ask_cuda: bool = True) -> Visible:
    """What this process's environment makes CUDA show of these GPUs."""
    variable, _ = environment()
    in_pci_order = shown_by_cuda(variable, gpus)
    if names_by_uuid(variable) and not any(shown.gpu.is_cut is None for shown in in_pci_order):
        return Visible(in_pci_order, "uuid")
    if order_is_certain(gpus):
        return Visible(in_pci_order, "pci-order")
    told = cuda_order.ask_in_a_child() if may_ask_cuda else None
    shown = None if told is None else _with_uuids(told, gpus)
    if shown is not None:
        return Visible(shown, "cuda")
    is_mig = any(gpu.is_cut is not False for gpu in gpus)
    return Visible(in_pci_order, "assumed", _UNKNOWN_SLICE if is_mig else _UNKNOWN_ORDER)


def order_is_certain(gpus: Sequence[GpuIdentity]) -> bool:
    """Does an index mean the same GPU to CUDA as to NVML?"""
    if any(gpu.is_cut is not False for gpu in gpus):
        return False  # what CUDA shows of a cut GPU has changed with the driver
    if environment()[1] == "PCI_BUS_ID":
        return True
    names = {gpu.name for gpu in gpus}
    return len(names) <= 1 and (None not in names or len(gpus) <= 1)


def _with_uuids(bare_uuids: Sequence[str], gpus: Sequence[GpuIdentity]) -> tuple[Shown, ...] | None:
    """CUDA's answer in terms of NVML's GPUs; None if NVML does not know one of them."""
    whole = [Shown(gpu) for gpu in gpus]
    slices = [Shown(gpu, part) for gpu in gpus for part in gpu.slices]
    known = {_bare(shown.uuid): shown for shown in whole + slices if shown.uuid}
    found = [known.get(bare) for bare in bare_uuids]
    return None if None in found else tuple(shown for shown in found if shown)


def _bare(uuid: str | None) -> str:
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-")


# ---- a machine that was read or described ----------------------------------------------------


def identities_of(machine: Machine) -> tuple[GpuIdentity, ...]:
    return tuple(
        GpuIdentity(
            gpu.index,
            gpu.uuid,
            gpu.name,
            tuple(
                SliceIdentity(part.uuid, part.mig_instance, part.index)
                for part in gpu.slices
                if part.uuid
            ),
            None if any(part.uuid is None for part in gpu.slices) else gpu.mig_enabled,
        )
        for gpu in machine.gpus
    )


def only_visible(machine: Machine) -> Machine:
    """The same machine as CUDA shows it to this process, in CUDA's order."""
    visible = visible_gpus(identities_of(machine), may_ask_cuda=not machine.emulated)
    shown = tuple(
        replace(_device(machine, device), index=device.gpu.index, cuda_index=cuda_index)
        for cuda_index, device in enumerate(visible.shown)
    )
    told = [machine.problem, visible.problem]
    if machine.gpus and not shown:
        told.append(not_visible(0, 0).in_one_line())
    return replace(machine, gpus=shown, problem="; ".join(filter(None, told)) or None)


def _device(machine: Machine, shown: Shown) -> Device:
    gpu = next(gpu for gpu in machine.gpus if gpu.index == shown.gpu.index)
    parts = [part for part in gpu.slices if shown.slice and part.uuid == shown.slice.uuid]
    return parts[0] if parts else gpu


# ---- this machine ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """The NVML handle behind a torch device."""

    handle: Handle
    shown: Shown
    cuda_index: int
    mapped_by: MappedBy
    problem: str | None = None


def find_target(nvml: Nvml, cuda_index: int | None) -> Target:
    """The GPU of that index (None: the current one). Raises OomphError where there is none."""
    torch = running_torch()
    if torch is None:
        index = cuda_index or 0
        visible = _kept(nvml, environment(), lambda: visible_gpus(identify_gpus(nvml)))
    else:
        index = torch.cuda.current_device() if cuda_index is None else cuda_index
        uuid = uuid_from_torch(torch, index)
        found = _kept(nvml, uuid, lambda: _shown_to_torch(nvml, uuid, index))
        return Target(open_shown(nvml, found), found, index, "torch")
    if not 0 <= index < len(visible.shown):
        raise not_visible(index, len(visible.shown))
    shown = visible.shown[index]
    return Target(open_shown(nvml, shown), shown, index, visible.mapped_by, visible.problem)


def _kept(nvml: Nvml, key: Any, find: Any) -> Any:
    """What `find` finds, once for as long as NVML is open."""
    if key not in nvml.kept:
        nvml.kept[key] = find()
    return nvml.kept[key]


def _shown_to_torch(nvml: Nvml, uuid: str, index: int) -> Shown:
    gpus = identify_gpus(nvml)
    found = _with_uuids([uuid], gpus)
    if found and found[0].slice is None and found[0].gpu.is_cut is not False:
        # The UUID of a GPU in MIG mode, but CUDA uses one of its slices: it knows which.
        found = _with_uuids([cuda_order.ask_in_this_process()[index]], gpus)
    if not found:
        raise Unreadable("NVML does not know the GPU that torch uses", attempt="nvidia-smi -L")
    return found[0]


def identify_gpus(nvml: Nvml) -> tuple[GpuIdentity, ...]:
    """Every GPU and slice, in NVML's order."""
    count = nvml.ask("nvmlDeviceGetCount")
    if isinstance(count, Refusal):
        raise Unreadable("the GPUs could not be counted", because=count.text)
    if not count:
        raise Unreadable(NO_GPU)
    return tuple(_identify(nvml, index) for index in range(count))


def _identify(nvml: Nvml, index: int) -> GpuIdentity:
    handle = nvml.gpu(index)
    if isinstance(handle, Refusal):
        return GpuIdentity(index, None, None)
    answer = nvml.ask_gpu(handle, "nvmlDeviceGetName")
    name = None if isinstance(answer, Refusal) else answer
    mig = read_mig_mode(nvml, handle)
    slices = [_identify_slice(nvml, part) for part in mig.slices or ()]
    is_whole_known = mig.slices is not None and None not in slices
    return GpuIdentity(
        index,
        handle.uuid,
        name,
        tuple(part for part in slices if part is not None),
        mig.enabled if is_whole_known else None,
    )


def _identify_slice(nvml: Nvml, part: Slice) -> SliceIdentity | None:
    handle = nvml.known(part.pointer)
    if isinstance(handle, Refusal) or handle.uuid is None:
        return None
    return SliceIdentity(handle.uuid, read_instance(nvml, handle), part.slot)


def open_shown(nvml: Nvml, shown: Shown) -> Handle:
    """The handle of a device that CUDA shows. Raises Unreadable."""
    if shown.uuid is None:
        handle = nvml.gpu(shown.gpu.index)
    else:
        handle = nvml.known(nvml.ask("nvmlDeviceGetHandleByUUID", shown.uuid))
    if isinstance(handle, Refusal):
        raise Unreadable(f"GPU {shown.gpu.index} cannot be read", because=handle.text)
    return handle
