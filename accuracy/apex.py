"""apex's mixed precision of level O2, which ran before torch had its own.

The model is in fp16 but for its BatchNorms; the optimizer has an fp32 copy of every parameter. Each
step casts the gradients to fp32, looks for infinities on the host, and casts the parameters back.
(apex/amp/_process_optimizer.py, apex/optimizers/fused_adam.py.)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from accuracy.by_tensor import Update

_SCALE = 65536.0  # only its being there matters


def in_half(model: nn.Module) -> nn.Module:
    """Cast a model to fp16, without its BatchNorms."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(parameter.detach().half()))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.half())
    return model


def scaled(loss: Any) -> Any:
    return loss.float() * _SCALE


class MasterWeights(torch.optim.Optimizer):
    """An optimizer's update on fp32 copies of fp16 parameters."""

    def __init__(self, parameters: Any, update: Update, max_norm: float | None = None) -> None:
        super().__init__(parameters, {"lr": 1e-3})
        self.update, self.max_norm = update, max_norm

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        states = [self.state[p] for p in used]
        for p, state in zip(used, states, strict=True):
            if not state:
                state["master"] = p.detach().float()
                state["gradient"] = torch.empty_like(state["master"])
        masters = [state["master"] for state in states]
        gradients = [state["gradient"] for state in states]
        torch._foreach_copy_(gradients, [p.grad for p in used])  # multi_tensor_scale
        torch.stack([gradient.new_zeros(()) for gradient in gradients[:1]]).sum().item()
        if self.max_norm is not None:
            clip(gradients)
        self.update(masters, gradients, states)
        torch._foreach_copy_(used, masters)


def clip(gradients: list[Any]) -> None:
    """Two kernels over all gradients: apex's multi_tensor_l2norm and multi_tensor_scale."""
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, 1.0 / (norm + 1e-6))


def fused_adam(parameters: list[Any], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    for parameter, state in zip(parameters, states, strict=True):
        if "exp_avg" not in state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=torch.float32)
            state["step"] = torch.zeros((), device=parameter.device)
    torch._fused_adam_(
        parameters,
        gradients,
        [state["exp_avg"] for state in states],
        [state["exp_avg_sq"] for state in states],
        [],
        [state["step"] for state in states],
        lr=1e-5,
        beta1=0.9,
        beta2=0.999,
        weight_decay=0.01,
        eps=1e-6,
        amsgrad=False,
        maximize=False,
    )
