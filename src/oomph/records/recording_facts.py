"""What a memory snapshot does not hold, and `oomph.record` writes beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingFacts:
    """The circumstances of a snapshot. None: unknown."""

    torch_version: str
    gpu: str
    device: int
    has_run_out: bool
    total_bytes: int  # of the GPU
    allowed_bytes: int | None  # to this process, where a memory fraction is set
    free_bytes: int | None
    rank: int
    step: int | None
    script: str | None
    after_s: float  # since recording began
    alloc_conf: str


def facts_path(snapshot: Path) -> Path:
    """Return where the facts of a snapshot stand."""
    return snapshot.with_name(f"{snapshot.name}.json")
