"""Machine -> the GPUs with nobody on them, in words that CUDA_VISIBLE_DEVICES understands. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oomph.records.machine import Device, Machine
from oomph.sensing.mapping import identities_of, order_is_certain


@dataclass(frozen=True, slots=True)
class FreeGpus:
    free: tuple[Device, ...]
    uncertain: tuple[Device, ...]  # nobody could tell
    are_slices: bool = False  # CUDA shows one MIG slice to a process, never two
    by_index: bool = True  # False: the index would name another GPU to CUDA; use the UUID

    def tokens(self, *, as_uuids: bool = False) -> list[str]:
        """What CUDA will understand as these GPUs."""
        if self.by_index and not as_uuids:
            return [str(gpu.index) for gpu in self.free]
        return [gpu.uuid or str(gpu.index) for gpu in self.free]

    def first(self, count: int) -> FreeGpus:
        """The same, with just `count` of them."""
        return replace(self, free=self.free[:count])


def find_free(machine: Machine) -> FreeGpus:
    """The whole GPUs that are free; on a machine that has none, the MIG slices."""
    whole = [gpu for gpu in machine.gpus if not gpu.mig_enabled and not gpu.is_slice]
    slices = [part for gpu in machine.gpus for part in ((gpu,) if gpu.is_slice else gpu.slices)]
    are_slices = not whole and bool(slices)
    # Of a machine that CUDA_VISIBLE_DEVICES has cut down, the rest decides what an index means.
    is_cut_down = any(gpu.cuda_index is not None for gpu in machine.gpus)
    by_index = not is_cut_down and order_is_certain(identities_of(machine))
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
