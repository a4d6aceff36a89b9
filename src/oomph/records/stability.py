"""Stability: the noise scale of the gradient, and warnings about the training as it goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

ADVICE = ". Try: "  # between what is wrong and what to do
Trend = Literal["rising", "steady", "falling"]
WarningKind = Literal[
    "oscillation",  # the loss goes up and down far more than it goes down
    "spikes",  # single losses far above the others
    "gradient-outliers",  # single gradients far larger than the others
    "scaler-skips",  # the loss scaler skips many steps
    "not-finite",  # the loss or the gradient is infinite or not a number
    "large-updates",  # updates are large beside their weights
    "small-updates",  # updates are too small to matter
    "lost-updates",  # updates are too small for the weights' precision, and are rounded away
]


@dataclass(frozen=True, slots=True, kw_only=True)
class NoiseScale:
    """The batch size, in examples, at which noise and gradient are equally large.

    Far below it, each example counts fully; far above it, more examples per step hardly help. It is
    known to a factor of 2 or 3 (`low` to `high`).
    """

    examples: float
    low: float
    high: float
    batch: int  # examples of one optimizer step, on all ranks
    num_samples: int  # steps in which it was measured
    trend: Trend | None  # None: not known yet

    @property
    def batch_ratio(self) -> float:
        """Return the batch as a multiple of the noise scale."""
        return self.batch / self.examples

    @property
    def advice(self) -> str:
        """Return what it says about the batch size."""
        if self.batch < self.low:
            return "a larger one would still help"
        if self.batch <= self.high:
            return "a good size"
        smaller = "half" if self.batch_ratio < 6 else "a quarter"
        return f"{smaller} of it would learn as much from each example, in less memory"

    def __str__(self) -> str:
        trend = "" if self.trend is None else f", {self.trend}"
        return (
            f"Your batch of {self.batch} is {self.batch_ratio:.2g}x the noise scale"
            f" ({_rounded(self.examples)} examples, {_rounded(self.low)} to"
            f" {_rounded(self.high)}{trend}): {self.advice}"
        )


def _rounded(number: float) -> str:
    """Return two digits of a number.

    >>> _rounded(1234.5), _rounded(0.034)
    ('1200', '0.034')
    """
    return f"{float(f'{number:.2g}'):g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityWarning:
    """Something that goes wrong in a training: what, by which measure, and what to change."""

    kind: WarningKind
    step: int  # optimizer steps done when it was noticed
    sentence: str
    evidence: str
    advice: str

    def __str__(self) -> str:
        return f"{self.sentence} ({self.evidence}){ADVICE}{self.advice}"


LearningRateRule = Literal["linear", "square-root", "noise-curve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingChange:
    """A number of an optimizer or of its scheduler that was changed."""

    where: str  # "group 0", "CosineAnnealingLR"
    name: str  # "lr", "betas[1]", "eta_min"
    before: float
    after: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRateChange:
    """What was changed to train with another batch size."""

    rule: LearningRateRule
    from_batch: int
    to_batch: int
    factor: float  # of all learning rates
    changes: tuple[SettingChange, ...]

    def __str__(self) -> str:
        head = (
            f"batch {self.from_batch} -> {self.to_batch}: learning rate x {self.factor:.4g}"
            f" ({self.rule})"
        )
        lines = [f"  {c.where} {c.name}: {c.before:.6g} -> {c.after:.6g}" for c in self.changes]
        return "\n".join([head, *lines])
