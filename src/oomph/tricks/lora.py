"""Freeze a model and train small matrices (LoRA adapters) beside its linear layers.

LoRA as in peft: y = W x + (alpha / r) B A x, with r = 16, alpha = 32, no dropout, A initialised as
nn.Linear and B zero, on every nn.Linear (and transformers' Conv1D) inside the repeated blocks. All
else is frozen except a new classifier ("classifier", "score", as peft's modules_to_save). State
dict keys do not change; a layer `name` gains `name.lora_A` (r, in) and `name.lora_B` (out, r).

QLoRA also stores the weights of these layers in 4 bits (nf4, in blocks of 64, with quantised
scales), and all else in bf16. It needs bitsandbytes and a GPU. A rehearsal uses a stand-in that
takes and frees the memory of bitsandbytes' kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import Variant, divides_parameters
from oomph.tricks.definition import TOO_LATE_IN_SCRIPT, Definition, Fragment, Severity, by_hand

if TYPE_CHECKING:
    import torch

RANK, ALPHA = 16, 32  # judgement
_TRAINED_WHOLE = ("classifier", "score")


def adaptable(model: torch.nn.Module) -> dict[str, Any]:
    """Return the linear layers inside the repeated blocks, by name."""
    import torch

    from oomph.tricks.blocks import find_blocks

    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    blocks = [*find_blocks(model), *(block for stack in stacks for block in stack.children())]
    inside = {id(module) for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside and _sizes(module) is not None
    }


def _sizes(module: Any) -> tuple[int, int] | None:
    """Return input and output width of a linear layer, or None for another module."""
    import torch

    if type(module) is torch.nn.Linear:
        return module.in_features, module.out_features
    kind = type(module)
    if kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers."):
        return module.weight.shape[0], module.weight.shape[1]
    return None


def put_adapters(model: torch.nn.Module, *, is_quantised: bool) -> None:
    """Freeze a model and add adapters to its linear layers. Raises UsageError."""
    import torch

    layers = adaptable(model)
    if not layers:
        raise UsageError(
            f"{type(model).__name__} has no layers that adapters can be put on",
            because="no nn.Linear is inside repeated blocks (an nn.ModuleList)",
            attempt="your own adapters, or training the whole model",
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
    import torch

    weight = layer.weight
    dtype = weight.dtype if weight.is_floating_point() else torch.bfloat16
    like = {"dtype": dtype if layer.bias is None else layer.bias.dtype, "device": weight.device}
    layer.lora_A = torch.nn.Parameter(torch.empty(RANK, num_in, **like))
    layer.lora_B = torch.nn.Parameter(torch.zeros(num_out, RANK, **like))
    torch.nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.forward = _Adapted(layer, layer.forward)


class _Adapted:
    """A linear layer's forward plus that of its adapter."""

    def __init__(self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._layer, self._forward = layer, forward

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        linear = torch.nn.functional.linear
        layer = self._layer
        small = linear(linear(tensor, layer.lora_A), layer.lora_B)
        return self._forward(tensor) + small * (ALPHA / RANK)


# ---- 4 bits ----------------------------------------------------------------------------------

_BLOCK = 64  # weights per scale (bitsandbytes' default blocksize for nf4)
_SCALES_BLOCK = 256  # scales per second-level scale, in double quantisation


def _check_quantisable(model: torch.nn.Module, layers: dict[str, Any]) -> None:
    """Raise UsageError if a layer is no nn.Linear, or bitsandbytes or a GPU is missing.

    A rehearsed model, which has no memory, needs neither of the two.
    """
    import torch

    others = [name for name, layer in layers.items() if type(layer) is not torch.nn.Linear]
    if others:
        raise UsageError(
            f"{type(model).__name__} cannot be quantised to 4 bits",
            because=f"{others[0]} is not an nn.Linear",
            attempt="adapters: lora",
        )
    is_rehearsed = all(layer.weight.is_meta for layer in layers.values())
    if is_rehearsed:
        return
    has_library = importlib.util.find_spec("bitsandbytes") is not None
    if not has_library or not torch.cuda.is_available():
        raise UsageError(
            "QLoRA cannot be applied here",
            because="it needs an NVIDIA GPU" if has_library else "bitsandbytes is not installed",
            attempt="pip install bitsandbytes, on a machine with a GPU",
        )


def _quantise(layer: Any) -> None:
    if layer.weight.is_meta:
        _stand_in(layer)
        return
    import bitsandbytes  # type: ignore[import-not-found, unused-ignore]

    weight = bitsandbytes.nn.Params4bit(
        layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
    ).cuda(layer.weight.device)  # this call quantises
    layer.weight = weight
    layer.forward = _Quantised(layer, bitsandbytes.matmul_4bit)


class _Quantised:
    """A 4-bit linear layer using bitsandbytes' own kernel. This project has not run it."""

    def __init__(self, layer: Any, matmul: Any) -> None:
        self._layer, self._matmul = layer, matmul

    def __call__(self, tensor: torch.Tensor) -> Any:
        import torch

        weight, bias = self._layer.weight, self._layer.bias
        return self._matmul(
            tensor.to(torch.bfloat16), weight.t(), bias=bias, quant_state=weight.quant_state
        )


def _stand_in(layer: Any) -> None:
    """Make tensors of bitsandbytes' sizes (functional.py, quantize_4bit, compress_statistics)."""
    import torch

    num_weights = layer.weight.numel()
    num_scales = -(-num_weights // _BLOCK)

    def taking(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=layer.weight.device)

    layer.weight = torch.nn.Parameter(
        taking(-(-num_weights // 2), torch.uint8), requires_grad=False
    )
    layer.register_buffer("scales", taking(num_scales, torch.uint8))
    layer.register_buffer(
        "scales_of_scales", taking(-(-num_scales // _SCALES_BLOCK), torch.float32)
    )
    sizes = (layer.out_features, layer.in_features)
    layer.forward = lambda tensor: _linear_4bit().apply(
        tensor, layer.weight, layer.scales, layer.bias, sizes
    )


@functools.cache
def _linear_4bit() -> Any:
    """Return bitsandbytes' MatMul4Bit: it saves the 4 bits and no input, as the weight is frozen.

    It dequantises the weight temporarily, in forward and again in backward.
    """
    import torch

    def dequantised(weight: Any, scales: Any, sizes: Any) -> torch.Tensor:
        absmax = torch.zeros(scales.numel(), dtype=torch.float32, device=weight.device)
        whole = torch.zeros(sizes, dtype=torch.bfloat16, device=weight.device)
        del absmax
        return whole

    class Linear4bit(torch.autograd.Function):
        @staticmethod
        def forward(
            context: Any, tensor: Any, weight: Any, scales: Any, bias: Any, sizes: Any
        ) -> Any:
            context.kept = weight, scales, sizes
            whole = dequantised(weight, scales, sizes)
            return torch.nn.functional.linear(tensor.to(torch.bfloat16), whole, bias)

        @staticmethod
        def backward(context: Any, *gradients: Any) -> Any:
            whole = dequantised(*context.kept)
            return gradients[0].to(torch.bfloat16) @ whole, None, None, None, None

    return Linear4bit


# ---- the tricks ----------------------------------------------------------------------------------


def _why_not_on(model: torch.nn.Module) -> str | None:
    return None if adaptable(model) else "no linear layers in repeated blocks"


def _put_on_built(model: torch.nn.Module, variant: Variant) -> None:
    put_adapters(model, is_quantised=variant.adapters == "qlora")


def _conflict(variant: Variant, _: bool) -> UsageError | None:
    if variant.precision in ("fp16", "tf32", "fp32"):
        return UsageError(
            "QLoRA computes in bf16",
            because=f"{variant.precision} was requested, but what is not quantised is in bf16",
            attempt="bf16 or pure-bf16",
        )
    if divides_parameters(variant):
        return UsageError(
            "QLoRA cannot be divided among GPUs",
            because="FSDP would cast the packed 4-bit weights as if they were numbers",
            attempt="ddp, or lora",
        )
    return None


_CONFIG = f'peft.LoraConfig(r={RANK}, lora_alpha={ALPHA}, target_modules="all-linear")'


def _in_code(variant: Variant) -> Fragment:
    load = "model = peft.prepare_model_for_kbit_training(model)  # loaded in 4 bits"
    adapt = [f"adapters = {_CONFIG}", "model = peft.get_peft_model(model, adapters)"]
    is_quantised = variant.adapters == "qlora"
    return Fragment(imports=["import peft"], on_model=[load, *adapt] if is_quantised else adapt)


LORA = Definition(
    name="lora",
    stability="changes",
    setting="adapters",
    value="lora",
    severity=Severity.FEWER_WEIGHTS,
    price="only small adapters are trained, so this is for fine-tuning",
    what="train small adapters beside frozen weights",
    code="peft.get_peft_model, or oomph.apply",
    caveat="another model with less capacity, and another learning rate",
    why_not_on=_why_not_on,
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    put_on_built=_put_on_built,
    too_late_for_model=lambda _: "adapters",
    by_hand=by_hand(f"adapters: peft.get_peft_model(model, {_CONFIG})"),
    in_code=_in_code,
)

QLORA = Definition(
    name="qlora",
    stability="changes",
    setting="adapters",
    value="qlora",
    severity=Severity.FEWER_COARSE_WEIGHTS,
    price="only small adapters are trained, beside weights rounded to 4 bits",
    what="train small adapters beside frozen weights in 4 bits",
    code="peft and bitsandbytes, or oomph.apply",
    caveat="another model with less capacity, and another learning rate",
    why_not_on=_why_not_on,
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    put_on_built=_put_on_built,
    too_late_for_model=lambda _: "adapters",
    by_hand=by_hand(
        "adapters on a model in 4 bits: load it with transformers.BitsAndBytesConfig("
        f"load_in_4bit=True), then peft.get_peft_model(model, {_CONFIG})"
    ),
    in_code=_in_code,
)
