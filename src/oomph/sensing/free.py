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
        return [gpu.uuid for gpu in self.free if gpu.uuid]

    def first(self, count: int) -> FreeGpus:
        """The same, with just `count` of them."""
        return replace(self, free=self.free[:count])


def find_free(machine: Machine) -> FreeGpus:
    """The whole GPUs that are free; on a machine that has none, the MIG slices."""
    whole = [gpu for gpu in machine.gpus if not gpu.mig_enabled]
    slices = [part for gpu in machine.gpus for part in gpu.slices]
    by_index = order_is_certain(identities_of(machine))
    if not whole and slices:
        return _sorted_out(slices, are_slices=True, by_index=False)
    return _sorted_out(whole, are_slices=False, by_index=by_index)


def _sorted_out(devices: list[Device], *, are_slices: bool, by_index: bool) -> FreeGpus:
    return FreeGpus(
        free=tuple(device for device in devices if device.is_free),
        uncertain=tuple(device for device in devices if device.is_free is None),
        are_slices=are_slices,
        by_index=by_index,
    )
