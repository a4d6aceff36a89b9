"""Prediction: the peak, its make-up, its moment, its time, and how sure we are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oomph.records.script import Seen
from oomph.records.trace import Category, Phase
from oomph.records.workload import Variant

Verdict = Literal["yes", "no", "uncertain"]
# What the time rests on, the best last.
StepFrom = Literal["datasheet", "calibration", "measured step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Something that nobody could know from here, what it is worth, and what would settle it."""

    what: str
    low_bytes: int
    high_bytes: int
    settled_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Where in a step the peak is."""

    step: int  # counted from 1; the optimizer's state exists from the second on
    phase: Phase
    op: str
    module: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a training step will take on a GPU."""

    gpu: str
    variant: Variant
    allocated_bytes: int  # torch.cuda.max_memory_allocated
    reserved_bytes: int  # torch.cuda.max_memory_reserved
    device_bytes: int  # what nvidia-smi will show: reserved and the CUDA context
    low_bytes: int  # of device_bytes, over all that is unknown
    high_bytes: int
    capacity_bytes: int  # what the card's driver leaves to CUDA
    fits: Verdict
    num_retries: int  # times that the allocator has to give its cache back and try again
    by_category: Mapping[Category, int]  # of the live tensors at the peak
    by_module: Mapping[str, int]  # the largest first
    peak_at: Moment
    host_bytes: int = 0  # of the host's memory, pinned: what left the GPU
    bus_bytes: int = 0  # that go between the GPU and the host in one optimizer step
    step_s: float | None  # of one optimizer step, accumulation included
    step_low_s: float | None  # with every constant of the estimate at its best
    step_high_s: float | None  # and at its worst
    step_from: StepFrom | None
    samples_per_s: float | None
    unknowns: tuple[Unknown, ...]
    notes: tuple[str, ...]  # what was assumed
    doubt: str | None = None  # why the rehearsal itself may be wrong on this torch
    seen: Seen | None = None  # of a script: what it does
    # What is needed besides where the loop keeps what the model returned until the next step. 0
    # where that is nothing, or where it is known what the loop keeps.
    outputs_bytes: int = 0
