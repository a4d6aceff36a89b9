"""CUDA's fused attention on the card: what it keeps for backward, with the CPU's numbers.

On the CPU attention with dropout keeps its matrices of length x length; CUDA's kernels keep their
output and a sum for each row, and make the rest again in backward. The ops of these kernels are
given to the CPU here. Inside of them the CPU computes as ever, seen by nobody: forward once, and
again in backward with the same random numbers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import enable_reentrant_dispatch

from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import Places

Attention = Callable[..., Any]


@contextlib.contextmanager
def fused_attention(patches: Patches, places: Places, on_cuda: Attention) -> Iterator[None]:
    """on_cuda: scaled_dot_product_attention, ending in the op that CUDA would choose."""
    original: Attention = torch.nn.functional.scaled_dot_product_attention
    library = torch.library.Library("aten", "IMPL")
    kernels = _Kernels(original)
    for name in _OPS:
        library.impl(name, getattr(kernels, name.lstrip("_")), "CPU")

    def attention(query: Any, *args: Any, **kwargs: Any) -> Any:
        is_dense = isinstance(query, torch.Tensor) and not query.is_nested
        chosen = on_cuda if is_dense and places.on_card(query) else original
        return chosen(query, *args, **kwargs)

    patches.set_wherever_imported("", [(original, attention)])
    try:
        yield
    finally:
        library._destroy()


_OPS = (
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_backward",
)


class _Kernels:
    """The ops, with torch's signatures. The state of random numbers goes where CUDA's seed is."""

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    def scaled_dot_product_efficient_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        attn_bias: Any,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        state = _random_state(dropout_p)
        out = self._attention(query, key, value, attn_bias, dropout_p, is_causal, scale=scale)
        num_rows = -(-query.size(2) // 32) * 32 if compute_log_sumexp else 0  # as its meta kernel
        sums = query.new_zeros(*query.shape[:2], num_rows, dtype=torch.float32)
        return _by_rows(out), sums, state, torch.zeros((), dtype=torch.int64)

    def scaled_dot_product_efficient_attention_backward(
        self,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        attn_bias: Any,
        out: Any,
        logsumexp: Any,
        philox_seed: Any,
        philox_offset: Any,
        dropout_p: float,
        grad_input_mask: Any,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        del out, logsumexp, philox_offset
        bias = attn_bias if attn_bias is not None and attn_bias.numel() else None
        inputs = [query, key, value, *([bias] if grad_input_mask[3] else [])]

        def again(query: Any, key: Any, value: Any, bias: Any = bias) -> Any:
            return self._attention(query, key, value, bias, dropout_p, is_causal, scale=scale)

        grads = _gradients(again, inputs, grad_out, philox_seed)
        of_bias = grads[3] if grad_input_mask[3] else query.new_empty(0)
        return *map(_by_rows, grads[:3]), of_bias

    def scaled_dot_product_flash_attention(
        self,
        query: Any,
        key: Any,
        value: Any,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        return_debug_mask: bool = False,
        *,
        scale: float | None = None,
    ) -> Any:
        del return_debug_mask
        state = _random_state(dropout_p)
        out = self._flash(query, key, value, dropout_p, is_causal, scale)
        sums = query.new_zeros(query.shape[:3], dtype=torch.float32)
        nothing = [query.new_empty(0) for _ in range(4)]
        lengths = query.size(2), key.size(2)
        return _by_rows(out), sums, *nothing[:2], *lengths, state, *nothing[2:]

    def scaled_dot_product_flash_attention_backward(
        self,
        grad_out: Any,
        query: Any,
        key: Any,
        value: Any,
        out: Any,
        logsumexp: Any,
        cum_seq_q: Any,
        cum_seq_k: Any,
        max_q: int,
        max_k: int,
        dropout_p: float,
        is_causal: bool,
        philox_seed: Any,
        philox_offset: Any,
        *,
        scale: float | None = None,
    ) -> Any:
        del out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, philox_offset

        def again(query: Any, key: Any, value: Any) -> Any:
            return self._flash(query, key, value, dropout_p, is_causal, scale)

        grads = _gradients(again, [query, key, value], grad_out, philox_seed)
        return tuple(map(_by_rows, grads))

    def _flash(
        self, query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: Any
    ) -> Any:
        is_grouped = query.size(1) != key.size(1)
        return self._attention(
            query, key, value, None, dropout_p, is_causal, scale=scale, enable_gqa=is_grouped
        )


def _random_state(dropout_p: float) -> Any:
    return torch.get_rng_state() if dropout_p else torch.zeros((), dtype=torch.int64)


def _by_rows(tensor: Any) -> Any:
    """In CUDA's layout: the heads of a row side by side."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def _gradients(run: Callable[..., Any], inputs: list[Any], grad_out: Any, state: Any) -> list[Any]:
    """Of what is run once more, with the random numbers that it had."""
    now = torch.get_rng_state() if state.numel() > 1 else None
    if now is not None:
        torch.set_rng_state(state)
    try:
        # With autograd, which a kernel has not, and without the accounting.
        with enable_reentrant_dispatch(), torch._C._DisableTorchDispatch(), torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            return list(torch.autograd.grad(run(*leaves), leaves, grad_out))
    finally:
        if now is not None:
            torch.set_rng_state(now)
