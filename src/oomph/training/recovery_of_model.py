"""A model and its plan -> what to do when its memory runs out, and how far its pieces may grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from oomph.records.plan import Plan
from oomph.records.workload import How
from oomph.training.recovery import Recovery, planned_sizes, reach_of
from oomph.training.recovery_memory import CudaMemory, Measurements
from oomph.training.recovery_sizes import Sizes
from oomph.training.recovery_tricks import LastResorts


def recovery_for(
    model: Any,
    how: How,
    plan: Plan | None,
    *,
    micro_batch: int | None,
    last_resorts: Sequence[str],
    say: Callable[[str], None],
) -> Recovery:
    """Begins with the size that was given, which is never exceeded, or with what the plan knows."""
    splits = not how.optimizer_in_backward
    measured = measurements_of(model, plan) if splits else None
    may_differ = micro_batch is None and not any(_batch_norms(model))
    sizes = Sizes(
        micro_batch or (plan.micro_batch if plan else None),
        planned_sizes(plan) if plan else None,
        reach=reach_of(plan) if may_differ else None,
        measured=measured,
        # Whether BatchNorm is in training is known when the model has been trained.
        may_grow=lambda: micro_batch is None and not any(n.training for n in _batch_norms(model)),
    )
    resorts = LastResorts(model, how, last_resorts)
    return Recovery(sizes, resorts, say, splits=splits, measured=measured)


def measurements_of(model: Any, plan: Plan | None) -> Measurements | None:
    """What measures the memory that the plan leaves to torch; None where that is not a GPU's."""
    parameter, limit_bytes = next(iter(model.parameters()), None), None
    if parameter is None or parameter.device.type != "cuda":
        return None
    if plan is not None:
        told = plan.prediction
        limit_bytes = told.capacity_bytes - (told.device_bytes - told.reserved_bytes)
    memory = CudaMemory(parameter.device, limit_bytes)
    return Measurements(memory, lambda: _gradient_bytes_to_come(model))


def _gradient_bytes_to_come(model: Any) -> int:
    """In an accumulation, or before a library has zeroed them, some are there."""
    to_come = (each for each in model.parameters() if each.requires_grad and each.grad is None)
    return sum(parameter.numel() * parameter.element_size() for parameter in to_come)


def _batch_norms(model: Any) -> Iterator[Any]:
    """In training another size would be another training."""
    return (each for each in model.modules() if isinstance(each, _BatchNorm))
