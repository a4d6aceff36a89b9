"""What was rehearsed on one number of GPUs -> the same on another, where that is no other.

With DDP every GPU holds everything, however many there are: only what is sent differs. With hybrid
sharding the optimizer's step sees the shards of one group, and nothing of the group's copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from oomph.predicting.footprint import Footprint, Kernel
    from oomph.predicting.ways import Family, Step

_OF_A_RING = "all_reduce"


def family_like(family: Family, known: Mapping[Family, Footprint]) -> Footprint | None:
    """A family with DDP, from the same on another number of GPUs."""
    if family.sharding != "ddp":
        return None
    alike = (key for key in known if key._replace(num_gpus=family.num_gpus) == family)
    other = next(alike, None)
    return None if other is None else _resent(known[other], other.num_gpus, family.num_gpus)


def step_like(step: Step, known: Mapping[Step, Footprint]) -> Footprint | None:
    """An optimizer's step, from the same where parameters are cut into as many pieces."""
    alike = (key for key in known if _on_one_group(key) == _on_one_group(step))
    other = next(alike, None)
    return None if other is None else known[other]  # in which nothing is sent


def _on_one_group(step: Step) -> Step:
    """The step of one copy of the model."""
    from oomph.records.sharding import grid_of
    from oomph.records.workload import How

    if step.sharding not in ("ddp", "hybrid"):
        return step
    if step.sharding == "ddp":
        return step._replace(num_gpus=0)  # of any number
    _, shards = grid_of(How(sharding="hybrid", num_gpus=step.num_gpus))
    return step._replace(sharding="fsdp", num_gpus=shards)


def _resent(footprint: Footprint, num_before: int, num_gpus: int) -> Footprint:
    """The same, with what is all-reduced sent among another number of GPUs."""
    kernels = tuple(_sent_among(each, num_before, num_gpus) for each in footprint.kernels)
    return replace(footprint, kernels=kernels)


def _sent_among(kernel: Kernel, num_before: int, num_gpus: int) -> Kernel:
    """In a ring of n each GPU sends 2 x (n - 1) / n of what is summed, rounded down."""
    if kernel.name != _OF_A_RING:
        return kernel
    summed = -(-kernel.fixed_moved_bytes * num_before // (2 * (num_before - 1)))
    return kernel._replace(fixed_moved_bytes=2 * summed * (num_gpus - 1) // num_gpus)
