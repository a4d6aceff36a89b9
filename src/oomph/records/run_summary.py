"""RunSummary: one line on a run that is kept, without reading all of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

RunState = Literal[
    "running",
    "ended",
    "unknown",  # nobody wrote how it ended: whoever watched it was killed
]


@dataclass(frozen=True, slots=True, kw_only=True)
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
