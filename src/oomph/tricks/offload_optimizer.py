"""Keep an optimizer's state and run its step on the host.

The host has a copy of each parameter, and the optimizer is made from those copies. Gradients are
copied to the host before its step, and parameters are copied back after it. Otherwise it is the
user's own optimizer: groups, schedulers and state dict work as usual.

Clip the model's parameters (torch.nn.utils.clip_grad_norm_), not the optimizer's: those are on the
host. A loss scaler inspects the optimizer and does not work with it.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

from oomph.errors import UsageError
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import TOO_LATE_IN_SCRIPT, Definition, Fragment, MakeOptimizer, by_hand
from oomph.tricks.offload_activations import empty_on_host

if TYPE_CHECKING:
    import torch

Pairs: TypeAlias = "list[tuple[torch.Tensor, torch.nn.Parameter]]"  # on the GPU and on the host


def make_on_host(make: MakeOptimizer, parameters: Any) -> torch.optim.Optimizer:
    """Make the optimizer from host copies of these parameters. Raises UsageError."""
    import torch

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
            because="it is not a torch.optim.Optimizer",
            attempt="an optimizer that inherits torch.optim.Optimizer",
        )
    optimizer.register_step_pre_hook(lambda *_: _take_gradients(pairs))
    optimizer.register_step_post_hook(lambda *_: _give_parameters(pairs))
    optimizer.zero_grad = types.MethodType(_zero_grad(pairs), optimizer)  # type: ignore[method-assign]
    return optimizer


def _copied(parameter: torch.Tensor) -> torch.nn.Parameter:
    import torch

    host = empty_on_host(parameter)
    host.copy_(parameter.detach())
    return torch.nn.Parameter(host, requires_grad=parameter.requires_grad)


def _take_gradients(pairs: Pairs) -> None:
    import torch

    for parameter, host in pairs:
        host.grad = None
        if parameter.grad is not None:
            host.grad = empty_on_host(parameter.grad)
            host.grad.copy_(parameter.grad, non_blocking=True)
    if any(parameter.is_cuda for parameter, _ in pairs):
        torch.cuda.synchronize()  # the host is about to read what was copied


def _give_parameters(pairs: Pairs) -> None:
    import torch

    with torch.no_grad():
        for parameter, host in pairs:
            if host.grad is not None:
                parameter.copy_(host, non_blocking=True)
                host.grad = None


def _zero_grad(pairs: Pairs) -> Callable[..., None]:
    def zero_grad(_: Any, set_to_none: bool = True) -> None:
        for parameter, _host in pairs:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.detach_().zero_()

    return zero_grad


def _conflict(variant: Variant, _: bool) -> UsageError | None:
    if variant.precision == "fp16":
        return UsageError(
            "the optimizer cannot be offloaded",
            because="the loss scaler of fp16 looks for gradients on the GPU in it",
            attempt="bf16",
        )
    if divides_parameters(variant):
        return UsageError(
            "the optimizer cannot be offloaded where FSDP divides it",
            because="its state is made of the pieces that FSDP keeps on each GPU",
            attempt="ddp, or FSDP's own CPUOffloadPolicy, which oomph does not predict",
        )
    return None


_BY_HAND = by_hand(
    "the optimizer on the host: torchao.optim.CPUOffloadOptimizer(parameters, torch.optim.AdamW)",
    unless=["deepspeed"],
)

_ON_HOST = '''
class OnHost:
    """The user's optimizer, with its state and its step on the host."""

    def __init__(self, parameters, make_optimizer):
        self.here = [p for p in parameters if p.requires_grad]
        self.there = [p.detach().to("cpu", copy=True).requires_grad_() for p in self.here]
        self.optimizer = make_optimizer(self.there)  # learning rates are changed here
        self.param_groups = [{"params": self.here}]  # what a GradScaler looks at

    def step(self):
        for here, there in zip(self.here, self.there):
            there.grad = None if here.grad is None else here.grad.to("cpu")
        self.optimizer.step()
        with torch.no_grad():
            for here, there in zip(self.here, self.there):
                here.copy_(there)

    def zero_grad(self, set_to_none=True):
        for here in self.here:
            here.grad = None
'''

OFFLOAD_OPTIMIZER = Definition(
    name="offload-optimizer",
    stability="same",
    setting="offload_optimizer",
    what="keep the optimizer's state in host memory, and step there",
    code="oomph.apply, or torchao.optim.CPUOffloadOptimizer",
    caveat="a step on the host is slow: measure one",
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    # The host's step does not depend on the GPU implementation.
    is_pointless=lambda variant: variant.optimizer != "as-is",
    make_optimizer=make_on_host,
    too_late_for_optimizer="an offloaded optimizer",
    # FSDP's settings can express it.
    by_hand=lambda variant, target: (
        () if divides_parameters(variant) else _BY_HAND(variant, target)
    ),
    in_code=lambda _: Fragment(functions=[_ON_HOST], optimizer_class="OnHost"),
)
