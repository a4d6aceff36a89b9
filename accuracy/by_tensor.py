"""Optimizers as torch had them before 1.12: one tensor at a time.

Each is a function of parameters, gradients and states, so that it can run on fp32 copies as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Update = Callable[[list[Any], list[Any], list[dict[str, Any]]], None]


class Plain(torch.optim.Optimizer):
    """An update of the parameters themselves."""

    def __init__(self, parameters: Any, update: Update) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.update = update

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.update(used, [p.grad for p in used], [self.state[p] for p in used])


def adam(parameters: list[Any], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    for p, gradient, state in zip(parameters, gradients, states, strict=True):
        if not {"exp_avg"} <= state.keys():
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["exp_avg"].mul_(0.9).add_(gradient, alpha=0.1)
        state["exp_avg_sq"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        denominator = (state["exp_avg_sq"].sqrt() / 1.0).add_(1e-8)
        p.addcdiv_(state["exp_avg"], denominator, value=-1e-4)


def sgd(parameters: list[Any], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    """With momentum and weight decay."""
    for p, gradient, state in zip(parameters, gradients, states, strict=True):
        if "momentum" not in state:
            state["momentum"] = torch.zeros_like(p)
        decayed = gradient.add_(p, alpha=1e-4)
        state["momentum"].mul_(0.9).add_(decayed)
        p.add_(state["momentum"], alpha=-0.1)


def nothing(parameters: list[Any], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    """For runs that were timed without an optimizer."""
