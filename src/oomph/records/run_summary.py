"""RunSummary: one line on a run that is kept, without reading all of it."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from oomph.units import format_duration

RunState = Literal[
    "running",
    "ended",
    "unknown",  # nobody wrote how it ended: whoever watched it was killed
]


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class RunSummary:
    """A run as `oomph runs` lists it."""

    id: str
    path: str
    command: tuple[str, ...]
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    duration_s: float  # so far
    state: RunState
    exit_code: int | None
    signal: str | None
    out_of_memory: Literal["gpu", "host"] | None

    def __repr__(self) -> str:
        """A line: `oomph.runs()` has hundreds."""
        end = f"exit {self.exit_code}" if self.state == "ended" else self.state
        if self.out_of_memory:
            end += f", {self.out_of_memory} out of memory"
        return (
            f"<RunSummary {self.id}: {shlex.join(self.command)!r},"
            f" {format_duration(self.duration_s)}, {end}>"
        )
