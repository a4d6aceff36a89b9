"""What every adapter may be told of how to split: the same names as a Stepper's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

from oomph.records.plan import Plan
from oomph.training.division import Count, Split
from oomph.training.examples import BatchDim
from oomph.training.split_check import OnDifference
from oomph.training.weights import Weight


class Options(TypedDict, total=False):
    """Keywords of Window."""

    plan: Plan | None
    micro_batch: int | None
    weight: Weight | None
    on_difference: OnDifference
    whole: Collection[str]
    batch_dim: BatchDim | None
    split: Split | None
    count: Count | None
    last_resorts: Sequence[str]
    keeps_other_rngs: bool
    beside: Sequence[Any]
