"""Checks: is training with a trick still the same training? What was found, where, and how sure.

One record per check. A verdict is about the trick and not about the model: "fails" means that the
trick would change or break this training.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from oomph.records.plan import Stability

CheckVerdict = Literal["passes", "fails", "uncertain", "skipped"]
Confidence = Literal["high", "fair", "low"]
LowPrecision = Literal["fp16", "bf16"]
# What a loss divides the sum over its examples by. "targets": the labels that count (tokens that
# are no padding, pixels); "class weights": the sum of their weights; "other": none of these.
Normaliser = Literal["mean", "sum", "targets", "class weights", "other"]

# Gradients of the split batch that differ by less than this are the same. Rounding in fp64 gives
# 1e-16 to 1e-13, in fp32 1e-7 to 1e-5; the mildest coupling that was met gives 1e-3.
SAME_IN_FP64, SAME_IN_FP32 = 1e-8, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that breaks, is lost or is to be known: where it is, and what to do."""

    what: str
    module: str | None  # its name in the model; "" is the model itself; None: outside, in the loss
    op: str | None
    do: str  # what to do

    @property
    def where(self) -> str:
        if self.module is None:
            return "the loss"
        return self.module or "the model's own forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What every check says."""

    verdict: CheckVerdict
    conclusion: str  # a sentence
    findings: tuple[Finding, ...] = ()
    confidence: Confidence = "high"
    limits: tuple[str, ...] = ()  # why it is not surer


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationCheck(Check):
    """Is the gradient of the split batch the gradient of the whole?"""

    normaliser: Normaliser | None = None  # None: the examples do not come apart
    piece_sizes: tuple[int, ...] = ()  # examples in each piece that was tried
    weights: tuple[float, ...] = ()  # of the pieces' gradients: the best fit to the whole one
    residual_ratio: float | None = None  # what the best fit leaves of the gradient
    divided_ratio: float | None = None  # the same if every piece is divided by their number


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCheck(Check):
    """Will autocast to this dtype train this model?"""

    dtype: LowPrecision
    gradient_error_ratio: float | None = None  # to fp64, of the whole gradient
    sensitivity_ratio: float | None = None  # to fp64, if only weights and inputs are rounded
    fp32_error_ratio: float | None = None  # the same in fp32: what rounding is worth anyway
    zeroed_ratio: float | None = None  # of the gradient's values: those that became 0
    largest_value: float | None = None  # of forward, in this dtype
    loss_scale: float | None = None  # to begin with; None: none is needed


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingCheck(Check):
    """Does a block that is recomputed give what it gave?"""

    num_blocks: int = 0
    broken_blocks: tuple[str, ...] = ()  # by name
    gradient_error_ratio: float | None = None  # all blocks recomputed, to none


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """All that was checked of a workload. None: not asked for."""

    workload: str
    num_examples: int  # that it was run with
    accumulation: AccumulationCheck | None
    fp16: PrecisionCheck | None
    bf16: PrecisionCheck | None
    checkpointing: CheckpointingCheck | None

    def __iter__(self) -> Iterator[tuple[str, Check]]:
        """The checks that were made, by name."""
        for name in CHECKS:
            check = getattr(self, name)
            if check is not None:
                yield name, check

    @property
    def verdict(self) -> CheckVerdict:
        """The worst of all: what fails, else what is uncertain."""
        found = {check.verdict for _, check in self}
        order: tuple[CheckVerdict, ...] = ("fails", "uncertain", "passes")
        return next((verdict for verdict in order if verdict in found), "skipped")


CHECKS = ("accumulation", "fp16", "bf16", "checkpointing")
# Tricks that divide a batch: what couples its examples changes training with each of them.
_DIVIDE_A_BATCH = ("accumulation", "ddp", "fsdp", "hybrid")


def stability_of_check(checks: Checks) -> Mapping[str, Stability]:
    """What the checks say of a plan's levers, by their names; nothing where they cannot tell.

    "same" and "rounding" are proven here as far as a few examples prove it; "changes" means that
    the lever needs the user's consent for this model, as BatchNorm needs it for accumulation.
    """
    said: dict[str, Stability] = {}
    kept: dict[str, Stability] = {"fp16": "rounding", "bf16": "rounding"}
    for name, check in checks:
        if check.verdict in ("passes", "fails"):
            stability = kept.get(name, "same") if check.verdict == "passes" else "changes"
            levers = _DIVIDE_A_BATCH if name == "accumulation" else (name,)
            said.update(dict.fromkeys(levers, stability))
    return said
