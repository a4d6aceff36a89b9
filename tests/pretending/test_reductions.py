"""What a reduction takes beside its result, and what it is that is reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.pretending.reductions import taken
from oomph.records.trace import Reduction


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def copied(name: str, *args: Any, **kwargs: Any) -> list[int]:
    return [each for each in taken(name, args, kwargs) if isinstance(each, int)]


def reduced(name: str, *args: Any, **kwargs: Any) -> Reduction:
    staging, semaphores = (
        each for each in taken(name, args, kwargs) if isinstance(each, Reduction)
    )
    assert (staging.part, semaphores.part) == ("staging", "semaphores")
    return staging


def shape_of(one: Reduction) -> tuple[int, int, bool, int]:
    return one.num_outputs, one.num_inputs, one.is_along_inputs, one.num_contiguous


def test_a_sum_of_a_mask_first_copies_it_to_64_bit_integers() -> None:
    mask = meta(100, 10, dtype=torch.bool)
    assert copied("sum", mask, [1], True) == [8 * 1000]
    assert copied("sum", meta(100, 10, dtype=torch.int32)) == [8 * 1000]
    assert copied("sum", meta(100, 10, dtype=torch.int64)) == []
    assert reduced("sum", mask, [1], True).value_bytes == 8


def test_half_precision_is_added_up_in_fp32_without_a_copy() -> None:
    half = meta(100, 10, dtype=torch.bfloat16)
    assert copied("sum", half, [0], dtype=torch.float32) == []
    assert reduced("sum", half, [0]).value_bytes == 4
    assert reduced("sum", half, [0]).element_bytes == 2


def test_another_dtype_of_the_result_is_a_copy() -> None:
    assert copied("sum", meta(100, 10), [0], dtype=torch.float64) == [8 * 1000]
    assert copied("any", meta(100, 10), 0) == []


@pytest.mark.parametrize(
    ("name", "dtype", "value_bytes"),
    [
        ("amax", torch.bfloat16, 2),
        ("max", torch.float32, 16),
        ("argmin", torch.float32, 16),
        ("var", torch.float32, 16),
        ("var", torch.float64, 32),
        ("aminmax", torch.float32, 8),
        ("all", torch.bool, 1),
        ("linalg_vector_norm", torch.float16, 4),
    ],
)
def test_what_is_reduced_is_as_wide_as_in_torch(
    name: str, dtype: torch.dtype, value_bytes: int
) -> None:
    args = (
        (meta(100, 10, dtype=dtype), 2, [0]) if "norm" in name else (meta(100, 10, dtype=dtype), 0)
    )
    assert reduced(name, *args).value_bytes == value_bytes


def test_the_maximum_of_everything_has_no_index_and_that_of_two_tensors_reduces_nothing() -> None:
    assert reduced("max", meta(100, 10)).value_bytes == 4
    assert taken("max", (meta(100, 10), meta(100, 10)), {}) == []


def test_rows_and_columns_differ_in_who_reads_what() -> None:
    assert shape_of(reduced("sum", meta(100, 12), [0])) == (12, 100, False, 12)
    assert shape_of(reduced("sum", meta(100, 12), [1])) == (100, 12, True, 12)
    assert shape_of(reduced("sum", meta(100, 12))) == (1, 1200, True, 1200)
    assert shape_of(reduced("sum", meta(12, 100).t(), [0])) == (12, 100, True, 100)


def test_neighbouring_dimensions_are_one() -> None:
    assert shape_of(reduced("sum", meta(2, 3, 5, 8), [0, 1])) == (40, 6, False, 40)
    # Around the middle two dimensions are left, and those are not read in vectors.
    assert shape_of(reduced("sum", meta(2, 3, 8), [0, 2])) == (3, 16, True, 0)
    assert shape_of(reduced("sum", meta(2, 1, 8), [0, 1])) == (8, 2, False, 8)


def test_rows_that_are_not_aligned_are_not_read_in_vectors() -> None:
    wide = meta(100, 14)
    assert reduced("sum", wide[:, :12], [0]).num_contiguous == 2  # a row has 14 values
    assert reduced("sum", wide[:, 1:13], [0]).num_contiguous == 1


def test_a_copy_is_aligned_whatever_the_input_was() -> None:
    mask = meta(100, 16, dtype=torch.bool)
    assert reduced("sum", mask[1:], [0]).num_contiguous == 16


def test_what_is_no_reduction_takes_nothing() -> None:
    assert taken("sum", (meta(1, 12), [0]), {}) == []
    assert taken("sum", (meta(0, 12), [0]), {}) == []
    assert taken("sum", (meta(8, dtype=torch.complex64),), {}) == []
