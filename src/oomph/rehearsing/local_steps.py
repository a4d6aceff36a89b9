"""An optimizer of sharded parameters -> the same steps on this rank's parts of them.

torch dispatches each op on DTensors through its propagation of shardings, which takes seconds for
the lists of tensors of a foreach optimizer, and then runs the op on the local parts. An optimizer
that treats each number by itself runs the same ops on the parts alone: tests compare the two.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import optim

from oomph.pretending.ranks import local_part

# The update of a number depends on that number, its gradient and its state, and torch has a
# sharding of every op. Others step on DTensors, and fail where they would fail on GPUs.
_BY_NUMBER = (optim.SGD, optim.Adam, optim.AdamW)
_UNTRIED = ("capturable", "differentiable")  # options


def step_on_local_parts(optimizer: optim.Optimizer) -> None:
    """Let the optimizer step on this rank's parts, if that is the same.

    Between its steps its groups have the parameters themselves.
    """
    if not is_same_on_parts(optimizer):
        return
    step: Any = optimizer.step

    @functools.wraps(step)
    def step_on_parts(*args: Any, **kwargs: Any) -> Any:
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        try:
            for group, whole in groups:
                group["params"] = [_part_with_gradient(one) for one in whole]
            return step(*args, **kwargs)
        finally:
            for group, whole in groups:
                group["params"] = whole
                for parameter in whole:
                    if local_part(parameter) is not parameter:
                        local_part(parameter).grad = None  # `zero_grad` does not know it

    optimizer.step = step_on_parts  # type: ignore[method-assign]


def is_same_on_parts(optimizer: optim.Optimizer) -> bool:
    """Return whether torch's steps on DTensors and on their parts are known to be the same."""
    untried = _UNTRIED if type(optimizer) is not optim.SGD else (*_UNTRIED, "fused")
    is_tried = not any(group.get(one) for group in optimizer.param_groups for one in untried)
    return is_tried and type(optimizer) in _BY_NUMBER and not optimizer.state


def _part_with_gradient(parameter: torch.Tensor) -> torch.Tensor:
    part = local_part(parameter)
    if part is not parameter and parameter.grad is not None:
        part.grad = local_part(parameter.grad)
    return part
