"""An optimizer -> the same, which updates each parameter as soon as its gradient is there.

A gradient is used up and dropped inside backward: there is never a whole set of them. The
optimizer stays the user's own object, with its state, its state dict and its groups: a scheduler
goes on setting their learning rates, and `step()` finds no gradient left and does nothing.

It needs that a step is one backward, and that nothing looks at all gradients together: no
accumulation, no clipping of the whole norm, no loss scaler.
"""

from __future__ import annotations

import inspect
from typing import Any

from oomph.errors import UsageError


def step_in_backward(optimizer: Any) -> Any:
    """Update in backward. The optimizer itself, changed. Raises UsageError."""
    step = getattr(type(optimizer), "step", None)
    if step is None or not hasattr(optimizer, "param_groups"):
        raise UsageError(
            f"{type(optimizer).__name__} cannot be stepped in backward",
            because="it has no param_groups and step() as torch's optimizers have",
            attempt="an optimizer of torch.optim",
        )
    if _needs_closure(step):
        raise UsageError(
            f"{type(optimizer).__name__} cannot be stepped in backward",
            because="its step() computes the loss again",
            attempt="another optimizer, or its step after backward",
        )
    one_by_one = _OneByOne(optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(one_by_one)
    return optimizer


def _needs_closure(step: Any) -> bool:
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class _OneByOne:
    """Steps the optimizer for one parameter: its groups are that parameter's group alone."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._group_of = {
            id(parameter): number
            for number, group in enumerate(optimizer.param_groups)
            for parameter in group["params"]
        }

    def __call__(self, parameter: Any) -> None:
        optimizer = self._optimizer
        groups = optimizer.param_groups
        group = groups[self._group_of[id(parameter)]]
        before = dict(group)
        optimizer.param_groups = [group]
        group["params"] = [parameter]
        try:
            type(optimizer).step(optimizer)
        finally:
            group["params"] = before["params"]
            optimizer.param_groups = groups
        _check_unchanged(optimizer, before, group)
        parameter.grad = None


def _check_unchanged(optimizer: Any, before: dict[str, Any], group: dict[str, Any]) -> None:
    """An optimizer that counts its steps in a group would count each parameter as one."""
    changed = [name for name in group if group[name] is not before.get(name)]
    if changed:
        raise UsageError(
            f"{type(optimizer).__name__} cannot be stepped in backward",
            because=f"its step changes {', '.join(sorted(changed))} of the whole group",
            attempt="its step after backward",
        )
