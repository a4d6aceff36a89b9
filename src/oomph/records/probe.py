"""Probe, Progress: how much of a run is wanted, and how much of it there is."""

from __future__ import annotations

from dataclasses import dataclass

from oomph.units import format_duration


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """How much of the run is wanted; None: all of it."""

    time_s: float | None = None
    num_steps: int | None = None
    num_epochs: int | None = None

    @property
    def is_of_all(self) -> bool:
        return self.time_s is None and not self.counts

    @property
    def counts(self) -> bool:
        """Does it need a script that tells its steps?"""
        return self.num_steps is not None or self.num_epochs is not None

    def told(self) -> str:
        if self.num_steps is not None:
            return f"{self.num_steps} steps"
        if self.num_epochs is not None:
            return f"{self.num_epochs} epoch{'s' if self.num_epochs > 1 else ''}"
        return format_duration(self.time_s or 0.0)

    def is_seen(self, worked_s: float, progress: Progress) -> bool:
        """Is it enough? The time in which the command was halted does not count."""
        return (
            (self.time_s is not None and worked_s >= self.time_s)
            or (self.num_steps is not None and progress.num_steps >= self.num_steps)
            or (self.num_epochs is not None and progress.num_epochs >= self.num_epochs)
        )


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the rank is that has told the most."""

    num_steps: int = 0
    num_epochs: int = 0
    is_told: bool = False
