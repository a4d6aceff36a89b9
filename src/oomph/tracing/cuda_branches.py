"""What torch does on CUDA where it does something else on the meta device.

Composite ops ask in C++ whether a tensor is on CUDA, and choose kernels that save other tensors
for backward: attention, dropout, batch norm, softmax in mixed precision, RMS norm, cuDNN's RNNs.
Here the CUDA branch is written down for pretended tensors. Other ops have no meta kernel at all.

Read in torch's sources, not run on a GPU: the rule for cuDNN's batch norm.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing import cuda_kernels, recurrent
from oomph.tracing.attention_kernels import attention_on
from oomph.tracing.pretend import Lie

_kept_alive: list[Any] = []


def install() -> None:
    """Register the branches. Once per process."""
    library = torch.library.Library("aten", "IMPL")
    _kept_alive.append(library)

    def branch(name: str, function: Any, key: str = "AutogradMeta") -> None:
        library.impl(name, function, key, allow_override=True)

    branch("scaled_dot_product_attention", attention_on(lambda: Lie.capability))
    branch("dropout", _dropout)
    branch("batch_norm", _batch_norm)
    branch("softmax.int", _softmax(torch.ops.aten._softmax))
    branch("log_softmax.int", _softmax(torch.ops.aten._log_softmax))
    branch("rms_norm", _rms_norm)
    branch("linear", _linear)
    branch("one_hot", _one_hot)
    cuda_kernels.install(library)
    recurrent.install(library)
    for name in _DONE_IN_PLACE:
        branch(name, lambda *_, **__: None, "Meta")
    branch("mish_backward", lambda gradient, _: torch.empty_like(gradient))


_DONE_IN_PLACE = (
    "_amp_foreach_non_finite_check_and_unscale_",
    "_fused_adam_",
    "_fused_adamw_",
    "_fused_sgd_",
    "_fused_adagrad_",
    "_fused_adam_.tensor_lr",
    "_fused_adamw_.tensor_lr",
    "_fused_sgd_.tensor_lr",
    "_fused_adagrad_.tensor_lr",
)


# ---- the others ------------------------------------------------------------------------------


def _dropout(tensor: Any, p: float, train: bool) -> Any:
    if not train or p == 0:
        return tensor
    return torch.ops.aten.native_dropout(tensor, p, train)[0]


def _batch_norm(
    tensor: Any,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Any:
    takes_cudnn = (
        cudnn_enabled
        and weight is not None
        and bias is not None
        and tensor.dim() >= 3
        and (tensor.dtype != torch.float16 or weight.dtype == torch.float32)
        and eps >= 1e-5
        and (running_mean is None) == (running_var is None)
        and (training or running_mean is not None)
    )
    arguments = (tensor, weight, bias, running_mean, running_var, training, momentum, eps)
    if takes_cudnn:
        return torch.ops.aten.cudnn_batch_norm(*arguments)[0]
    return torch.ops.aten.native_batch_norm(*arguments)[0]


def _linear(tensor: Any, weight: Any, bias: Any = None) -> Any:
    """Linear.cpp. On the meta device, and under any dispatch mode, it adds the bias to a copy."""
    if bias is None:
        return torch.matmul(tensor, weight.t())
    if tensor.dim() == 2:
        return torch.addmm(bias, tensor, weight.t())
    if tensor.is_contiguous() and tensor.dim() > 2:
        out = torch.addmm(bias, tensor.reshape(-1, tensor.shape[-1]), weight.t())
        return out.view(*tensor.shape[:-1], out.shape[-1])
    return torch.matmul(tensor, weight.t()).add_(bias)


def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    """Onehot.cpp: zeros, and ones scattered into them."""
    if num_classes < 0:
        raise NotImplementedError("one_hot of values on the GPU needs num_classes")
    out = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


# ---- normalisation ---------------------------------------------------------------------------


def _softmax(kernel: Any) -> Any:
    """The kernel that reads half and writes float, without a copy of the input."""

    def softmax(tensor: Any, dim: int, dtype: Any = None) -> Any:
        if tensor.dtype == torch.float16 and dtype == torch.float32:
            return kernel(tensor, dim, True)
        return kernel(tensor if dtype is None else tensor.to(dtype), dim, False)

    return softmax


def _rms_norm(
    tensor: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None
) -> Any:
    if weight is not None and weight.dtype != tensor.dtype:
        upcast = tensor.float()
        dims = tuple(range(-len(normalized_shape), 0))
        eps = torch.finfo(upcast.dtype).eps if eps is None else eps
        scaled = upcast * torch.rsqrt(upcast.pow(2).mean(dims, keepdim=True) + eps)
        return (scaled * weight).to(tensor.dtype)
    return _fused_rms_norm()(tensor, weight, len(normalized_shape))


def _fused_rms_norm() -> Any:
    """Saves the input, the weight and one fp32 figure per row, as the fused kernel does."""

    class FusedRmsNorm(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, tensor: Any, weight: Any, num_dims: int) -> Any:
            rows = tensor.shape[: tensor.dim() - num_dims]
            rstd = torch.empty(*rows, *(1,) * num_dims, device=tensor.device)
            context.save_for_backward(tensor, weight, rstd)
            return torch.empty_like(tensor)

        @staticmethod
        def backward(context: Any, *_: Any) -> Any:
            tensor, weight, _ = context.saved_tensors
            of_weight = None if weight is None else torch.empty_like(weight)
            return torch.empty_like(tensor), of_weight, None

    return FusedRmsNorm.apply
