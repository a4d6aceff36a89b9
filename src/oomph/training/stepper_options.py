"""What a Stepper was given -> how it trains, or an error that says what contradicts what."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from oomph.errors import UsageError
from oomph.records.plan import Plan
from oomph.records.workload import How, Precision
from oomph.training.ranks import Ranks


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


def check(how: How, ranks: Ranks | None, *, accumulate: int, clip_grad_norm: float | None) -> None:
    """Raises UsageError."""
    is_replicated = ranks is not None
    if how.num_gpus > 1 and not (is_replicated and how.sharding == "ddp"):
        raise UsageError(
            f"the plan is for several GPUs ({how.num_gpus}, {how.sharding})",
            because="a Stepper trains on one, or a model in DistributedDataParallel on each rank",
            attempt="torchrun and DistributedDataParallel(model), or plan.to_code()",
        )
    if how.optimizer_in_backward and is_replicated:
        raise UsageError(
            "the optimizer cannot step in backward on several ranks",
            because="gradients are averaged after it",
            attempt="a plan without optimizer-in-backward",
        )
    if accumulate < 1:
        raise UsageError(f"{accumulate} batches cannot be accumulated", attempt="accumulate=1")
    if how.optimizer_in_backward and (accumulate > 1 or clip_grad_norm is not None):
        raise UsageError(
            "the optimizer cannot step in backward",
            because="accumulating and clipping need gradients that are used up there",
            attempt="a plan without optimizer-in-backward",
        )


def check_optimizers(optimizers: Sequence[Any]) -> None:
    """Raises UsageError for one that evaluates the loss by itself, as often as it likes."""
    for optimizer in optimizers:
        inside = getattr(optimizer, "optimizer", optimizer)
        name = type(inside).__name__
        if _wants_a_closure(inside):
            raise UsageError(
                f"a Stepper cannot run {name}",
                because="its step needs a closure that runs the whole batch again",
                attempt="a loop of your own; or an optimizer without a closure, such as AdamW",
            )


# Sharpness-aware ones take a closure that is none by default, and fail without one.
_TWO_STEPS = ("first_step", "second_step")


def _wants_a_closure(optimizer: Any) -> bool:
    if isinstance(optimizer, torch.optim.LBFGS) or all(hasattr(optimizer, n) for n in _TWO_STEPS):
        return True
    try:
        named = inspect.signature(optimizer.step).parameters
    except (TypeError, ValueError):
        return False
    closure = named.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def several(one_or_more: Any) -> tuple[Any, ...]:
    """None, one of something, or a list of them."""
    if one_or_more is None:
        return ()
    return tuple(one_or_more) if isinstance(one_or_more, list | tuple) else (one_or_more,)


_KEYS = {"format", "scaler", "sizes", "measured", "tricks", "num_ooms", "accumulated"}


def check_state(state: Any, number: int, *, has_scaler: bool) -> None:
    """Raises UsageError for what is no state of such a Stepper."""
    if not isinstance(state, dict) or not state.keys() >= _KEYS:
        raise UsageError(
            "this is not the state of a Stepper",
            because=f"it is a {type(state).__name__} without"
            f" {', '.join(sorted(_KEYS - set(state if isinstance(state, dict) else ())))}",
            attempt="what Stepper.state_dict() returned",
        )
    if state["format"] != number:
        raise UsageError(
            f"this Stepper state has format {state['format']!r:.40}",
            because=f"this version of oomph reads format {number}",
            attempt="the version of oomph that saved it",
        )
    if (state["scaler"] is not None) is not has_scaler:
        saved, here = ("without", "has one") if has_scaler else ("with", "has none")
        raise UsageError(
            f"this state was saved {saved} a loss scaler, and this Stepper {here}",
            attempt='the same precision="fp16" or scaler= as before',
        )


def no_loss(_: Any, __: Any) -> NoReturn:
    """Stands in for a loss that was not given."""
    raise UsageError(
        "this Stepper was given no loss",
        attempt="Stepper(model, optimizer, loss), or step.micro(batch)",
    )


def no_scalar(loss: Any) -> UsageError:
    """What backward cannot begin at."""
    is_tensor = isinstance(loss, torch.Tensor)
    what = f"a tensor of {list(loss.shape)}" if is_tensor else f"of type {type(loss).__name__}"
    return UsageError(
        f"the loss is {what}",
        because="backward begins at one number",
        attempt="loss.mean()" if is_tensor else 'outputs.loss, or outputs["loss"]',
    )


def device_kind(model: Any) -> str:
    """ "cuda", "cpu": where the first parameter is."""
    parameter = next(iter(model.parameters()), None)
    kind: str = "cpu" if parameter is None else parameter.device.type
    return kind
