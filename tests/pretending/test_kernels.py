"""What kernels take beside their outputs."""

from __future__ import annotations

import threading

import pytest
import torch

from oomph.pretending.kernels import TEMPORARIES, cublas_handle
from oomph.pretending.streams import Now

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


def test_the_unreduced_loss_is_the_result_where_nothing_is_reduced() -> None:
    logits = torch.empty(8, 8, device="meta")
    assert TEMPORARIES["huber_loss"]([logits, logits, 0, 1.0]) == []
    assert (
        len(TEMPORARIES["binary_cross_entropy_with_logits"]([logits, logits, None, None, 0])) == 1
    )


def _sorted(
    name: str, rows: int, *indices: torch.Tensor | None, accumulates: bool = True
) -> list[int]:
    given = torch.empty(rows, 8, device="meta")
    values = torch.empty(*indices[0].shape, 8, device="meta")  # type: ignore[union-attr] # is one
    return TEMPORARIES[name]((given, indices, values, accumulates))


def _index(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("name", ["index_put", "index_put_", "_index_put_impl_"])
def test_adding_up_under_an_index_sorts_it(name: str) -> None:
    # Wrapped, times the stride, then the sorted index, its order, and the numbers to sort with it.
    # One block sorts few indices alone, and takes a single byte for that.
    assert _sorted(name, 10_000, _index(4, 128)) == [4096, 4096, -1, 4096, 4096, 4096, 1]
    assert _sorted(name, 10_000, _index(4, 128), accumulates=False) == []
    assert _sorted(name, 10_000, _index(4, dtype=torch.bool)) == []


def test_more_indices_take_copies_of_keys_and_places_in_each_pass() -> None:
    count = 10_000
    tiles = -(-count // 3840)
    of_passes = [2 * 256 * 8, tiles * 256 * 4, 8 * count, 8 * count, 2 * 4]  # 14 bits are two
    taken = _sorted("index_put_", 10_000, _index(count))[-1]
    assert taken == sum(-(-size // 256) * 256 for size in of_passes) + 255
    assert _sorted("index_put_", 200, _index(count))[-1] < 8 * count  # 8 bits are one


def test_a_thread_has_a_handle_of_cublas_and_so_has_autograd() -> None:
    seen = [cublas_handle()]
    other = threading.Thread(target=lambda: seen.append(cublas_handle()))
    other.start()
    other.join()
    leaf = torch.ones(2, requires_grad=True)
    product = leaf * 2
    product.register_hook(lambda _: seen.append(cublas_handle()))
    product.sum().backward()
    assert seen == [(name, Now.stream) for name in ("main", "others", "autograd")]
