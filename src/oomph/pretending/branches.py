"""Take torch's CUDA code path where the meta device or the CPU would take another.

Composite ops ask in C++ whether a tensor is on CUDA and then choose kernels that save different
tensors for backward: attention, dropout, batch norm, softmax in mixed precision, RMS norm, cuDNN's
RNNs. This file implements the CUDA branch for pretended tensors, and ops that have no meta kernel
at all. For tensors on the emulated GPU, it does so where CUDA computes the same numbers: dropout
and fused attention.

The rule for cuDNN's batch norm comes from reading torch's source; it was not run on a GPU.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.overrides import enable_reentrant_dispatch

from oomph.pretending import recurrent
from oomph.pretending.factories import Function
from oomph.pretending.layouts import convolution
from oomph.pretending.patches import Patches
from oomph.pretending.tensors import Disguise, is_pretended, with_named_arguments
from oomph.records.generation import generation_of

# ---- CUDA ops that the meta device decomposes, refuses or lacks ----------------------------------
# RNN cells, connectionist temporal classification (CTC), grouped matmuls of many experts.


def install_kernels(library: Any) -> None:
    """Register these ops for pretended tensors."""
    branches = {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell, "ctc_loss.Tensor": _ctc_loss}
    kernels = {
        "_thnn_fused_gru_cell": _fused_gru_cell,
        "_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
        "_ctc_loss_backward": _ctc_loss_backward,
        "_grouped_mm": _grouped_mm,
    }
    for name, function in branches.items():
        library.impl(name, function, "AutogradMeta", allow_override=True)
    for name, function in kernels.items():
        library.impl(name, function, "Meta", allow_override=True)


def _grouped_mm(
    one: Any, other: Any, offsets: Any = None, _: Any = None, out_dtype: Any = None
) -> Any:
    """Multiply the matrices of many experts at once; torch's meta kernel accepts only bfloat16.

    Rows start at multiples of 16 bytes (GroupedMMUtils.h, create_grouped_gemm_output_tensor).
    """
    rows, columns = one.shape[-2], other.shape[-1]
    if one.dim() == 2 and other.dim() == 2:
        shape = [offsets.shape[0], rows, columns]
    elif one.dim() == 3 and other.dim() == 3:
        shape = [one.shape[0], rows, columns]
    else:
        shape = [rows, columns]
    dtype = out_dtype or one.dtype
    per_row = 16 // dtype.itemsize
    width = -(-columns // per_row) * per_row
    return torch.empty(*shape[:-1], width, dtype=dtype, device="meta")[..., :columns]


# ---- RNN cells (RNN.cpp: fused on CUDA) ------------------------------------------------------


def _lstm_cell(
    tensor: Any,
    hidden: Any,
    of_input: Any,
    of_hidden: Any,
    b_input: Any = None,
    b_hidden: Any = None,
) -> Any:
    hx, cx = hidden
    gates = torch.matmul(tensor, of_input.t()), torch.matmul(hx, of_hidden.t())
    return torch.ops.aten._thnn_fused_lstm_cell(*gates, cx, b_input, b_hidden)[:2]


def _gru_cell(
    tensor: Any, hx: Any, of_input: Any, of_hidden: Any, b_input: Any = None, b_hidden: Any = None
) -> Any:
    gates = torch.matmul(tensor, of_input.t()), torch.matmul(hx, of_hidden.t())
    return torch.ops.aten._thnn_fused_gru_cell(*gates, hx, b_input, b_hidden)[0]


def _fused_gru_cell(gates: Any, _: Any, hx: Any, *__: Any) -> Any:
    workspace = gates.new_empty((hx.shape[0], hx.shape[1] * 5))  # GRU_WORKSPACE_MULTIPLIER
    return hx.new_empty(hx.shape), workspace


def _fused_gru_cell_backward(of_hy: Any, workspace: Any, has_bias: bool) -> Any:
    shape = (workspace.shape[0], of_hy.shape[1] * 3)
    of_input, of_hidden = workspace.new_empty(shape), workspace.new_empty(shape)
    biases = [workspace.new_empty(shape[1]) if has_bias else None for _ in range(2)]
    return of_input, of_hidden, of_hy.new_empty(of_hy.shape), *biases


# ---- connectionist temporal classification (LossCTC.cpp) -------------------------------------


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """Call ctc_loss with lengths as lists. Lengths on the GPU are unknown: assume the longest."""
    inputs = _lengths(input_lengths, log_probs.shape[0])
    is_padded = targets.dim() > 1  # otherwise the targets of all examples are concatenated
    longest = targets.shape[-1] // (1 if is_padded else target_lengths.numel())
    outputs = _lengths(target_lengths, longest)
    return torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, inputs, outputs, blank, reduction, zero_infinity
    )


def _lengths(lengths: Any, longest: int) -> list[int]:
    return [longest] * lengths.numel() if is_pretended(lengths) else lengths.tolist()


def _ctc_loss_backward(_: Any, log_probs: Any, *__: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)


# ---- scaled_dot_product_attention -> the op of the kernel that CUDA would choose -----------------
# From torch's source; not run on a GPU.


def attention_on(capability: Callable[[], tuple[int, int]]) -> Callable[..., Any]:
    """Return the attention function; it asks for the GPU's compute capability at each call."""

    def attention(
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Any:
        if query.dim() == 3:
            q, k, v = (tensor.unsqueeze(0) for tensor in (query, key, value))
            return attention(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
        options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
        if _is_flash(query, attn_mask, capability()):
            return _flash(query, key, value, **options)
        if _is_efficient(query, key):
            return _efficient(query, key, value, attn_mask, **options)
        Disguise.unread += 1
        try:
            return torch.ops.aten._scaled_dot_product_attention_math(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                None,
                scale=scale,
                enable_gqa=enable_gqa,
            )[0]
        finally:
            Disguise.unread -= 1

    return attention


def _is_flash(query: Any, mask: Any, capability: tuple[int, int]) -> bool:
    is_low = query.dtype in (torch.float16, torch.bfloat16)
    is_small = query.size(-1) <= 256
    is_there = generation_of(capability).has_bf16 and torch.backends.cuda.flash_sdp_enabled()
    return bool(is_low and mask is None and is_small and is_there)


def _is_efficient(query: Any, key: Any) -> bool:
    """Return whether the memory-efficient kernel can run.

    It does not support grouped heads (sdp_utils.cpp, check_batch_size_and_num_heads_dense<false>).
    """
    is_aligned = query.size(-1) % 4 == 0 or query.dtype != torch.float32
    has_groups = query.size(-3) != key.size(-3)
    return is_aligned and not has_groups and torch.backends.cuda.mem_efficient_sdp_enabled()


def _flash(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Run flash attention, with the head size padded to a multiple of 8.

    Flash attention takes fewer key heads than query heads as they are.
    """
    head = query.size(-1)
    options["scale"] = options["scale"] or head**-0.5
    if head % 8:
        pad = (0, 8 - head % 8)
        query, key, value = (torch.nn.functional.pad(t, pad) for t in (query, key, value))
    out = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, **options)[0]
    return out[..., :head] if head % 8 else out


def _efficient(query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
    if mask is not None:
        if mask.dtype == torch.bool:
            nothing = torch.zeros((), dtype=query.dtype, device=mask.device)
            mask = torch.where(mask, nothing, float("-inf")).to(query.dtype)
        mask = mask.expand(*query.shape[:-1], key.size(-2))
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, torch.is_grad_enabled(), **options
    )[0]


_kept_alive: list[Any] = []


def install() -> None:
    """Register the CUDA branches. Call this once per process."""
    library = torch.library.Library("aten", "IMPL")
    _kept_alive.append(library)

    def branch(name: str, function: Any, key: str = "AutogradMeta") -> None:
        library.impl(name, function, key, allow_override=True)

    branch("scaled_dot_product_attention", attention_on(lambda: Disguise.capability))
    branch("dropout", _dropout)
    branch("batch_norm", _batch_norm)
    branch("softmax.int", _softmax(torch.ops.aten._softmax))
    branch("log_softmax.int", _softmax(torch.ops.aten._log_softmax))
    branch("rms_norm", _rms_norm)
    branch("linear", _linear)
    branch("one_hot", _one_hot)
    install_kernels(library)
    recurrent.install(library)
    for name in _DONE_IN_PLACE:
        branch(name, lambda *_, **__: None, "Meta")
    branch("convolution", convolution, "Meta")
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


# ---- other ops -------------------------------------------------------------------------------


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
    arguments = (weight, bias, running_mean, running_var, training, momentum, eps)
    if not takes_cudnn:
        return torch.ops.aten.native_batch_norm(tensor, *arguments)[0]
    # A copy of what does not lie in order is what backward keeps (Normalization.cpp,
    # _batch_norm_impl_index).
    in_order = tensor.contiguous(memory_format=suggest_memory_format(tensor))
    return torch.ops.aten.cudnn_batch_norm(in_order, *arguments)[0]


def _linear(tensor: Any, weight: Any, bias: Any = None) -> Any:
    """Run linear as Linear.cpp does.

    On the meta device, and under any dispatch mode, torch adds the bias to a copy.
    """
    if bias is None:
        return torch.matmul(tensor, weight.t())
    if tensor.dim() == 2:
        return torch.addmm(bias, tensor, weight.t())
    if tensor.is_contiguous() and tensor.dim() > 2:
        out = torch.addmm(bias, tensor.reshape(-1, tensor.shape[-1]), weight.t())
        return out.view(*tensor.shape[:-1], out.shape[-1])
    return torch.matmul(tensor, weight.t()).add_(bias)


def _one_hot(tensor: Any, num_classes: int = -1) -> Any:
    """Scatter ones into zeros, as Onehot.cpp does."""
    if num_classes < 0:
        raise NotImplementedError("one_hot of values on the GPU needs num_classes")
    out = torch.zeros(*tensor.shape, num_classes, dtype=torch.int64, device=tensor.device)
    return out.scatter_(-1, tensor.unsqueeze(-1), 1)


# ---- normalisation ---------------------------------------------------------------------------


def _softmax(kernel: Any) -> Any:
    """Wrap the kernel that reads half and writes float without copying the input."""

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
    return _FusedRmsNorm.apply(tensor, weight, len(normalized_shape))


class _FusedRmsNorm(torch.autograd.Function):
    """Save what the fused kernel saves: input, weight, one fp32 per row."""

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


# ---- CUDA's branch, where the CPU takes another one with the same results ------------------------


def patch_dropout(patches: Patches, on_card: Callable[[torch.Tensor], bool]) -> None:
    """Save a mask of one byte per element, as CUDA does; the CPU saves the factor it multiplied by.

    Both draw the same random numbers.
    """
    original = torch.dropout

    def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:  # noqa: A002
        # torch/native/Dropout.cpp, is_fused_kernel_acceptable
        is_fused = train and 0 < p < 1 and input.numel() > 0 and on_card(input)
        return torch.native_dropout(input, p, train)[0] if is_fused else original(input, p, train)

    patches.put(torch, dropout=dropout)
    patches.put(torch._VF, dropout=dropout)


@contextlib.contextmanager
def fused_attention(
    patches: Patches, on_card: Callable[[torch.Tensor], bool], capability: tuple[int, int]
) -> Iterator[None]:
    """Save for backward what CUDA's fused attention kernels save, with the CPU's results.

    With dropout, the CPU saves its length x length attention matrices. CUDA's kernels save their
    output and one sum per row, and recompute the rest in backward. This registers the ops of those
    kernels for the CPU. Inside them the CPU computes as usual, without accounting: once in forward,
    and again in backward with the same random numbers.
    """
    original: Function = torch.nn.functional.scaled_dot_product_attention
    on_cuda = attention_on(lambda: capability)
    library = torch.library.Library("aten", "IMPL")
    _Kernels(original).register(library)

    def attention(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_dense = isinstance(query, torch.Tensor) and not query.is_nested
        chosen = on_cuda if is_dense and on_card(query) else original
        return chosen(query, *args, **kwargs)

    patches.put_wherever_imported("", [(original, attention)])
    try:
        yield
    finally:
        library._destroy()


class _Kernels:
    """The ops, with arguments named as in torch. The RNG state takes the place of CUDA's seed."""

    def __init__(self, attention: Function) -> None:
        self._attention = attention

    def register(self, library: Any) -> None:
        kernels = {
            "_scaled_dot_product_efficient_attention": self._efficient,
            "_scaled_dot_product_efficient_attention_backward": self._efficient_backward,
            "_scaled_dot_product_flash_attention": self._flash,
            "_scaled_dot_product_flash_attention_backward": self._flash_backward,
        }
        for name, kernel in kernels.items():
            op = getattr(torch.ops.aten, name).default
            library.impl(name, with_named_arguments(op, kernel), "CPU")

    def _run(self, call: Any, query: Any, key: Any, value: Any, mask: Any = None) -> Any:
        is_grouped = query.size(1) != key.size(1)
        options = {"scale": call.scale, "enable_gqa": is_grouped}
        return self._attention(query, key, value, mask, call.dropout_p, call.is_causal, **options)

    def _efficient(self, call: Any) -> Any:
        query, state = call.query, _random_state(call.dropout_p)
        out = self._run(call, query, call.key, call.value, call.attn_bias)
        # As its meta kernel.
        num_rows = -(-query.size(2) // 32) * 32 if call.compute_log_sumexp else 0
        sums = query.new_zeros(*query.shape[:2], num_rows, dtype=torch.float32)
        return _by_rows(out), sums, state, torch.zeros((), dtype=torch.int64)

    def _efficient_backward(self, call: Any) -> Any:
        bias = call.attn_bias if call.attn_bias is not None and call.attn_bias.numel() else None
        wants_bias = bias is not None and call.grad_input_mask[3]
        inputs = [call.query, call.key, call.value, *([bias] if wants_bias else [])]

        def again(query: Any, key: Any, value: Any, mask: Any = bias) -> Any:
            return self._run(call, query, key, value, mask)

        grads = _gradients(again, inputs, call.grad_out_, call.philox_seed)
        of_bias = grads[3] if wants_bias else call.query.new_empty(0)
        return *map(_by_rows, grads[:3]), of_bias

    def _flash(self, call: Any) -> Any:
        query, key, state = call.query, call.key, _random_state(call.dropout_p)
        out = self._run(call, query, key, call.value)
        sums = query.new_zeros(query.shape[:3], dtype=torch.float32)
        nothing = [query.new_empty(0) for _ in range(4)]
        lengths = query.size(2), key.size(2)
        return _by_rows(out), sums, *nothing[:2], *lengths, state, *nothing[2:]

    def _flash_backward(self, call: Any) -> Any:
        inputs = [call.query, call.key, call.value]
        run = functools.partial(self._run, call)
        return tuple(map(_by_rows, _gradients(run, inputs, call.grad_out, call.philox_seed)))


def _random_state(dropout_p: float) -> torch.Tensor:
    return torch.get_rng_state() if dropout_p else torch.zeros((), dtype=torch.int64)


def _by_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Arrange a tensor in CUDA's layout, with the heads of a row side by side."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _gradients(
    run: Function, inputs: list[torch.Tensor], grad_out: torch.Tensor, state: torch.Tensor
) -> list[torch.Tensor]:
    """Run the function again with the same random numbers, and differentiate."""
    is_random = state.numel() > 1
    with torch.random.fork_rng(devices=(), enabled=is_random):
        if is_random:
            torch.set_rng_state(state)
        # With autograd, which kernels run without, and without the accounting.
        with enable_reentrant_dispatch(), torch._C._DisableTorchDispatch(), torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            return list(torch.autograd.grad(run(*leaves), leaves, grad_out))


# ---- torch.compile -> the uncompiled code: what compiled kernels would save is unknown -----------
# Models and functions that were compiled earlier also run uncompiled.

COMPILE = "torch.compile: rehearsed without it; a compiled model takes other memory, usually less"


def pass_over(note: Callable[[str], None]) -> None:
    """Patch torch.compile in this process and call `note` when it is used."""

    def compiled(model: Any = None, *_: Any, **kwargs: Any) -> Any:
        if model is None:
            return lambda function: compiled(function, **kwargs)
        if isinstance(model, FunctionType):
            return _noting_calls(model, note)
        note(COMPILE)
        return model

    module: Any = torch.nn.Module
    vars(torch)["compile"] = compiled
    module.compile = lambda *_, **__: note(COMPILE)
    compiler: Any = torch.compiler
    compiler.set_stance("force_eager")
    compiler.cudagraph_mark_step_begin = lambda: None  # CUDA graphs exist only in compiled models


def _noting_calls(function: Any, note: Callable[[str], None]) -> Any:
    """Note a compiled function when it is called, since libraries compile some on import."""

    @functools.wraps(function)
    def called(*args: Any, **kwargs: Any) -> Any:
        note(COMPILE)
        return function(*args, **kwargs)

    return called


def note_if_compiled(model: object, note: Callable[[str], None]) -> None:
    """Note a model that was compiled before torch.compile was patched."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        note(COMPILE)
