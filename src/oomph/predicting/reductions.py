"""A reduction, a card -> the bytes that its blocks stage in the card's memory.

If an output has many inputs and there are few outputs, torch lets several blocks of threads share
each output. Their results meet in a staging buffer, which is taken from the allocator for the one
kernel: 40 MiB for the sum of 2048 rows of 2560 numbers. The rule is torch's (Reduce.cuh,
setReduceConfig); torch 2.0 to 2.13 have the same.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from oomph.records.trace import Allocation, Reduction, Trace


class Multiprocessors(NamedTuple):
    """What decides how many blocks a card can run at once."""

    num: int
    threads: int  # resident in each


NONE = Multiprocessors(0, 0)  # the kernels of the CPU: they share no output

# ReduceConfig in Reduce.cuh.
_MOST_THREADS = 512  # of a block
_WARP = 32
_FEWEST_VALUES, _MOST_VALUES = 16, 256  # of a thread, before and after outputs are shared
_VECTOR = 4  # values that a thread reads at once
_LONG = 128  # inputs from which on they are read so
_SEMAPHORE_BYTES = 4
_LARGEST_BYTES = 2**31 - 1  # larger tensors are reduced in parts: offsets have 32 bits


def sized_on(trace: Trace, multiprocessors: Multiprocessors) -> Trace:
    """Return the trace with what reductions stage on a card."""
    return replace(
        trace,
        allocations=[
            each if each.reduction is None else _sized(each, multiprocessors)
            for each in trace.allocations
        ],
    )


def _sized(allocation: Allocation, multiprocessors: Multiprocessors) -> Allocation:
    assert allocation.reduction is not None  # noqa: S101 - the caller looked
    return replace(allocation, size_bytes=staged_bytes(allocation.reduction, multiprocessors))


def staged_bytes(reduction: Reduction, multiprocessors: Multiprocessors) -> int:
    """Return the bytes of the staging buffer or of the semaphores; 0 if no output is shared.

    >>> rows = Reduction(
    ...     part="staging", num_outputs=2560, num_inputs=2048, element_bytes=4, value_bytes=4,
    ...     is_along_inputs=False, num_contiguous=2560,
    ... )
    >>> staged_bytes(rows, Multiprocessors(188, 1536))
    41943040
    """
    each = _part_of(reduction)
    width, height, vector = _block(each)
    step_inputs, step_outputs = (width, 1) if each.is_along_inputs else (1, width)
    values = _up(each.num_inputs, step_inputs)
    if values < min(height * _FEWEST_VALUES, _MOST_VALUES):
        return 0  # rows of the block work on other outputs
    values = _up(each.num_inputs, step_inputs * height)
    grid = _up(each.num_outputs // vector, step_outputs)
    target = multiprocessors.num * (multiprocessors.threads // (width * height))
    if values < _MOST_VALUES or grid > target:
        return 0
    num_blocks = max(min(_up(target, grid), _up(values, _FEWEST_VALUES)), _up(values, _MOST_VALUES))
    if num_blocks <= 1:
        return 0
    if each.part == "semaphores":
        return _SEMAPHORE_BYTES * grid
    staged = each.value_bytes * each.num_outputs * num_blocks
    return staged if each.is_along_inputs else staged * width * vector


def _part_of(reduction: Reduction) -> Reduction:
    """Return the part of a tensor that is reduced at once: halves along its longest dimension."""
    each = reduction
    while each.num_outputs * each.num_inputs * each.element_bytes > _LARGEST_BYTES:
        if each.num_outputs > 1:
            each = replace(each, num_outputs=_up(each.num_outputs, 2))
        else:
            each = replace(each, num_inputs=_up(each.num_inputs, 2))
    return each


def _block(each: Reduction) -> tuple[int, int, int]:
    """Return the width and the height of a block, and how many outputs a thread has at once."""
    if each.is_along_inputs:
        wide, high, vector = each.num_inputs, each.num_outputs, 1
        if wide > _LONG and each.num_contiguous == each.num_inputs:
            wide //= _VECTOR
    else:
        vector = math.gcd(each.num_contiguous, _VECTOR) if each.num_contiguous else 1
        wide, high = each.num_outputs // vector, each.num_inputs
    most = _MOST_THREADS // vector
    wide, high = _power_within(wide, most), _power_within(high, most)
    width = min(wide, _WARP)
    height = min(high, most // width)
    return min(wide, most // height), height, vector


def _power_within(number: int, most: int) -> int:
    """Return the largest power of two up to both numbers, and at least 1."""
    return min(1 << max(number, 1).bit_length() - 1, most)


def _up(number: int, by: int) -> int:
    return -(-number // by)
