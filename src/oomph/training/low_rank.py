"""A model -> the same, frozen, with small matrices beside its linear layers that are trained.

LoRA as peft has it: y = W x + (alpha / r) B A x, with r = 16 and alpha = 32, no dropout, A as
nn.Linear is initialised and B zero, on every nn.Linear (and transformers' Conv1D) inside the
repeated blocks. All else is frozen but a classifier that is new to the model ("classifier",
"score", as peft's modules_to_save). Keys of the state dict stay as they are; to a layer `name`
are added `name.lora_A` (r, in) and `name.lora_B` (out, r).

QLoRA has the weights of these layers in 4 bits besides (nf4, in blocks of 64, their scales
quantised again), all else in bf16. It needs bitsandbytes and a GPU; rehearsed without memory it is
a stand-in that takes and gives back what bitsandbytes' kernels take.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch

from oomph.errors import UsageError
from oomph.training.blocks import find_blocks

RANK = 16
ALPHA = 32
_TRAINED_WHOLE = ("classifier", "score")


def adaptable(model: Any) -> dict[str, Any]:
    """The linear layers inside the repeated blocks, by name."""
    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    blocks = [*find_blocks(model), *(block for stack in stacks for block in stack.children())]
    inside = {id(module) for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and _sizes(module) is not None
    }


def _sizes(module: Any) -> tuple[int, int] | None:
    """Width of input and of output of a linear layer; None if it is none."""
    if type(module) is torch.nn.Linear:
        return module.in_features, module.out_features
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return module.weight.shape[0], module.weight.shape[1]
    return None


def put_adapters(model: Any, *, is_quantised: bool) -> None:
    """Freeze a model and put adapters beside its linear layers. Raises UsageError."""
    layers = adaptable(model)
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no layers that adapters can be put on",
            because="no nn.Linear is inside repeated blocks (an nn.ModuleList)",
            attempt="adapters of one's own, or training it whole",
        )
    if is_quantised:
        _check_quantisable(model, layers)
        model.to(torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _TRAINED_WHOLE:
            module.requires_grad_(requires_grad=True)
    for layer in layers.values():
        sizes = _sizes(layer)
        if is_quantised:
            _quantise(layer)
        _adapt(layer, *(sizes or (0, 0)))


def _adapt(layer: Any, num_in: int, num_out: int) -> None:
    like = {"dtype": layer.bias.dtype if layer.bias is not None else _dtype_of(layer)}
    device = layer.weight.device
    layer.lora_A = torch.nn.Parameter(torch.empty(RANK, num_in, device=device, **like))
    layer.lora_B = torch.nn.Parameter(torch.zeros(num_out, RANK, device=device, **like))
    torch.nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.forward = _Adapted(layer, layer.forward)


def _dtype_of(layer: Any) -> Any:
    weight = layer.weight
    return weight.dtype if weight.is_floating_point() else torch.bfloat16


class _Adapted:
    """A linear layer's forward, and its adapter's beside it."""

    def __init__(self, layer: Any, forward: Any) -> None:
        self._layer, self._forward = layer, forward

    def __call__(self, tensor: Any) -> Any:
        linear = torch.nn.functional.linear
        layer = self._layer
        small = linear(linear(tensor, layer.lora_A), layer.lora_B)
        return self._forward(tensor) + small * (ALPHA / RANK)


# ---- 4 bits ----------------------------------------------------------------------------------

_BLOCK = 64  # weights to one scale (bitsandbytes' default blocksize of nf4)
_SCALES_BLOCK = 256  # scales to one scale of theirs, where they are quantised again


def _check_quantisable(model: Any, layers: dict[str, Any]) -> None:
    """A model without memory is rehearsed; another needs bitsandbytes and a GPU."""
    others = [name for name, layer in layers.items() if type(layer) is not torch.nn.Linear]
    if others:
        raise UsageError(
            f"{type(model).__name__} cannot be quantised to 4 bits",
            because=f"{others[0]} is no nn.Linear",
            attempt="adapters: lora",
        )
    is_rehearsed = all(layer.weight.is_meta for layer in layers.values())
    if is_rehearsed:
        return
    has_library = importlib.util.find_spec("bitsandbytes") is not None
    if not has_library or not torch.cuda.is_available():
        raise UsageError(
            "QLoRA cannot be put on here",
            because="it needs a GPU of NVIDIA" if has_library else "bitsandbytes is not installed",
            attempt="pip install bitsandbytes, on a machine with a GPU",
        )


def _quantise(layer: Any) -> None:
    if layer.weight.is_meta:
        _stand_in(layer)
        return
    import bitsandbytes  # type: ignore[import-not-found, unused-ignore]

    weight = bitsandbytes.nn.Params4bit(
        layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
    ).cuda(layer.weight.device)  # quantises
    layer.weight = weight
    layer.forward = _Quantised(layer, bitsandbytes.matmul_4bit)


class _Quantised:
    """A linear layer of 4 bits by bitsandbytes' own kernel. Not run by this project."""

    def __init__(self, layer: Any, matmul: Any) -> None:
        self._layer, self._matmul = layer, matmul

    def __call__(self, tensor: Any) -> Any:
        weight, bias = self._layer.weight, self._layer.bias
        return self._matmul(
            tensor.to(torch.bfloat16), weight.t(), bias=bias, quant_state=weight.quant_state
        )


def _stand_in(layer: Any) -> None:
    """Tensors of the sizes of bitsandbytes' (functional.py, quantize_4bit, compress_statistics)."""
    num_weights = layer.weight.numel()
    num_scales = -(-num_weights // _BLOCK)

    def taking(size: int, dtype: Any) -> Any:
        return torch.empty(size, dtype=dtype, device=layer.weight.device)

    layer.weight = torch.nn.Parameter(
        taking(-(-num_weights // 2), torch.uint8), requires_grad=False
    )
    layer.register_buffer("scales", taking(num_scales, torch.uint8))
    layer.register_buffer(
        "scales_of_scales", taking(-(-num_scales // _SCALES_BLOCK), torch.float32)
    )
    layer.forward = _Dequantised(layer)


class _Dequantised:
    """A linear layer whose weight is made for a moment, in forward and again in backward."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer

    def __call__(self, tensor: Any) -> Any:
        layer = self._layer
        sizes = (layer.out_features, layer.in_features)
        return _Linear4bit.apply(tensor, layer.weight, layer.scales, layer.bias, sizes)


class _Linear4bit(torch.autograd.Function):
    """bitsandbytes' MatMul4Bit: keeps the 4 bits and no input, as the weight is frozen."""

    @staticmethod
    def forward(context: Any, tensor: Any, weight: Any, scales: Any, bias: Any, sizes: Any) -> Any:
        context.kept = weight, scales, sizes
        whole = _dequantised(weight, scales, sizes)
        return torch.nn.functional.linear(tensor.to(torch.bfloat16), whole, bias)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        whole = _dequantised(*context.kept)
        return gradients[0].to(torch.bfloat16) @ whole, None, None, None, None


def _dequantised(weight: Any, scales: Any, sizes: Any) -> Any:
    absmax = torch.zeros(scales.numel(), dtype=torch.float32, device=weight.device)
    whole = torch.zeros(sizes, dtype=torch.bfloat16, device=weight.device)
    del absmax
    return whole
