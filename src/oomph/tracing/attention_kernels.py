"""scaled_dot_product_attention -> the op of the kernel that CUDA would choose.

Read in torch's sources, not run on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def attention_on(capability: Callable[[], tuple[int, int]]) -> Callable[..., Any]:
    """The function, for a GPU of a compute capability, which is asked for at each call."""

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

    return attention


def _is_flash(query: Any, mask: Any, capability: tuple[int, int]) -> bool:
    is_low = query.dtype in (torch.float16, torch.bfloat16)
    is_small = query.size(-1) <= 256
    is_there = capability >= (8, 0) and torch.backends.cuda.flash_sdp_enabled()
    return bool(is_low and mask is None and is_small and is_there)


def _is_efficient(query: Any, key: Any) -> bool:
    """It has no groups of heads (sdp_utils.cpp, check_batch_size_and_num_heads_dense<false>)."""
    is_aligned = query.size(-1) % 4 == 0 or query.dtype != torch.float32
    has_groups = query.size(-3) != key.size(-3)
    return is_aligned and not has_groups and torch.backends.cuda.mem_efficient_sdp_enabled()


def _flash(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Flash attention wants a head of a multiple of 8, and takes fewer key heads as they are."""
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
