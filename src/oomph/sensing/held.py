"""One GPU at one moment, as the driver reports it: memory in use, and what each process holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oomph.errors import Unreadable
from oomph.sensing.devices import read_machine
from oomph.sensing.ownership import pids_are_the_hosts


@dataclass(frozen=True, slots=True)
class Held:
    """Memory in use on a GPU, and by which process (None: unknown)."""

    used_bytes: int
    by_pid: Mapping[int, int | None] | None
    computing: frozenset[int] = frozenset()

    def others(self, own: int | None) -> frozenset[int]:
        """Return the processes that compute on the GPU, without one."""
        return self.computing - {own}

    def by(self, pid: int | None) -> int | None:
        """Return the bytes that a process holds; None if unknown."""
        return None if pid is None or self.by_pid is None else self.by_pid.get(pid)


def held(uuid: str) -> Held:
    """Read a GPU, or a slice of one, by its UUID. Raises Unreadable."""
    machine = read_machine()
    devices = [device for gpu in machine.gpus for device in (gpu, *gpu.slices)]
    found = next((device for device in devices if device.uuid == uuid), None)
    if found is None or found.used_bytes is None:
        because = machine.problem or (found.problem if found else "it is not listed any more")
        raise Unreadable("the memory of the GPU cannot be read", because=because)
    if found.processes is None:
        return Held(found.used_bytes, None)
    return Held(
        found.used_bytes,
        {process.pid: process.used_bytes for process in found.processes},
        frozenset(process.pid for process in found.processes if process.kind == "compute"),
    )


def own_pid(before: Held, now: Held, child_pid: int | None) -> int | None:
    """Find a child in the driver's list: by its PID, or as the new entry.

    `child_pid` is None for a child with a PID namespace of its own.
    """
    if now.by_pid is None:
        return None
    if child_pid is not None and not pids_are_the_hosts():
        return child_pid if child_pid in now.by_pid else None
    new = now.by_pid.keys() - (before.by_pid or {}).keys()
    return next(iter(new)) if len(new) == 1 else None
