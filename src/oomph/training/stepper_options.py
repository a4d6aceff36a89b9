"""What a Stepper was given -> how it trains, or an error that says what contradicts what."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.workload import How, Precision
from oomph.training.recovery_memory import CudaMemory, Measurements


def how_to_train(plan: Plan | None, precision: Precision | None) -> How:
    """Raises UsageError."""
    if plan is None:
        return How(precision=precision or "fp32")
    if precision not in (None, plan.precision):
        raise UsageError(
            f"precision={precision!r} contradicts the plan, which has {plan.precision}",
            attempt="one of the two",
        )
    return plan.variant


def check(
    model: Any, how: How, *, accumulate: int, clip_grad_norm: float | None, is_alone: bool
) -> None:
    """Raises UsageError."""
    is_parallel = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    if is_alone and (how.num_gpus > 1 or is_parallel):
        raise UsageError(
            "a Stepper does not train on several GPUs by itself",
            because="all ranks have to agree on an out-of-memory error of one",
            attempt="plan.to_code() or plan.to_torchrun(), or agree=function",
        )
    if accumulate < 1:
        raise UsageError(f"{accumulate} batches cannot be accumulated", attempt="accumulate=1")
    if how.optimizer_in_backward and (accumulate > 1 or clip_grad_norm is not None):
        raise UsageError(
            "the optimizer cannot step in backward",
            because="accumulating and clipping need gradients that are used up there",
            attempt="a plan without optimizer-in-backward",
        )


def several(one_or_more: Any) -> tuple[Any, ...]:
    """None, one of something, or a list of them."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple) else (one_or_more,)


def no_loss(_: Any, __: Any) -> NoReturn:
    """Stands in for a loss that was not given."""
    raise UsageError(
        "this Stepper was given no loss",
        attempt="Stepper(model, optimizer, loss), or step.micro(batch)",
    )


def device_kind(model: Any) -> str:
    """ "cuda", "cpu": where the first parameter is."""
    device = _device(model)
    kind: str = "cpu" if device is None else device.type
    return kind


def _device(model: Any) -> Any:
    parameter = next(iter(model.parameters()), None)
    return None if parameter is None else parameter.device


def measured(model: Any, plan: Plan | None) -> Measurements | None:
    """What measures the memory that the plan leaves to torch; None where that is not a GPU's."""
    device, limit_bytes = _device(model), None
    if device is None or device.type != "cuda":
        return None
    if plan is not None:
        told = plan.prediction
        limit_bytes = told.capacity_bytes - (told.device_bytes - told.reserved_bytes)
    return Measurements(CudaMemory(device, limit_bytes), lambda: _gradient_bytes_to_come(model))


def _gradient_bytes_to_come(model: Any) -> int:
    """In an accumulation, or before a library has zeroed them, some are there."""
    to_come = (each for each in model.parameters() if each.requires_grad and each.grad is None)
    return sum(parameter.numel() * parameter.element_size() for parameter in to_come)


def has_batch_norm(model: Any) -> bool:
    """Whether another size would be another training."""
    return any(isinstance(each, _BatchNorm) and each.training for each in model.modules())
