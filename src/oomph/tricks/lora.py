"""Freeze a model and train small matrices (LoRA adapters) beside its linear layers.

LoRA as in peft: y = W x + (alpha / r) B A x, with r = 16 unless another rank is asked for, alpha =
2 r, no dropout, A initialised as nn.Linear and B zero, on every nn.Linear (and transformers'
Conv1D) inside the repeated blocks, or only on those of attention. All else is frozen except a new
classifier ("classifier", "score", as peft's modules_to_save). State dict keys do not change; a
layer `name` gains `name.lora_A` (r, in) and `name.lora_B` (out, r).

Adapters are in fp32 beside weights of 16 bits (peft's autocast_adapter_dtype), except in pure bf16.
Under autocast, the frozen weights of linear layers are stored in the dtype that autocast would cast
them to for each product. Every number stays what it is, and the weights and the copies that
backward keeps take a third of the memory. Norms, embeddings, and a head tied to an embedding stay
in fp32: autocast does not cast them.

QLoRA also stores the weights of these layers in 4 bits (nf4, in blocks of 64, with quantised
scales), and all else in bf16. It needs bitsandbytes and a GPU. A rehearsal uses a stand-in that
takes and frees the memory of bitsandbytes' kernels.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from oomph.errors import UsageError
from oomph.records.workload import LORA_RANK, LoraTargets, Variant, divides_parameters
from oomph.tricks.definition import TOO_LATE_IN_SCRIPT, Definition, Fragment, Severity

if TYPE_CHECKING:
    import torch

ALPHA_PER_RANK = 2  # judgement: so that another rank keeps the size of an update
_TRAINED_WHOLE = ("classifier", "score")
# In the name of an attention module: self_attn, attention, SelfAttention, encoder_attn, attn.
_ATTENTION = re.compile("attn|attention", re.IGNORECASE)
_LOW = {"bf16": "bfloat16", "fp16": "float16"}  # of autocast


def adaptable(model: torch.nn.Module, targets: LoraTargets = "all-linear") -> dict[str, Any]:
    """Return the linear layers inside the repeated blocks, by name."""
    import torch

    from oomph.tricks.blocks import find_blocks

    stacks = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList) and len(m) > 1]
    blocks = [*find_blocks(model), *(block for stack in stacks for block in stack.children())]
    inside = {id(module) for block in blocks for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if id(module) in inside
        and _sizes(module) is not None
        and (targets == "all-linear" or _ATTENTION.search(name.rpartition(".")[0]))
    }


def _sizes(module: Any) -> tuple[int, int] | None:
    """Return input and output width of a linear layer, or None for another module."""
    import torch

    if type(module) is torch.nn.Linear:
        return module.in_features, module.out_features
    return (module.weight.shape[0], module.weight.shape[1]) if _is_conv1d(module) else None


def _is_conv1d(module: Any) -> bool:
    kind = type(module)
    return kind.__name__ == "Conv1D" and kind.__module__.startswith("transformers.")


def put_adapters(
    model: torch.nn.Module,
    *,
    is_quantised: bool,
    rank: int = LORA_RANK,
    targets: LoraTargets = "all-linear",
    low: torch.dtype | None = None,
) -> None:
    """Freeze a model and add adapters to its linear layers. Raises UsageError.

    `low` is the dtype that autocast computes in, if training uses autocast.
    """
    import torch

    layers = adaptable(model, targets)
    if not layers:
        raise _no_layers(model, targets)
    if _has_adapters(model):
        raise UsageError(
            f"{type(model).__name__} has adapters already",
            because="adapters would be put on the layers of its adapters",
            attempt="training it as it is, or the model without them",
        )
    if is_quantised:
        _check_quantisable(model, layers)
        model.to(torch.bfloat16)
    model.requires_grad_(requires_grad=False)
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in _TRAINED_WHOLE:
            module.requires_grad_(requires_grad=True)
    if low is not None and not is_quantised:
        _store_as_computed(model, low)
    for layer in layers.values():
        sizes = _sizes(layer)
        if is_quantised:
            _quantise(layer)
        _adapt(layer, *(sizes or (0, 0)), rank, is_quantised=is_quantised)


def _no_layers(model: torch.nn.Module, targets: LoraTargets) -> UsageError:
    what = f"{type(model).__name__} has no layers that adapters can be put on"
    if targets == "attention" and adaptable(model):
        return UsageError(
            what,
            because='no linear layer is in a module with "attn" or "attention" in its name',
            attempt="adapters on all linear layers",
        )
    return UsageError(
        what,
        because="no nn.Linear is inside repeated blocks (an nn.ModuleList)",
        attempt="your own adapters, or training the whole model",
    )


def _has_adapters(model: torch.nn.Module) -> bool:
    """Return whether a model has adapters of peft or of this module."""
    return any(
        type(module).__module__.startswith("peft.") or hasattr(module, "lora_A")
        for module in model.modules()
    )


def _adapt(layer: Any, num_in: int, num_out: int, rank: int, *, is_quantised: bool) -> None:
    import torch

    weight = layer.weight
    # 8-bit codes of a quantised weight have no precision of their own.
    own = weight.dtype if weight.is_floating_point() else torch.float32
    like = {"dtype": torch.promote_types(own, torch.float32), "device": weight.device}
    layer.lora_A = torch.nn.Parameter(torch.empty(rank, num_in, **like))
    layer.lora_B = torch.nn.Parameter(torch.zeros(num_out, rank, **like))
    torch.nn.init.kaiming_uniform_(layer.lora_A, a=math.sqrt(5))
    layer.forward = _Adapted(layer, layer.forward, is_quantised=is_quantised)


class _Adapted:
    """A linear layer's forward plus that of its adapter, with the casts of peft's layers.

    peft casts the input to the dtype of the adapter, also where autocast then casts it back: each
    adapter keeps its own copy of its input for backward. Its 4-bit layer leaves that to autocast.
    """

    def __init__(
        self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor], *, is_quantised: bool
    ) -> None:
        self._layer, self._forward, self._is_quantised = layer, forward, is_quantised

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        linear = torch.nn.functional.linear
        layer = self._layer
        out = self._forward(tensor)
        if not (self._is_quantised and torch.is_autocast_enabled(tensor.device.type)):
            tensor = tensor.to(layer.lora_A.dtype)
        small = linear(linear(tensor, layer.lora_A), layer.lora_B)
        return (out + small * ALPHA_PER_RANK).to(out.dtype)


# ---- frozen weights in 16 bits -------------------------------------------------------------------


def _store_as_computed(model: torch.nn.Module, low: torch.dtype) -> None:
    """Store frozen fp32 weights of linear layers in the dtype that autocast casts them to.

    A weight that another kind of module uses too (a head tied to an embedding) stays as it is.
    """
    import torch

    linear = [module for module in model.modules() if _sizes(module) is not None]
    others = (module for module in model.modules() if _sizes(module) is None)
    used_elsewhere = {id(one) for module in others for one in module.parameters(recurse=False)}
    for layer in linear:
        own = [*layer.parameters(recurse=False)]
        is_stored = all(
            not one.requires_grad and one.dtype == torch.float32 and id(one) not in used_elsewhere
            for one in own
        )
        if is_stored or _is_stored(own, low):
            layer.to(low)
            if not isinstance(layer.forward, _Stored):
                layer.forward = _Stored(layer, layer.forward)


def _is_stored(parameters: Iterable[torch.Tensor], low: torch.dtype) -> bool:
    """Return whether another layer that has the same weights has stored them already."""
    return all(not one.requires_grad and one.dtype == low for one in parameters)


class _Stored:
    """The forward of a layer whose weight is in 16 bits, also outside of autocast."""

    def __init__(self, layer: Any, forward: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._layer, self._forward = layer, forward

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        layer = self._layer
        is_cast = torch.is_autocast_enabled(tensor.device.type)
        if is_cast or tensor.dtype == layer.weight.dtype:
            return self._forward(tensor)
        weight = layer.weight.to(tensor.dtype)
        bias = None if layer.bias is None else layer.bias.to(tensor.dtype)
        weight = weight.t() if _is_conv1d(layer) else weight
        return torch.nn.functional.linear(tensor, weight, bias)


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


# ---- as plain code -------------------------------------------------------------------------------

_LINEAR_OF_ATTENTION = '''
def targets_in(model):
    """Return the names of attention's linear layers."""
    return [
        name
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Linear4bit", "Conv1D")
        and re.search("(?i)attn|attention", name.rpartition(".")[0])
    ]
'''

_STORE_LOW = '''
def store_frozen_weights(model, dtype):
    """Store the weights of linear layers as autocast casts them for each product."""
    linear = [m for m in model.modules() if type(m).__name__ in ("Linear", "Conv1D")]
    others = [m for m in model.modules() if type(m).__name__ not in ("Linear", "Conv1D")]
    shared = {id(p) for m in others for p in m.parameters(recurse=False)}
    trained = {id(p) for n, m in model.named_modules() for p in m.parameters() if is_trained(n)}
    for module in linear:
        if not any(id(p) in shared | trained for p in module.parameters(recurse=False)):
            module.to(dtype)


def is_trained(name):
    return name.rpartition(".")[2] in (TRAINED)
'''.replace("(TRAINED)", str(_TRAINED_WHOLE).replace("'", '"'))


# What is new in the model is trained whole, under its usual names.
_SAVED = f"modules_to_save={list(_TRAINED_WHOLE)!r}".replace("'", '"')


def _config(variant: Variant, targets: str) -> str:
    """Return peft's settings, but for what is trained whole."""
    alpha = ALPHA_PER_RANK * variant.lora_rank
    return f"r={variant.lora_rank}, lora_alpha={alpha}, target_modules={targets}"


def _get_model(variant: Variant, config: str) -> str:
    # peft keeps adapters in fp32 beside 16-bit weights. In pure bf16 they are in bf16, too.
    dtype = ", autocast_adapter_dtype=False" if variant.precision == "pure-bf16" else ""
    return f"peft.get_peft_model(model, {config}{dtype})"


def _low_of_frozen(variant: Variant) -> str | None:
    """Return the dtype that frozen weights are stored in, if autocast allows it."""
    return _LOW.get(variant.precision) if variant.adapters == "lora" else None


def _in_code(variant: Variant) -> Fragment:
    is_all, low = variant.lora_targets == "all-linear", _low_of_frozen(variant)
    config = _config(variant, '"all-linear"' if is_all else "targets_in(model)")
    in_four_bits = (
        "make_model() must return the model loaded in 4 bits (transformers.BitsAndBytesConfig:"
        " load_in_4bit=True, nf4, double quantisation) and all else in torch.bfloat16."
    )
    return Fragment(
        imports=["import peft", *([] if is_all else ["import re"])],
        functions=[*([] if is_all else [_LINEAR_OF_ATTENTION]), *([_STORE_LOW] if low else [])],
        on_model=[
            *([f"store_frozen_weights(model, torch.{low})"] if low else []),
            f"adapters = peft.LoraConfig({config})",
            f"adapters.{_SAVED.replace('=', ' = ', 1)}  # what is new in the model",
            f"model = {_get_model(variant, 'adapters')}",
        ],
        notes=[in_four_bits] if variant.adapters == "qlora" else [],
    )


def _in_settings(variant: Variant, target: str) -> tuple[str, ...]:
    if target == "code":
        return ()
    some = '[...], the names of attention\'s linear layers, such as "q_proj" and "v_proj"'
    is_all, low = variant.lora_targets == "all-linear", _low_of_frozen(variant)
    config = _config(variant, '"all-linear"' if is_all else some)
    get = _get_model(variant, f"peft.LoraConfig({config}, {_SAVED})")
    if variant.adapters == "qlora":
        load = "transformers.BitsAndBytesConfig(load_in_4bit=True, ...), dtype=torch.bfloat16"
        return (f"adapters on a model in 4 bits: load it with {load}; then {get}",)
    stored = (
        "frozen weights of linear layers in the dtype that autocast computes in:"
        f" module.to(torch.{low}) for each nn.Linear that is not tied to an embedding,"
        " before the adapters"
    )
    return (*([stored] if low else []), f"adapters: {get}")


# ---- the tricks ----------------------------------------------------------------------------------


def _why_not_on(model: torch.nn.Module) -> str | None:
    if _has_adapters(model):
        return "the model has adapters already"
    return None if adaptable(model) else "no linear layers in repeated blocks"


def _why_too_late(model: torch.nn.Module) -> str | None:
    """Adapters cannot be added any more, but peft may have added them."""
    return None if _has_adapters(model) else "adapters"


def _put_on_built(model: torch.nn.Module, variant: Variant) -> None:
    import torch

    low = _LOW.get(variant.precision)
    put_adapters(
        model,
        is_quantised=variant.adapters == "qlora",
        rank=variant.lora_rank,
        targets=variant.lora_targets,
        low=getattr(torch, low) if low else None,
    )


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


def _what(variant: Variant, frozen: str) -> str:
    where = "" if variant.lora_targets == "all-linear" else " of attention"
    return f"train adapters of rank {variant.lora_rank} beside {frozen} weights{where}"


LORA = Definition(
    name="lora",
    stability="changes",
    setting="adapters",
    value="lora",
    severity=Severity.FEWER_WEIGHTS,
    price="only small adapters are trained, so this is for fine-tuning",
    what=lambda variant: _what(variant, "frozen"),
    code="peft.get_peft_model, or oomph.apply",
    caveat="another model with less capacity, and another learning rate",
    why_not_on=_why_not_on,
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    put_on_built=_put_on_built,
    too_late_for_model=_why_too_late,
    by_hand=_in_settings,
    in_code=_in_code,
)

QLORA = Definition(
    name="qlora",
    stability="changes",
    setting="adapters",
    value="qlora",
    severity=Severity.FEWER_COARSE_WEIGHTS,
    price="only small adapters are trained, beside weights rounded to 4 bits",
    what=lambda variant: _what(variant, "frozen 4-bit"),
    code="peft and bitsandbytes, or oomph.apply",
    caveat="frozen weights are rounded to 4 bits; less capacity, and another learning rate",
    why_not_on=_why_not_on,
    why_not_in_script=TOO_LATE_IN_SCRIPT,
    conflict=_conflict,
    put_on_built=_put_on_built,
    too_late_for_model=_why_too_late,
    by_hand=_in_settings,
    in_code=_in_code,
)
