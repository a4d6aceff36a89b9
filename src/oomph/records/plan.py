"""Plan, Trick: the settings chosen, why each, and what each costs on the four axes.

The axes are the mission's: stability of training, memory, resources, time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from oomph.records.prediction import Prediction, Verdict
from oomph.records.script import Seen
from oomph.records.workload import Precision, Variant
from oomph.units import format_bytes

# Exactly the same update; the same within rounding, which is checked; another training.
Stability = Literal["same", "rounding", "changes"]
Preference = Literal["balance", "time", "memory", "resources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trick:
    """One lever, as a plan has set it."""

    name: str  # as --allow and --forbid take it: "checkpointing"
    what: str  # "recompute 12 of 24 blocks in backward"
    stability: Stability
    caveat: str | None  # what to know before it is used, with this model's numbers
    code: str  # the line or the flag that applies it


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """How many examples fit at a time by a plan, whatever kernels like and the batch divides by.

    A part of an example stands for a shorter one.
    """

    fit: float  # at the worst of what is unknown
    too_many: float  # at the best of it
    elements: int | None  # of one example that was planned with, in tensors that have several


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One way to train that keeps the batch, and what it costs."""

    gpu: str
    workload: str
    variant: Variant
    prediction: Prediction
    tricks: tuple[Trick, ...]
    stability: Stability  # the weakest of its tricks'
    relative_time: float | None  # to the fastest way on a GPU of infinite memory
    recommended: bool
    why: str  # a sentence
    block_names: tuple[str, ...] = ()  # of the model: what checkpointing counts, in its order
    reach: Reach | None = None  # None: nothing is known beyond the micro-batch

    @property
    def micro_batch(self) -> int:
        return self.variant.micro_batch

    @property
    def accumulate(self) -> int:
        return self.variant.accumulation

    @property
    def gpus(self) -> int:
        return self.variant.num_gpus

    @property
    def batch_size(self) -> int:
        return self.variant.batch_size

    @property
    def precision(self) -> Precision:
        return self.variant.precision

    @property
    def checkpointing(self) -> str:
        return self.variant.checkpointing

    @property
    def optimizer(self) -> str:
        return self.variant.optimizer

    @property
    def fits(self) -> Verdict:
        return self.prediction.fits

    def __str__(self) -> str:
        """One line on all four axes."""
        return self.in_one_line(f"{self.micro_batch} x {self.accumulate}")

    def in_one_line(self, split: str) -> str:
        """The same, with other words for how the batch is divided."""
        names = ", ".join(t.name for t in self.tricks if t.name != "accumulation") or "as it is"
        gpus = "" if self.gpus == 1 else f", {self.gpus} GPUs"
        time = "" if self.relative_time is None else f", {self.relative_time:.2f} x the time"
        return (
            f"{split}{gpus}, {names}: update {self.stability},"
            f" {format_bytes(self.prediction.device_bytes)} of"
            f" {format_bytes(self.prediction.capacity_bytes)}{time}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A way that was looked at and is not among the plans."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why nothing fits, and what would."""

    missing_bytes: int  # of the smallest plan
    largest_part: str  # "optimizer 12.4 GiB"
    smallest_gpu: str | None  # of the catalogue, on which the smallest plan fits
    num_gpus: int | None  # of the GPU asked for, on which it would fit when sharded


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The plans that fit, the recommended one first, and what became of the others."""

    workload: str
    gpu: str
    batch_size: int
    capacity_bytes: int
    fits_as_is: Verdict
    as_is: Prediction  # the workload as it was given, on one GPU
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    shortfall: Shortfall | None  # where nothing fits
    caveats: tuple[str, ...]  # the mission's, answered with this model's numbers
    num_candidates: int  # ways that were compared
    largest_micro_batch: int | None = None  # as given, where that fits: how far it could grow
    seen: Seen | None = None  # of a script: what it does

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    def __getitem__(self, place: int) -> Plan:
        return self.plans[place]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __str__(self) -> str:
        """The plans as a plain table; `oomph plan` draws them."""
        said = {"yes": "fits", "no": "does not fit", "uncertain": "may or may not fit"}
        head = f"{self.workload} {said[self.fits_as_is]} as it is on {self.gpu}"
        if not self.plans:
            missing = self.shortfall.missing_bytes if self.shortfall else 0
            return f"{head}; nothing that is allowed fits: {format_bytes(missing)} are missing"
        is_known = self.seen is None or self.seen.is_batch_known
        lines = [str(p) if is_known else p.in_one_line("own batch") for p in self.plans]
        marks = ["->" if p.recommended else "  " for p in self.plans]
        return "\n".join([head, *map("{} {}".format, marks, lines)])


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes over the last step of a plan, by category, for drawing."""

    positions: tuple[float, ...]  # in the step, 0..1
    categories: tuple[str, ...]
    live_bytes: tuple[tuple[int, ...], ...]  # of each category, at each position
    phases: tuple[tuple[float, str], ...]  # where each begins
    ops: tuple[str, ...] = ()  # what had last allocated at each position, "mm in blocks.3"
