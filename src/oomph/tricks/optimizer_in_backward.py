"""Update each parameter in backward, as soon as its gradient is ready.

A gradient is used and dropped inside backward, so the full set never exists. The optimizer stays
the user's object, with its state, state dict and groups: a scheduler keeps setting the learning
rates, and `step()` finds no gradients and does nothing.

It requires one backward per step, and nothing may need all gradients together: no accumulation, no
clipping of the global norm, no loss scaler.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.definition import TOO_LATE_IN_SCRIPT, Definition, Fragment, by_hand

if TYPE_CHECKING:
    import torch


def step_in_backward(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Change the optimizer to update in backward, and return it. Raises UsageError."""
    step = getattr(type(optimizer), "step", None)
    if step is None or not hasattr(optimizer, "param_groups"):
        raise _refusal(
            optimizer,
            "it has no param_groups and step() as torch's optimizers have",
            "an optimizer of torch.optim",
        )
    if needs_closure(step):
        raise _refusal(
            optimizer,
            "its step() computes the loss again",
            "another optimizer, or its step after backward",
        )
    one_by_one = _OneByOne(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(one_by_one)
    return optimizer


def _refusal(optimizer: object, because: str, attempt: str) -> UsageError:
    what = f"{type(optimizer).__name__} cannot be stepped in backward"
    return UsageError(what, because=because, attempt=attempt)


def needs_closure(step: Callable[..., Any]) -> bool:
    """Return whether an optimizer's step has to be given a closure, which computes the loss."""
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


# The closure of sharpness-aware optimizers defaults to None, but they fail without one.
_TWO_STEPS = ("first_step", "second_step")


def wants_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer runs the batch itself, by a closure, perhaps several times."""
    import torch

    is_two_step = all(hasattr(optimizer, name) for name in _TWO_STEPS)
    if is_two_step or isinstance(optimizer, torch.optim.LBFGS):
        return True
    try:
        return needs_closure(optimizer.step)
    except (TypeError, ValueError):  # it has no signature
        return False


class _OneByOne:
    """Step the optimizer for one parameter, as if its groups held only that parameter."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def __call__(self, parameter: torch.Tensor) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        group = groups[self._group_of[id(parameter)]]
        before = dict(group)
        optimizer.param_groups = [group]
        group["params"] = [parameter]
        try:
            type(optimizer).step(optimizer)  # the class's method: a scheduler wraps the object's
        finally:
            group["params"] = before["params"]
            optimizer.param_groups = groups
        changed = [name for name in group if group[name] is not before.get(name)]
        if changed:  # an optimizer that counts steps in a group would count once per parameter
            raise _refusal(
                optimizer,
                f"its step changes {', '.join(sorted(changed))} of the whole group",
                "its step after backward",
            )
        parameter.grad = None


def _conflict(variant: Variant, clips_gradients: bool) -> UsageError | None:
    found: tuple[str, str] | None = None
    if variant.sharding == "ddp":
        found = "DDP averages gradients only after backward", "fsdp, which averages them first"
    elif variant.offload_optimizer or variant.zero_offload:
        found = "its step runs on the host", "only one of these two tricks"
    elif variant.accumulation > 1:
        because = "a step adds up the gradients of several micro-batches"
        found = because, "the whole batch at once"
    elif clips_gradients:
        because = "clip_grad_norm needs all gradients before the first is used"
        found = because, "a workload without clip_grad_norm"
    elif variant.precision == "fp16":
        because = "the loss scaler of fp16 must see all gradients before the first is used"
        found = because, "bf16"
    if found is None:
        return None
    return UsageError("the optimizer cannot step in backward", because=found[0], attempt=found[1])


_IN_BACKWARD = '''
class InBackward:
    """One optimizer for each parameter, which steps as soon as backward has its gradient."""

    def __init__(self, parameters, make_optimizer):
        trained = [p for p in parameters if p.requires_grad]
        self.optimizers = {p: make_optimizer([p]) for p in trained}
        for parameter in trained:
            parameter.register_post_accumulate_grad_hook(self.step_one)

    def step_one(self, parameter):
        self.optimizers[parameter].step()
        self.optimizers[parameter].zero_grad(set_to_none=True)
'''

OPTIMIZER_IN_BACKWARD = Definition(
    name="optimizer-in-backward",
    stability="same",
    setting="optimizer_in_backward",
    what="update with each gradient as soon as it is ready, and free it",
    code="model, optimizer = oomph.apply(plan, model, make_optimizer)",
    caveat="no accumulation, no clipping by the whole norm, no loss scaler",
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    put_on_optimizer=step_in_backward,
    put_on_made=step_in_backward,
    by_hand=by_hand(
        "the optimizer's step inside backward:"
        " parameter.register_post_accumulate_grad_hook(step) with one optimizer per parameter"
    ),
    in_code=lambda _: Fragment(functions=[_IN_BACKWARD], optimizer_class="InBackward"),
)
