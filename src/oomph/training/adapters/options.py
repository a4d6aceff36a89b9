"""What every adapter may be told of how to split: the same names as a Stepper's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, TypedDict

from oomph.records.plan import Plan
from oomph.training.stepper_batches import Count, Split
from oomph.training.weights import Weight


class Options(TypedDict, total=False):
    """Keywords of Window."""

    plan: Plan | None
    micro_batch: int | None
    weight: Weight | None
    whole: Collection[str]
    split: Split | None
    count: Count | None
    last_resorts: Sequence[str]
    keeps_other_rngs: bool
    beside: Sequence[Any]
