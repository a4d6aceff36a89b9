"""Plan, Trick: the chosen settings, the reason for each, and its cost on four axes.

The axes are stability of training, memory, resources (GPUs, host memory) and time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from oomph.records.notebook import html_of
from oomph.records.prediction import Prediction, Verdict
from oomph.records.script import ScriptChanges, Seen
from oomph.records.stored import SCHEMA, to_jsonable
from oomph.records.workload import GPUS_PER_NODE, LORA_RANK, Keeps, LoraTargets, Precision, Variant
from oomph.units import format_bytes

# same: exactly the same update. rounding: the same up to rounding, which is checked. changes: a
# different training.
Stability = Literal["same", "rounding", "changes"]
Preference = Literal["balance", "time", "memory", "resources"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What to plan, except for the GPU."""

    batch_size: int | None = None
    max_gpus: int = 1
    gpus_per_node: int = GPUS_PER_NODE
    allow: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    prefer: Preference = "balance"
    target_ratio: float = 1.0  # share of the GPU memory that CUDA can use
    # stability of tricks, from `oomph check`
    checked: Mapping[str, Stability] = field(default_factory=dict)
    keeps: Keeps | None = None  # of the model's outputs; None: as the workload says
    lora_rank: int = LORA_RANK  # of adapters, if they are allowed
    lora_targets: LoraTargets = "all-linear"
    time_limit_s: float | None = None  # of the search; None: until all is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Trick:
    """One trick, as a plan sets it."""

    name: str  # as --allow and --forbid take it: "checkpointing"
    what: str  # "recompute 12 of 24 blocks in backward"
    stability: Stability
    caveat: str | None  # what to know first, with this model's numbers
    code: str  # the line or the flag that applies it


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchLimits:
    """How many examples fit at a time with a plan.

    The number need not divide the batch or suit the kernels. A fraction of an example stands for a
    shorter one.
    """

    fit: float  # in the worst case of the unknowns
    too_many: float  # in the best case
    elements: int | None  # elements per planned example, in tensors with several per example


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One variant that keeps the batch size, and what it costs."""

    gpu: str
    workload: str
    variant: Variant
    prediction: Prediction
    tricks: tuple[Trick, ...]
    stability: Stability  # the weakest among its tricks
    relative_time: float | None  # to the fastest variant on a GPU with infinite memory
    recommended: bool
    why: str  # a sentence
    block_names: tuple[str, ...] = ()  # of the model, in the order that checkpointing counts them
    reach: MicroBatchLimits | None = None  # None: unknown beyond the micro-batch

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

    def __repr__(self) -> str:
        return f"<Plan of {self.workload} on {self.gpu}: {self}>"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def __str__(self) -> str:
        """Return one line with all four axes."""
        return self.in_one_line(f"{self.micro_batch} x {self.accumulate}")

    def in_one_line(self, split: str) -> str:
        """Return the line with another wording for the split of the batch."""
        names = ", ".join(t.name for t in self.tricks if t.name != "accumulation") or "as it is"
        gpus = "" if self.gpus == 1 else f", {self.gpus} GPUs"
        time = ""
        if self.relative_time is not None:
            time = f", {self.relative_time:.2f} x the time of the fastest with unlimited memory"
        return (
            f"{split}{gpus}, {names}: update {self.stability},"
            f" {format_bytes(self.prediction.device_bytes)} of"
            f" {format_bytes(self.prediction.capacity_bytes)}{time}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """One or more variants that were considered and are not among the plans."""

    what: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortfall:
    """Why nothing fits without consent, how near the nearest plan comes, and what would do."""

    missing_bytes: int  # of the smallest plan
    largest_part: str  # "optimizer 12.4 GiB"
    smallest_gpu: str | None  # in the catalogue, that fits the smallest plan
    num_gpus: int | None  # of the requested kind, if sharded
    variant: Variant | None = None  # the smallest plan
    device_bytes: int | None = None  # its memory
    high_bytes: int | None = None
    step_s: float | None = None
    beyond_sharding: str | None = None  # why more GPUs with FSDP are no help, if that is known


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """What a search had not compared when its time was over."""

    limit_s: float
    left_out: tuple[str, ...]  # combinations of tricks: "bf16, checkpointing blocks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a trick that was not allowed would give, and its price."""

    allow: str  # the trick, as --allow takes it
    price: str  # what of training changes, as a clause
    variant: Variant
    fits: Verdict
    device_bytes: int
    high_bytes: int
    missing_bytes: int  # 0 if it fits
    host_bytes: int
    step_s: float | None  # of one optimizer step, with its own batch size
    time_ratio: float | None  # for as many examples, to the recommended plan
    smallest_gpu: str | None  # in the catalogue, that fits it; None if this GPU does


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Live bytes over the last step of a plan, by category, for drawing."""

    positions: tuple[float, ...]  # in the step, 0..1
    categories: tuple[str, ...]
    live_bytes: tuple[tuple[int, ...], ...]  # of each category, at each position
    phases: tuple[tuple[float, str], ...]  # start and name
    ops: tuple[str, ...] = ()  # the last op to allocate at each position, "mm in blocks.3"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plans:
    """The plans that fit, the recommended one first, and why others were rejected."""

    workload: str
    gpu: str
    batch_size: int
    capacity_bytes: int
    fits_as_is: Verdict
    as_is: Prediction  # the workload as given, on one GPU
    plans: tuple[Plan, ...]
    rejected: tuple[Rejected, ...]
    shortfall: Shortfall | None  # if nothing fits
    caveats: tuple[str, ...]  # what to know first, with this model's numbers
    num_candidates: int  # variants that were compared
    largest_micro_batch: int | None = None  # the largest that fits as given, if it fits
    seen: Seen | None = None  # for a script: what it does
    changes: ScriptChanges | None = None  # for a script: what to change in it for the best plan
    timelines: tuple[Timeline, ...] = ()  # of each plan, if they are to be drawn
    cut: Cut | None = None  # if the time limit ended the search
    offers: tuple[Offer, ...] = ()  # with tricks that were not allowed; the mildest change first

    @property
    def best(self) -> Plan | None:
        return self.plans[0] if self.plans else None

    @property
    def time_ratios(self) -> tuple[float | None, ...]:
        """Return each plan's time as a ratio of the recommended plan's; None if unknown."""
        reference = self.best.relative_time if self.best else None
        return tuple(
            plan.relative_time / reference if plan.relative_time and reference else None
            for plan in self.plans
        )

    @property
    def is_about_several(self) -> bool:
        """Return whether a plan uses more than one GPU."""
        return any(plan.gpus > 1 for plan in self.plans)

    def __getitem__(self, place: int) -> Plan:
        return self.plans[place]

    def __len__(self) -> int:
        return len(self.plans)

    def __iter__(self) -> Iterator[Plan]:
        return iter(self.plans)

    def __repr__(self) -> str:
        """Return one line: how many there are, and the recommended one."""
        best = f", the best: {self.best}" if self.best else ": nothing that is allowed fits"
        number = f"{len(self)} plan{'s' * (len(self) != 1)}"
        return f"<Plans of {self.workload} on {self.gpu}: {number}{best}>"

    def _repr_html_(self) -> str | None:
        return html_of(self)

    def __str__(self) -> str:
        """Return the plans as a plain table; `oomph plan` draws them."""
        verdicts = {"yes": "fits", "no": "does not fit", "uncertain": "may or may not fit"}
        head = f"{self.workload} {verdicts[self.fits_as_is]} as it is on {self.gpu}"
        if not self.plans:
            missing = self.shortfall.missing_bytes if self.shortfall else 0
            return f"{head}; nothing that is allowed fits: {format_bytes(missing)} are missing"
        is_known = self.seen is None or self.seen.is_batch_known
        lines = [str(p) if is_known else p.in_one_line("own batch") for p in self.plans]
        marks = ["->" if p.recommended else "  " for p in self.plans]
        return "\n".join([head, *map("{} {}".format, marks, lines)])


def as_answer(plans: Plans) -> dict[str, Any]:
    """Return what `oomph plan --json` prints. docs/plan-format.md describes the fields."""
    return {
        "schema": SCHEMA,
        "workload": plans.workload,
        "gpu": plans.gpu,
        "batch_size": plans.batch_size,
        "capacity_bytes": plans.capacity_bytes,
        "fits_as_is": plans.fits_as_is,
        "as_is": _cost(plans.as_is),
        "plans": [
            {**_as_row(plan), "time_ratio": ratio}
            for plan, ratio in zip(plans, plans.time_ratios, strict=True)
        ],
        "rejected": to_jsonable(plans.rejected),
        "shortfall": to_jsonable(plans.shortfall),
        "caveats": list(plans.caveats),
        "num_candidates": plans.num_candidates,
        "largest_micro_batch": plans.largest_micro_batch,
        "seen": to_jsonable(plans.seen),
        "offers": to_jsonable(plans.offers),
        "cut": to_jsonable(plans.cut),
    }


def _as_row(plan: Plan) -> dict[str, Any]:
    return {
        "recommended": plan.recommended,
        "micro_batch": plan.micro_batch,
        "accumulate": plan.accumulate,
        "gpus": plan.gpus,
        "precision": plan.precision,
        "checkpointing": plan.checkpointing,
        "optimizer": plan.optimizer,
        "tricks": to_jsonable(plan.tricks),
        "stability": plan.stability,
        **_cost(plan.prediction),
        "relative_time": plan.relative_time,
        "why": plan.why,
        "variant": to_jsonable(plan.variant),
        "reach": to_jsonable(plan.reach),
    }


def _cost(prediction: Prediction) -> dict[str, Any]:
    names = ("fits", "device_bytes", "low_bytes", "high_bytes", "host_bytes", "step_s")
    return {name: getattr(prediction, name) for name in names}
