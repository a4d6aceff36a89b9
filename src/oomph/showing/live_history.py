"""Looks -> what the sparklines are drawn from: how busy and how full each GPU has been.

Kept in three paces at once (a cell of a sparkline is 1, 10 or 60 looks), each in a fixed number
of cells, so a view that is left open for weeks stays small.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from oomph.records.machine import Device, Machine
from oomph.showing.gpu_row import rows_of

LOOKS_PER_CELL = (1, 10, 60)
_MOST_CELLS = 64


class Track:
    """One figure of one GPU over time: the mean of the looks in each cell."""

    def __init__(self) -> None:
        self._cells: dict[int, deque[float | None]] = {
            pace: deque(maxlen=_MOST_CELLS) for pace in LOOKS_PER_CELL
        }
        self._open: dict[int, list[float]] = {pace: [] for pace in LOOKS_PER_CELL}
        self._num_looks = 0

    def add(self, ratio: float | None) -> None:
        """None: nobody knows what it was."""
        for pace, cells in self._cells.items():
            known = self._open[pace]
            if self._num_looks % pace == 0:
                known.clear()
                cells.append(None)
            if ratio is not None:
                known.append(ratio)
                cells[-1] = sum(known) / len(known)
        self._num_looks += 1

    def cells(self, pace: int) -> Sequence[float | None]:
        return tuple(self._cells[pace])


class Histories:
    """The tracks of all GPUs and slices, by UUID."""

    def __init__(self) -> None:
        self.busy: dict[str, Track] = {}
        self.full: dict[str, Track] = {}

    def add(self, machine: Machine) -> None:
        """One look."""
        devices = {row.device.uuid: row.device for row in rows_of(machine) if row.device.uuid}
        for uuid in devices:
            self.busy.setdefault(uuid, Track())
            self.full.setdefault(uuid, Track())
        for uuid, busy in self.busy.items():
            device = devices.get(uuid)  # None: it is lost
            busy.add(device.busy_ratio if device else None)
            self.full[uuid].add(_full_ratio(device))


def _full_ratio(device: Device | None) -> float | None:
    if device is None or device.used_bytes is None or not device.total_bytes:
        return None
    return device.used_bytes / device.total_bytes
