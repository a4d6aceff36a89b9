"""A torch device -> the GPU behind it; a machine -> what CUDA shows of it, and what is free.

Match by UUID where there is one: from torch if CUDA runs in this process, else from
CUDA_VISIBLE_DEVICES. Otherwise match by index, which is exact if CUDA uses NVML's order
(CUDA_DEVICE_ORDER=PCI_BUS_ID, or identical GPUs) or if CUDA itself can be asked.
CUDA is never initialised here.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from oomph.errors import Unreadable
from oomph.records.machine import Device, Machine, MappedBy
from oomph.sensing.backends import Backend, Gpu, Refusal
from oomph.sensing.cuda_order import ask_in_a_child, ask_in_this_process
from oomph.sensing.devices import NOTHING_READ
from oomph.sensing.running_torch import not_visible, uuid_from_torch

# ---- CUDA_VISIBLE_DEVICES -> the GPUs that CUDA will show, in CUDA's order -----------------------
# The rules are CUDA's, odd as they are (CUDA programming guide; pytorch#84879, #92315): a list
# ends at its first invalid entry, a repeat makes it empty, leading digits count ("1gpu2" is 1), a
# unique UUID prefix is enough, the forms do not mix. MIG adds (MIG user guide): CUDA shows one
# slice, the first, and no whole GPU next to it.
# Pure: the GPUs are passed in the order in which the indices count.

_LEADING_DIGITS = re.compile(r"\s*\+?(\d+)")
# MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>: the format of drivers before R470.
_OLD_MIG_FORM = re.compile(r"MIG-(GPU-[^/]+)/(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Shown:
    """One device that CUDA shows: a GPU or a slice. Of both, only the identity matters here."""

    gpu: Device
    slice: Device | None = None

    @property
    def device(self) -> Device:
        return self.slice or self.gpu

    @property
    def uuid(self) -> str | None:
        return self.device.uuid


def slices_of(gpu: Device) -> list[Shown]:
    """Return the slices that can be named."""
    return [Shown(gpu, part) for part in gpu.slices if part.uuid]


def _is_cut(gpu: Device) -> bool | None:
    """Return whether the GPU is in MIG mode; None if the mode or a slice could not be read."""
    return None if any(part.uuid is None for part in gpu.slices) else gpu.mig_enabled


def shown_by_cuda(variable: str | None, gpus: Sequence[Device]) -> tuple[Shown, ...]:
    """Return what CUDA shows for this value of CUDA_VISIBLE_DEVICES (None: not set)."""
    if variable is None:
        return _at_most_one_slice([Shown(gpu) for gpu in gpus])
    if variable.startswith("MIG-"):
        found = _slice_named(variable.split(",")[0].strip(), gpus)
        return (found,) if found else ()
    pick = _by_uuid if variable.startswith("GPU-") else _by_index
    shown: list[Shown] = []
    for entry in variable.split(","):
        gpu = pick(entry.strip(), gpus)
        if gpu is None:
            break
        if any(other.gpu is gpu for other in shown):
            return ()
        shown.append(Shown(gpu))
    return _at_most_one_slice(shown)


def names_by_uuid(variable: str | None) -> bool:
    """Return whether the answer is independent of CUDA's device order."""
    return variable is not None and variable.startswith(("GPU-", "MIG-"))


def _by_index(entry: str, gpus: Sequence[Device]) -> Device | None:
    digits = _LEADING_DIGITS.match(entry)
    # int() refuses thousands of digits, and no machine has that many GPUs.
    if digits is None or len(digits[1]) > 9 or int(digits[1]) >= len(gpus):
        return None
    return gpus[int(digits[1])]


def _by_uuid(entry: str, gpus: Sequence[Device]) -> Device | None:
    if not entry.startswith("GPU-"):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _slice_named(entry: str, gpus: Sequence[Device]) -> Shown | None:
    old_form = _OLD_MIG_FORM.fullmatch(entry)
    matches = [
        shown
        for gpu in gpus
        for shown in slices_of(gpu)
        if (_is_instance(shown, old_form) if old_form else str(shown.uuid).startswith(entry))
    ]
    return matches[0] if len(matches) == 1 else None


def _is_instance(shown: Shown, old_form: re.Match[str]) -> bool:
    instance = (int(old_form[2]), int(old_form[3]))
    return shown.gpu.uuid == old_form[1] and shown.device.mig_instance == instance


def _at_most_one_slice(shown: Sequence[Shown]) -> tuple[Shown, ...]:
    for device in shown:
        if slices := slices_of(device.gpu):
            return (slices[0],)
    # A GPU in MIG mode without slices shows nothing.
    return tuple(device for device in shown if not _is_cut(device.gpu))


_UNKNOWN_ORDER = (
    "the GPUs are not all alike and CUDA could not be asked for their order: taken in the order of"
    " the PCI bus; set CUDA_DEVICE_ORDER=PCI_BUS_ID to be sure"
)
_UNKNOWN_SLICE = (
    "a GPU is in MIG mode and CUDA could not be asked what it shows: set CUDA_VISIBLE_DEVICES to"
    " the UUID of the slice to be sure"
)


@dataclass(frozen=True, slots=True)
class Visible:
    """What CUDA shows to this process, and how we know."""

    shown: tuple[Shown, ...]
    mapped_by: MappedBy
    problem: str | None = None


Environment = tuple[str | None, str | None]


def environment() -> Environment:
    """Return the variables that decide what CUDA will show, before it is initialised."""
    return os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER")


def visible_gpus(gpus: Sequence[Device], *, may_ask_cuda: bool = True) -> Visible:
    """Return which of these GPUs CUDA shows, given this process's environment."""
    variable, _ = environment()
    in_pci_order = shown_by_cuda(variable, gpus)
    if names_by_uuid(variable) and not any(_is_cut(shown.gpu) is None for shown in in_pci_order):
        return Visible(in_pci_order, "uuid")
    if _order_is_certain(gpus):
        return Visible(in_pci_order, "pci-order")
    uuids = ask_in_a_child() if may_ask_cuda else None
    shown = None if uuids is None else _with_uuids(uuids, gpus)
    if shown is not None:
        return Visible(shown, "cuda")
    is_mig = any(_is_cut(gpu) is not False for gpu in gpus)
    return Visible(in_pci_order, "assumed", _UNKNOWN_SLICE if is_mig else _UNKNOWN_ORDER)


def _order_is_certain(gpus: Sequence[Device]) -> bool:
    """Return whether an index means the same GPU to CUDA and to NVML."""
    if any(_is_cut(gpu) is not False for gpu in gpus):
        return False  # what CUDA shows of a divided GPU depends on the driver version
    if environment()[1] == "PCI_BUS_ID":
        return True
    names = {gpu.name for gpu in gpus}
    return len(names) <= 1 and (None not in names or len(gpus) <= 1)


def _with_uuids(bare_uuids: Sequence[str], gpus: Sequence[Device]) -> tuple[Shown, ...] | None:
    """Convert CUDA's answer to NVML's GPUs; None if NVML does not know one of them."""
    whole = [Shown(gpu) for gpu in gpus]
    slices = [shown for gpu in gpus for shown in slices_of(gpu)]
    known = {bare_uuid(shown.uuid): shown for shown in whole + slices if shown.uuid}
    found = [known.get(bare) for bare in bare_uuids]
    return None if None in found else tuple(shown for shown in found if shown)


def bare_uuid(uuid: str | None) -> str:
    """Return a UUID as torch gives it: without NVML's prefix."""
    return (uuid or "").removeprefix("GPU-").removeprefix("MIG-")


# ---- a machine that was read or described ----------------------------------------------------


def only_visible(machine: Machine) -> Machine:
    """Return the machine as CUDA shows it to this process, in CUDA's order."""
    visible = visible_gpus(machine.gpus, may_ask_cuda=not machine.emulated)
    shown = tuple(
        replace(each.device, index=each.gpu.index, cuda_index=cuda_index)
        for cuda_index, each in enumerate(visible.shown)
    )
    problems = [machine.problem, visible.problem]
    if machine.gpus and not shown:
        problems.append(not_visible(0, 0).in_one_line())
    return replace(machine, gpus=shown, problem="; ".join(filter(None, problems)) or None)


# ---- Machine -> the free GPUs, as CUDA_VISIBLE_DEVICES names them ----


@dataclass(frozen=True, slots=True)
class FreeGpus:
    free: tuple[Device, ...]
    uncertain: tuple[Device, ...]  # could be free or in use
    are_slices: bool = False  # CUDA shows a process only one MIG slice
    by_index: bool = True  # False: CUDA would take the index for another GPU, so use the UUID

    def tokens(self, *, as_uuids: bool = False) -> list[str]:
        """Return names for CUDA_VISIBLE_DEVICES."""
        if self.by_index and not as_uuids:
            return [str(gpu.index) for gpu in self.free]
        return [gpu.uuid or str(gpu.index) for gpu in self.free]

    def first(self, count: int) -> FreeGpus:
        """Return only the first `count` of these GPUs."""
        return replace(self, free=self.free[:count])


def find_free(machine: Machine) -> FreeGpus:
    """Return the free whole GPUs; on a machine without whole GPUs, the free MIG slices."""
    whole = [gpu for gpu in machine.gpus if not gpu.mig_enabled and not gpu.is_slice]
    slices = [part for gpu in machine.gpus for part in ((gpu,) if gpu.is_slice else gpu.slices)]
    are_slices = not whole and bool(slices)
    # If CUDA_VISIBLE_DEVICES hides some GPUs, the hidden ones also decide what an index means.
    is_cut_down = any(gpu.cuda_index is not None for gpu in machine.gpus)
    by_index = not is_cut_down and _order_is_certain(machine.gpus)
    devices = slices if are_slices else whole
    free = [device for device in devices if device.is_free and (by_index or device.uuid)]
    return FreeGpus(
        free=tuple(free),
        uncertain=tuple(
            device for device in devices if device.is_free is not False and device not in free
        ),
        are_slices=are_slices,
        by_index=by_index and not are_slices,
    )


# ---- this machine ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class MappedGpu:
    """The GPU behind a torch device."""

    gpu: Gpu
    shown: Shown
    cuda_index: int
    mapped_by: MappedBy
    problem: str | None = None


# Both caches hold while the library is open and nothing that decides the answer has changed.
@functools.lru_cache(maxsize=64)
def find_mapped(
    backend: Backend, cuda_index: int, torch: Any, environment: Environment
) -> MappedGpu:
    """Find the GPU with that index, for a process in which `torch` runs CUDA, or nobody (None).

    Raises OomphError if there is none.
    """
    if torch is not None:
        shown = _shown_to_torch(backend, uuid_from_torch(torch, cuda_index), cuda_index)
        return MappedGpu(open_shown(backend, shown), shown, cuda_index, "torch")
    visible = _visible(backend, environment)
    if not 0 <= cuda_index < len(visible.shown):
        raise not_visible(cuda_index, len(visible.shown))
    shown = visible.shown[cuda_index]
    gpu = open_shown(backend, shown)
    return MappedGpu(gpu, shown, cuda_index, visible.mapped_by, visible.problem)


@functools.lru_cache(maxsize=8)
def _visible(backend: Backend, _: Environment) -> Visible:
    return visible_gpus(identify_gpus(backend))


def _shown_to_torch(backend: Backend, uuid: str, index: int) -> Shown:
    gpus = identify_gpus(backend)
    found = _with_uuids([uuid], gpus)
    if found and found[0].slice is None and _is_cut(found[0].gpu) is not False:
        # torch gave the UUID of a GPU in MIG mode, but CUDA uses one of its slices: ask CUDA which.
        found = _with_uuids([ask_in_this_process()[index]], gpus)
    if not found:
        raise Unreadable("the driver does not know torch's GPU", attempt="nvidia-smi -L")
    return found[0]


def identify_gpus(backend: Backend) -> tuple[Device, ...]:
    """Identify every GPU and slice, in the library's order. Raises Unreadable if there is none."""
    count = backend.num_gpus()
    if not count:
        raise Unreadable(backend.no_gpu)
    return tuple(_identify(backend, index) for index in range(count))


def _identify(backend: Backend, index: int) -> Device:
    gpu = backend.gpu(index)
    if isinstance(gpu, Refusal):
        return replace(NOTHING_READ, index=index)
    name, cut = gpu.name(), gpu.slices()
    return replace(
        NOTHING_READ,
        index=index,
        uuid=gpu.uuid,
        name=None if isinstance(name, Refusal) else name,
        mig_enabled=None if cut.by_slot is None else cut.is_cut,
        slices=tuple(_identify_slice(slot, part) for slot, part in (cut.by_slot or {}).items()),
    )


def _identify_slice(slot: int, part: Gpu | Refusal) -> Device:
    device = replace(NOTHING_READ, index=slot, is_slice=True)
    if isinstance(part, Refusal):
        return device
    return replace(device, uuid=part.uuid, mig_instance=part.slice_instance())


def open_shown(backend: Backend, shown: Shown) -> Gpu:
    """Open a device that CUDA shows. Raises Unreadable."""
    uuid, index = shown.uuid, shown.gpu.index
    gpu = backend.gpu(index) if uuid is None else backend.gpu_of_uuid(uuid)
    if isinstance(gpu, Refusal):
        raise Unreadable(f"GPU {index} cannot be read", because=gpu.text)
    return gpu
