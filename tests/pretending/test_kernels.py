"""What kernels take beside their outputs."""

from __future__ import annotations

import pytest
import torch

from oomph.pretending.kernels import TEMPORARIES

_BATCH, _HEADS, _ROWS = 2, 3, 100


def _taken(op: str, head: int, dtype: torch.dtype, key_heads: int = _HEADS) -> list[int]:
    query = torch.empty(_BATCH, _HEADS, _ROWS, head, dtype=dtype, device="meta")
    key = torch.empty(_BATCH, key_heads, _ROWS, head, dtype=dtype, device="meta")
    return TEMPORARIES[op]([query, query, key, key])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_efficient_attention_adds_up_dq_in_fp32_beside_delta(dtype: torch.dtype) -> None:
    taken = _taken("_scaled_dot_product_efficient_attention_backward", 64, dtype)
    rows = _BATCH * _HEADS * _ROWS
    assert sorted(taken) == [4 * rows, 4 * rows * 64]


def test_wide_heads_in_half_precision_add_up_dk_and_dv_in_fp32_too() -> None:
    op = "_scaled_dot_product_efficient_attention_backward"
    whole = 4 * _BATCH * _HEADS * _ROWS * 256
    assert _taken(op, 256, torch.bfloat16).count(whole) == 3
    assert _taken(op, 256, torch.float32).count(whole) == 1


def test_flash_attention_pads_rows_to_128_and_heads_to_32_or_64() -> None:
    op = "_scaled_dot_product_flash_attention_backward"
    padded = _BATCH * _HEADS * 128
    assert _taken(op, 72, torch.bfloat16) == [4 * padded, 4 * padded * 96]
    assert _taken(op, 136, torch.bfloat16) == [4 * padded, 4 * padded * 192]


def test_flash_attention_makes_dk_and_dv_per_query_head_where_keys_are_shared() -> None:
    op = "_scaled_dot_product_flash_attention_backward"
    per_head = 2 * _BATCH * _HEADS * _ROWS * 64
    assert _taken(op, 64, torch.bfloat16, key_heads=1)[2:] == [per_head, per_head]
