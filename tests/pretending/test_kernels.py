"""What kernels take beside their outputs."""

from __future__ import annotations

from typing import Any

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


def _of_index_put(num: int, rows: int, *on_gpu: bool) -> list[int]:
    table = torch.empty(*[rows] * len(on_gpu), 64, device="meta")
    indices = [
        torch.zeros(num, dtype=torch.long, device="meta" if each else "cpu") for each in on_gpu
    ]
    return TEMPORARIES["index_put"]([table, indices, torch.empty(num, 64, device="meta"), True])


@pytest.mark.parametrize(("num", "recorded_bytes"), [(4096, 72_191), (8192, 138_751)])
def test_the_radix_sort_of_indices_takes_what_gpus_recorded(num: int, recorded_bytes: int) -> None:
    assert _of_index_put(num, 10_000, True)[-1] == recorded_bytes


def test_indices_are_added_up_in_place_and_those_of_the_host_are_multiplied_there() -> None:
    def num_blocks(*on_gpu: bool) -> int:
        return [each for each in _of_index_put(2048, 50, *on_gpu) if each > 1].count(8 * 2048)

    assert num_blocks(True) == 2 + 3
    assert num_blocks(True, True) == 2 + 2 + 3
    assert num_blocks(False, True) == 1 + 2 + 3  # as recorded for inputs[arange, targets]


@pytest.mark.parametrize("op", ["logsumexp", "binary_cross_entropy_with_logits", "huber_loss"])
def test_losses_that_torch_composes_below_the_dispatcher_take_what_they_take_on_the_cpu(
    op: str,
) -> None:
    logits = torch.rand(1024, 1024)
    args = [logits, [1]] if op == "logsumexp" else [logits, torch.rand_like(logits)]
    with torch.profiler.profile(profile_memory=True) as profile:
        getattr(torch.ops.aten, op)(*args)
    events = profile.profiler.kineto_results.experimental_event_tree()
    large = [each for each in _allocations(events) if each >= logits.nbytes]
    # log_sigmoid has a buffer on the CPU, which CUDA leaves empty
    is_with_buffer = op == "binary_cross_entropy_with_logits"
    taken = [each for each in TEMPORARIES[op](args) if each >= logits.nbytes]
    assert len(large) - is_with_buffer == len(taken)


def _allocations(events: Any) -> list[int]:
    found: list[int] = []
    for event in events:
        if event.name == "[memory]" and event.extra_fields.alloc_size > 0:
            found.append(event.extra_fields.alloc_size)
        found += _allocations(event.children)
    return found


def test_the_unreduced_loss_is_the_result_where_nothing_is_reduced() -> None:
    logits = torch.empty(8, 8, device="meta")
    assert TEMPORARIES["huber_loss"]([logits, logits, 0, 1.0]) == []
    assert (
        len(TEMPORARIES["binary_cross_entropy_with_logits"]([logits, logits, None, None, 0])) == 1
    )
