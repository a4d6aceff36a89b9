"""Checks: whether training with a trick is still the same training, where not, and how sure.

There is one record per check. A verdict is about the trick and not about the model: "fails" means
that the trick would change or break this training.
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
# are not padding, pixels); "class weights": the sum of their weights; "other": none of these.
Normaliser = Literal["mean", "sum", "targets", "class weights", "other"]

# Gradients of the split batch count as equal below this difference. Rounding in fp64 gives 1e-16 to
# 1e-13, in fp32 1e-7 to 1e-5; the weakest coupling found so far gives 1e-3.
SAME_IN_FP64, SAME_IN_FP32 = 1e-8, 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that breaks, gets lost or is good to know: where it is, and what to do."""

    what: str
    module: str | None  # its name; "": the model itself; None: outside it, in the loss
    op: str | None = None
    do: str  # what to do

    @property
    def where(self) -> str:
        if self.module is None:
            return "the loss"
        return self.module or "the model's own forward"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """The fields that every check has."""

    verdict: CheckVerdict
    conclusion: str  # a sentence
    findings: tuple[Finding, ...] = ()
    confidence: Confidence = "high"
    limits: tuple[str, ...] = ()  # why the confidence is not higher


@dataclass(frozen=True, slots=True, kw_only=True)
class AccumulationCheck(Check):
    """Whether the gradient of the split batch equals that of the whole batch."""

    normaliser: Normaliser | None = None  # None: the examples cannot be separated
    piece_sizes: tuple[int, ...] = ()  # examples in each piece tried
    # of the pieces' gradients in the best fit to the whole gradient
    weights: tuple[float, ...] = ()
    residual_ratio: float | None = None  # share of the gradient that the best fit misses
    divided_ratio: float | None = None  # the same, with each piece divided by the number of pieces


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionCheck(Check):
    """Whether this model trains with autocast to this dtype."""

    dtype: LowPrecision
    gradient_error_ratio: float | None = None  # of the whole gradient, against fp64
    sensitivity_ratio: float | None = None  # against fp64, with only weights and inputs rounded
    fp32_error_ratio: float | None = None  # in fp32: the error that rounding causes anyway
    zeroed_ratio: float | None = None  # share of the gradient's values that became 0
    largest_value: float | None = None  # in forward, in this dtype
    loss_scale: float | None = None  # initial value; None: not needed


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointingCheck(Check):
    """Whether a recomputed block gives the same result."""

    num_blocks: int = 0
    broken_blocks: tuple[str, ...] = ()  # their names
    gradient_error_ratio: float | None = None  # all blocks recomputed, against none


@dataclass(frozen=True, slots=True, kw_only=True)
class Checks:
    """All checks of a workload. None: not requested."""

    workload: str
    num_examples: int  # in the batch that was run
    accumulation: AccumulationCheck | None
    fp16: PrecisionCheck | None
    bf16: PrecisionCheck | None
    checkpointing: CheckpointingCheck | None

    def __iter__(self) -> Iterator[tuple[str, Check]]:
        """Yield the checks that were made, with their names."""
        for name in CHECKS:
            check = getattr(self, name)
            if check is not None:
                yield name, check

    @property
    def verdict(self) -> CheckVerdict:
        """Return the worst verdict: "fails", then "uncertain"."""
        found = {check.verdict for _, check in self}
        order: tuple[CheckVerdict, ...] = ("fails", "uncertain", "passes")
        return next((verdict for verdict in order if verdict in found), "skipped")


CHECKS = ("accumulation", "fp16", "bf16", "checkpointing")
# Tricks that split a batch: each of them changes training if examples are coupled.
_DIVIDE_A_BATCH = ("accumulation", "ddp", "fsdp", "hybrid")


def stability_of_check(checks: Checks) -> Mapping[str, Stability]:
    """Return the stability of tricks by name; a trick that the checks cannot judge is missing.

    "same" and "rounding" are proven here as far as a few examples prove it; "changes" means that
    the trick needs the user's consent for this model, as BatchNorm needs it for accumulation.
    """
    found: dict[str, Stability] = {}
    if_passed: dict[str, Stability] = {"fp16": "rounding", "bf16": "rounding"}
    for name, check in checks:
        if check.verdict in ("passes", "fails"):
            stability = if_passed.get(name, "same") if check.verdict == "passes" else "changes"
            tricks = _DIVIDE_A_BATCH if name == "accumulation" else (name,)
            found.update(dict.fromkeys(tricks, stability))
    return found
