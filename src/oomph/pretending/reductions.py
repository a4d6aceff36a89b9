"""An op that reduces a tensor -> what its kernel takes beside the result.

A sum of booleans or of small integers is one of 64-bit integers: the kernel first copies its input
(ReduceOpsUtils.h, make_reduction: `self.to(in_dtype)`), which happens below the dispatcher. And the
shape decides whether blocks of threads share an output; on which card, `predicting.reductions`
knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from oomph.records.trace import Reduction

Taken = int | Reduction  # bytes, or a block whose size depends on the card

_INDEX_BYTES = 8
_LOW = (torch.float16, torch.bfloat16)


def _added_up(dtype: torch.dtype) -> int:
    """Return the bytes in which sums of a dtype are held (AccumulateType.h)."""
    return 4 if dtype in _LOW else dtype.itemsize


def _itself(dtype: torch.dtype) -> int:
    return dtype.itemsize


def _with_index(_: torch.dtype) -> int:
    """Return the bytes of a value and its 64-bit index, aligned to the index."""
    return 2 * _INDEX_BYTES


def _welford(dtype: torch.dtype) -> int:
    """Return the bytes of a mean, a sum of squares and two counts (WelfordData)."""
    return 4 * max(_added_up(dtype), 4)


def _pair(dtype: torch.dtype) -> int:
    return 2 * dtype.itemsize


def _truth(_: torch.dtype) -> int:
    return 1


# op -> the bytes of what is reduced, from the dtype of the input
_VALUES: dict[str, Callable[[torch.dtype], int]] = {
    **dict.fromkeys(("sum", "mean", "nansum", "prod", "linalg_vector_norm"), _added_up),
    **dict.fromkeys(("amax", "amin"), _itself),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), _with_index),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _welford),
    "aminmax": _pair,
    **dict.fromkeys(("any", "all"), _truth),
}
REDUCTIONS = frozenset(_VALUES)

# These convert their input to the dtype of their result, except half precision to fp32.
_CONVERTING = frozenset({"sum", "mean", "nansum", "prod", "linalg_vector_norm"})
_NOT_IN_VECTORS = frozenset({"var", "std", "var_mean", "std_mean"})  # they read two values at once
_PLACE_OF_DIMS = {"linalg_vector_norm": 2}
_BETWEEN_TWO = frozenset({"max", "min"})  # max(tensor, other) reduces nothing


def taken(name: str, args: Any, kwargs: Any) -> list[Taken]:
    """Return what the kernel takes beside its results, in this order."""
    given = args[0]
    place = _PLACE_OF_DIMS.get(name, 1)
    dims = args[place] if len(args) > place else kwargs.get("dim")
    if isinstance(dims, torch.Tensor) or given.is_complex() or not given.numel():
        return []
    dtype, found = given.dtype, list[Taken]()
    if name in _CONVERTING:
        dtype = _reduced_as(name, given.dtype, kwargs.get("dtype"))
        if dtype != given.dtype:
            found.append(given.numel() * dtype.itemsize)
    value_bytes = _VALUES[name](dtype)
    if name in _BETWEEN_TWO and dims is None:
        value_bytes = dtype.itemsize  # of the whole tensor, without an index
    return found + staged(given, dims, value_bytes, dtype, in_vectors=name not in _NOT_IN_VECTORS)


def _reduced_as(name: str, given: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Return the dtype to which the input is converted (make_reduction_from_out_ty)."""
    is_whole = not (given.is_floating_point or given.is_complex)
    out = wanted or (torch.int64 if is_whole and name in ("sum", "nansum", "prod") else given)
    return given if given in _LOW and out == torch.float32 else out


def staged(
    given: torch.Tensor,
    dims: int | Sequence[int] | None,
    value_bytes: int,
    dtype: torch.dtype,
    *,
    in_vectors: bool = True,
) -> list[Taken]:
    """Return the staging buffer and the semaphores of a reduction, if it reduces anything.

    Dimensions are ordered and merged as TensorIterator does: the reduced ones first, by their
    strides, then the others from the last to the first.
    """
    is_copy = dtype != given.dtype  # a converted copy is as dense as the input
    reduced, others = _dimensions(given, dims)
    num_inputs = math.prod(size for size, _ in reduced)
    if num_inputs <= 1:
        return []
    is_along_inputs = not others or reduced[0][1] < others[0][1]
    first = (reduced if is_along_inputs else others)[0]
    num_contiguous = 0
    if first[1] == 1:
        num_contiguous = first[0]
        if is_along_inputs:
            num_contiguous = first[0] if in_vectors and len(reduced) == 1 else 0
        else:
            offset = 0 if is_copy else int(given.storage_offset())
            strides = [stride for _, stride in (*reduced, *others[1:])]
            num_contiguous = math.gcd(first[0], offset, *strides)
    shape: dict[str, Any] = {
        "num_outputs": math.prod(size for size, _ in others),
        "num_inputs": num_inputs,
        "element_bytes": dtype.itemsize,
        "value_bytes": value_bytes,
        "is_along_inputs": is_along_inputs,
        "num_contiguous": num_contiguous,
    }
    return [Reduction(part="staging", **shape), Reduction(part="semaphores", **shape)]


Dimension = tuple[int, int]  # size and stride


def _dimensions(
    given: torch.Tensor, dims: int | Sequence[int] | None
) -> tuple[list[Dimension], list[Dimension]]:
    """Return the reduced dimensions and the others, the fastest first, with neighbours merged."""
    num_dims = given.dim()
    if isinstance(dims, int):
        dims = (dims,)
    chosen = {dim % num_dims for dim in dims} if dims and num_dims else set(range(num_dims))
    each = list(zip(given.shape, given.stride(), strict=True))
    reduced = sorted(
        (each[dim] for dim in reversed(range(num_dims)) if dim in chosen),
        key=lambda dimension: dimension[1],
    )
    others = [each[dim] for dim in reversed(range(num_dims)) if dim not in chosen]
    return _merged(reduced), _merged(others)


def _merged(dimensions: Sequence[Dimension]) -> list[Dimension]:
    merged: list[Dimension] = []
    for size, stride in dimensions:
        if size == 1:
            continue
        if merged and merged[-1][0] * merged[-1][1] == stride:
            merged[-1] = merged[-1][0] * size, merged[-1][1]
        else:
            merged.append((size, stride))
    return merged
