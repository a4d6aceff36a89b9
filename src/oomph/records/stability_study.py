"""A stability study: short runs with several batch sizes, and what they say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from oomph.records.check import Confidence

RateRule = Literal["as-is", "kept", "scaled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyRun:
    """One short run. Losses are of examples that are the same in all runs."""

    batch_size: int
    rule: RateRule  # as-is: the workload's own batch and learning rate
    learning_rate: float  # of the first parameter group
    seed: int
    num_steps: int
    examples: tuple[int, ...]  # seen at each of `losses`
    losses: tuple[float | None, ...]  # None: not finite
    noise_scale: float | None  # examples
    lasted_s: float

    @property
    def has_diverged(self) -> bool:
        return None in self.losses

    @property
    def loss(self) -> float | None:
        """Return the loss at the end; None if it has diverged."""
        return None if self.has_diverged else self.losses[-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StudyCell:
    """All seeds of a batch size and learning rate."""

    batch_size: int
    rule: RateRule
    learning_rate: float
    num_steps: int
    loss: float | None  # mean; None: at least one has diverged
    spread: float  # between the highest and the lowest
    oscillation: float | None  # way of the loss over what it won; None: it won nothing
    trains_as_well: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StabilityStudy:
    """What short runs say about batch size and learning rate."""

    workload: str
    batch_size: int  # the workload's own
    num_examples: int  # that each run has seen
    num_seeds: int
    device: str
    start_loss: float
    cells: tuple[StudyCell, ...]  # by batch size
    runs: tuple[StudyRun, ...]
    diverging_rate: float | None  # at the workload's batch; None: not reached
    noise_scale: float | None
    smallest: StudyCell | None  # that trains as well
    largest: StudyCell | None  # that is still useful
    confidence: Confidence
    limits: tuple[str, ...]  # why the confidence is not higher


@dataclass(frozen=True, slots=True, kw_only=True)
class UnfinishedStudy:
    """What is on disk while a study goes on, to be resumed."""

    asked: str  # digest of everything that decides the runs
    num_examples: int
    runs: tuple[StudyRun, ...]
    diverging_rate: float | None
    has_range: bool  # the range test is done
