"""Process lists over time -> who is on a GPU, and who has come to it.

Only a process that was not there at the last look costs a look at /proc: within the second
between two looks its number is not given to another one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from oomph.records.machine import Process
from oomph.sensing.nvml import Refusal
from oomph.sensing.occupancy import process_of, sum_bytes
from oomph.sensing.ownership import Facts, facts_about
from oomph.sensing.processes import Listed


@dataclass(frozen=True, slots=True)
class Shares:
    """Who holds how much; None where somebody is there whom nobody can place."""

    run_bytes: int | None = None
    others_bytes: int | None = None
    num_others: int | None = None


@dataclass(slots=True, eq=False)
class Occupants:
    """The processes on one GPU."""

    processes: tuple[Process, ...] | None = None  # None: the list could not be read
    shares: Shares = field(default_factory=Shares)
    run_pids: set[int] = field(default_factory=set)  # of this run, ever
    _facts: dict[int, Facts] = field(default_factory=dict)
    _listed: tuple[Listed, ...] | None = None
    _announced: set[int] = field(default_factory=set)

    def update(self, listed: tuple[Listed, ...] | Refusal) -> None:
        """What the driver lists now."""
        if isinstance(listed, Refusal):
            self.processes = self._listed = None
            self.shares = Shares()
            return
        if listed == self._listed:
            return
        self._listed = listed
        known = self._facts
        self._facts = {p.pid: known.get(p.pid) or facts_about(p.pid) for p in listed}
        self.processes = tuple(process_of(p, self._facts[p.pid]) for p in listed)
        self.run_pids.update(p.pid for p in self.processes if p.owner == "this-run")
        self.shares = self._divide()

    def _divide(self) -> Shares:
        """How the memory is divided between this run and everybody else."""
        if self.processes is None or any(p.owner == "unknown" for p in self.processes):
            return Shares()
        ours = tuple(p for p in self.processes if p.owner == "this-run")
        others = tuple(p for p in self.processes if p.owner != "this-run")
        # A display server takes memory, but is no job that one shares a GPU with.
        num_others = sum(p.kind == "compute" for p in others)
        return Shares(sum_bytes(ours), sum_bytes(others), num_others)

    def newcomers(self) -> list[Process]:
        """Other jobs' processes that were not told before."""
        found = [
            p for p in self.processes or () if _is_neighbour(p) and p.pid not in self._announced
        ]
        self._announced.update(p.pid for p in found)
        return found


def _is_neighbour(process: Process) -> bool:
    return process.kind == "compute" and process.owner in ("mine", "others")
