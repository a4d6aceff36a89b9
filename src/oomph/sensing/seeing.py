"""Machine -> Look: who launched the processes, and what CUDA shows, beside what was read."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from oomph.records.live import Look
from oomph.records.machine import Device, Machine, Process
from oomph.sensing.jobs import Jobs


class Seeing:
    """A Machine -> a Look; remembers what does not change from one to the next."""

    def __init__(self) -> None:
        self._jobs = Jobs()
        self._visible: tuple[str, ...] | None = None
        self._known_uuids: set[str] = set()

    def look(self, machine: Machine) -> Look:
        return Look(
            at=time.time(),
            machine=machine,
            jobs=() if machine.emulated else self._jobs.of(_processes(machine)),
            visible=self._shown(machine),
        )

    def _shown(self, machine: Machine) -> tuple[str, ...] | None:
        """What CUDA_VISIBLE_DEVICES shows; found anew when a GPU comes that was not there."""
        if "CUDA_VISIBLE_DEVICES" not in os.environ:
            return None
        uuids = {gpu.uuid for gpu in machine.gpus if gpu.uuid}
        if self._visible is None or not uuids <= self._known_uuids:
            from oomph.sensing.mapping import only_visible  # as costly to import as the rest

            shown = only_visible(machine).gpus
            self._visible = tuple(device.uuid for device in shown if device.uuid)
            self._known_uuids = uuids
        return self._visible


def _processes(machine: Machine) -> Iterable[Process]:
    return (process for gpu in machine.gpus for process in _all_on(gpu))


def _all_on(gpu: Device) -> Iterable[Process]:
    parts = gpu.slices or (gpu,)
    return (process for part in parts for process in part.processes or ())
