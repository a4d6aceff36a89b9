"""A function that makes an optimizer -> the optimizer, with its state and its step on the host.

The host has a copy of each parameter, and the optimizer is made of those. Before its step the
gradients are copied to the host, after it the parameters are copied back. It is the user's own
optimizer otherwise: groups, schedulers and state dict work as ever.

Clip by the model's parameters (torch.nn.utils.clip_grad_norm_), not by the optimizer's: those are
the host's. A loss scaler looks into the optimizer, and does not work with it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.training.host import empty_on_host


def make_on_host(make: Callable[[Any], Any], parameters: Any) -> Any:
    """The optimizer, of copies of these parameters. Raises UsageError."""
    on_gpu = list(parameters)
    if not all(isinstance(parameter, torch.Tensor) for parameter in on_gpu):
        raise UsageError(
            "the optimizer cannot be offloaded",
            because="its parameters are not a plain list of tensors",
            attempt="making the groups inside the function that makes the optimizer",
        )
    pairs = [(parameter, _copied(parameter)) for parameter in on_gpu]
    optimizer = make([host for _, host in pairs])
    if not hasattr(optimizer, "register_step_pre_hook"):
        raise UsageError(
            f"{type(optimizer).__name__} cannot be offloaded",
            because="it is no optimizer of torch.optim's kind",
            attempt="an optimizer that inherits torch.optim.Optimizer",
        )
    optimizer.register_step_pre_hook(lambda *_: _take_gradients(pairs))
    optimizer.register_step_post_hook(lambda *_: _give_parameters(pairs))
    optimizer.zero_grad = types.MethodType(_zero_grad(pairs), optimizer)
    return optimizer


def _copied(parameter: Any) -> Any:
    host = empty_on_host(parameter)
    host.copy_(parameter.detach())
    return torch.nn.Parameter(host, requires_grad=parameter.requires_grad)


def _take_gradients(pairs: list[tuple[Any, Any]]) -> None:
    for parameter, host in pairs:
        host.grad = None
        if parameter.grad is not None:
            host.grad = empty_on_host(parameter.grad)
            host.grad.copy_(parameter.grad, non_blocking=True)
    if any(parameter.is_cuda for parameter, _ in pairs):
        torch.cuda.synchronize()  # the host reads what was copied


@torch.no_grad()
def _give_parameters(pairs: list[tuple[Any, Any]]) -> None:
    for parameter, host in pairs:
        if host.grad is not None:
            parameter.copy_(host, non_blocking=True)
            host.grad = None


def _zero_grad(pairs: list[tuple[Any, Any]]) -> Callable[..., None]:
    def zero_grad(_: Any, set_to_none: bool = True) -> None:
        for parameter, _host in pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    return zero_grad
