"""CUDA_VISIBLE_DEVICES -> the GPUs that CUDA will show, by UUID, in CUDA's order.

The rules are CUDA's, odd as they are (CUDA programming guide; pytorch#84879, #92315):
a list ends at its first invalid entry, a repeat makes it empty, leading digits count
("1gpu2" is 1), a unique UUID prefix is enough, the forms do not mix. And those of MIG
(MIG user guide): CUDA shows one slice, the first, and then no whole GPU beside it.

Pure: it is given the GPUs in the order in which the indices count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

_LEADING_DIGITS = re.compile(r"\s*\+?(\d+)")
# MIG-GPU-<uuid of the GPU>/<GPU instance>/<compute instance>: the form of drivers before R470.
_OLD_MIG_FORM = re.compile(r"MIG-(GPU-[^/]+)/(\d{1,9})/(\d{1,9})")


@dataclass(frozen=True, slots=True)
class SliceIdentity:
    uuid: str
    instance: tuple[int, int] | None  # GPU instance, compute instance
    slot: int  # NVML's number of it among the slices of its GPU


@dataclass(frozen=True, slots=True)
class GpuIdentity:
    """What the mapping needs to know of a GPU."""

    index: int
    uuid: str | None  # None: it could not be read, as of a lost GPU
    name: str | None
    slices: tuple[SliceIdentity, ...] = ()
    is_cut: bool | None = False  # in MIG mode; None: that, or its slices, could not be read


@dataclass(frozen=True, slots=True)
class Shown:
    """One device that CUDA shows: a GPU, or one of its slices."""

    gpu: GpuIdentity
    slice: SliceIdentity | None = None

    @property
    def uuid(self) -> str | None:
        return self.slice.uuid if self.slice else self.gpu.uuid


def shown_by_cuda(variable: str | None, gpus: Sequence[GpuIdentity]) -> tuple[Shown, ...]:
    """What CUDA shows for this value of CUDA_VISIBLE_DEVICES (None: it is not set)."""
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
    """Is the answer independent of the order that CUDA counts in?"""
    return variable is not None and variable.startswith(("GPU-", "MIG-"))


def _by_index(entry: str, gpus: Sequence[GpuIdentity]) -> GpuIdentity | None:
    digits = _LEADING_DIGITS.match(entry)
    # int() refuses thousands of digits, and no machine has a GPU of that number.
    if digits is None or len(digits[1]) > 9 or int(digits[1]) >= len(gpus):
        return None
    return gpus[int(digits[1])]


def _by_uuid(entry: str, gpus: Sequence[GpuIdentity]) -> GpuIdentity | None:
    if not entry.startswith("GPU-"):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid and gpu.uuid.startswith(entry)]
    return matches[0] if len(matches) == 1 else None


def _slice_named(entry: str, gpus: Sequence[GpuIdentity]) -> Shown | None:
    old_form = _OLD_MIG_FORM.fullmatch(entry)
    matches = [
        Shown(gpu, part)
        for gpu in gpus
        for part in gpu.slices
        if (_is_instance(gpu, part, old_form) if old_form else part.uuid.startswith(entry))
    ]
    return matches[0] if len(matches) == 1 else None


def _is_instance(gpu: GpuIdentity, part: SliceIdentity, old_form: re.Match[str]) -> bool:
    return gpu.uuid == old_form[1] and part.instance == (int(old_form[2]), int(old_form[3]))


def _at_most_one_slice(shown: Sequence[Shown]) -> tuple[Shown, ...]:
    for device in shown:
        if device.gpu.slices:
            return (Shown(device.gpu, device.gpu.slices[0]),)
    # A GPU in MIG mode that has no slice yet has nothing to show.
    return tuple(device for device in shown if not device.gpu.is_cut)
