"""A GPU -> is it in MIG mode, and the slices that it is cut into."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomph.sensing.nvml import NOT_FOUND, Handle, Nvml, Refusal


@dataclass(frozen=True, slots=True)
class Slice:
    slot: int
    pointer: Any  # or the Refusal that came instead


@dataclass(frozen=True, slots=True)
class MigMode:
    """`enabled` is None, or `slices` is None, where that could not be read."""

    enabled: bool | None
    slices: tuple[Slice, ...] | None = ()
    refusal: Refusal | None = None


def read_mig_mode(nvml: Nvml, handle: Handle) -> MigMode:
    """One call for a GPU that is not in MIG mode."""
    mode = nvml.ask_gpu(handle, "nvmlDeviceGetMigMode")
    if isinstance(mode, Refusal):
        # A card that cannot be cut is not cut; any other refusal leaves it open.
        return MigMode(False) if mode.is_unsupported else MigMode(None, None, mode)
    if not mode[0]:
        return MigMode(False)
    most = nvml.ask_gpu(handle, "nvmlDeviceGetMaxMigDeviceCount")
    if isinstance(most, Refusal):
        return MigMode(True, None, most)
    slots = (Slice(slot, _pointer(nvml, handle, slot)) for slot in range(most))
    return MigMode(True, tuple(part for part in slots if part.pointer is not None))


def _pointer(nvml: Nvml, handle: Handle, slot: int) -> Any:
    """The slice in a slot, a Refusal, or None where the slot is empty."""
    pointer = nvml.ask("nvmlDeviceGetMigDeviceHandleByIndex", handle.pointer, slot)
    is_empty = isinstance(pointer, Refusal) and pointer.code == NOT_FOUND
    return None if is_empty else pointer


def read_instance(nvml: Nvml, handle: Handle) -> tuple[int, int] | None:
    """Of a slice: the ids of its GPU instance and compute instance."""
    gpu_instance = nvml.ask_gpu(handle, "nvmlDeviceGetGpuInstanceId")
    compute_instance = nvml.ask_gpu(handle, "nvmlDeviceGetComputeInstanceId")
    if isinstance(gpu_instance, Refusal) or isinstance(compute_instance, Refusal):
        return None
    return gpu_instance, compute_instance
