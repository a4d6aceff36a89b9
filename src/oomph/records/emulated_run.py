"""EmulatedRun: a command that ran with an emulated GPU, and whether it fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedRun:
    """A command that ran with an emulated GPU in each of its processes."""

    exit_code: int
    total_bytes: int  # of each process's GPU
    num_processes: int  # that said something of their GPU; 0 if none imported torch
    peak_allocated_bytes: int | None  # of the process that took most
    peak_reserved_bytes: int | None
    num_out_of_memory: int

    @property
    def fits(self) -> bool | None:
        """None where nobody used the GPU, so that nobody knows."""
        return self.num_out_of_memory == 0 if self.num_processes else None
