"""Prediction: the peak, what it consists of, when it occurs, the step time, and error bars."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from oomph.records.notebook import html_of
from oomph.records.script import Seen
from oomph.records.trace import Category, Phase
from oomph.records.workload import Variant
from oomph.units import format_bytes, format_time

Verdict = Literal["yes", "no", "uncertain"]
# What the time is based on, the most accurate last.
StepFrom = Literal["datasheet", "calibration", "measured step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Something that cannot be known from here: its size, and how to find out."""

    what: str
    low_bytes: int
    high_bytes: int
    settled_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The moment of the peak within a step."""

    step: int  # counted from 1; optimizer state exists from the second step on
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
    device_bytes: int  # as nvidia-smi shows it: reserved plus the CUDA context
    low_bytes: int  # lower bound of device_bytes over all unknowns
    high_bytes: int
    capacity_bytes: int  # left to CUDA by the driver
    fits: Verdict
    num_retries: int  # times that the allocator releases its cache and tries again
    by_category: Mapping[Category, int]  # of the live tensors at the peak
    by_module: Mapping[str, int]  # the largest first
    peak_at: Moment
    host_bytes: int = 0  # host memory for what is offloaded
    bus_bytes: int = 0  # between GPU and host in one optimizer step
    step_s: float | None  # one optimizer step, including accumulation
    step_low_s: float | None  # nine of ten measured steps lie between these two
    step_high_s: float | None
    step_from: StepFrom | None
    samples_per_s: float | None
    unknowns: tuple[Unknown, ...]
    notes: tuple[str, ...]  # what was assumed
    doubt: str | None = None  # why the rehearsal itself may be wrong on this torch
    seen: Seen | None = None  # for a script: what it does
    # Extra memory if the loop keeps the model's outputs until the next step. 0 if there is none, or
    # if it is known what the loop keeps.
    outputs_bytes: int = 0

    def __repr__(self) -> str:
        """Return one line: whether it fits, the memory and the time."""
        verdict = {"yes": "fits", "no": "does not fit", "uncertain": "may or may not fit"}
        needs = f"{format_bytes(self.device_bytes)} of {format_bytes(self.capacity_bytes)}"
        step = "" if self.step_s is None else f", {format_time(self.step_s)} a step"
        return f"<Prediction for {self.gpu}: {verdict[self.fits]}, {needs}{step}>"

    def _repr_html_(self) -> str | None:
        return html_of(self)
