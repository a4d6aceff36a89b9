"""A footprint on a few GPUs, and one on many -> the footprint on a number between them.

With FSDP a block is either the same on any number of GPUs, or a shard: its size divided by their
number. Shards are padded, so this holds only if few divide the number and the number divides many,
and no shard is padded differently on few and on many.
"""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING

from oomph.predicting.footprint import Footprint, Kernel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

_SAME = (
    *("stream", "category", "born", "label", "module", "is_output", "reduction"),
    *("event", "phase", "step", "micro_step", "op"),
)


def between(
    few: Footprint, many: Footprint, num_few: int, num_gpus: int, num_many: int
) -> Footprint | None:
    """Return the footprint on `num_gpus`; None if it cannot be told from the two."""
    if num_gpus % num_few or num_many % num_gpus or not _is_one_structure(few, many):
        return None
    sizes = _sizes(few.fixed_bytes, many.fixed_bytes, num_few, num_gpus, num_many)
    grown = _sizes(few.grown_bytes, many.grown_bytes, num_few, num_gpus, num_many)
    if sizes is None or grown is None or few.host_bytes != many.host_bytes:
        return None
    # Every figure of work is a part that stays and a part that is divided.
    share = (Fraction(1, num_gpus) - Fraction(1, num_many)) / (
        Fraction(1, num_few) - Fraction(1, num_many)
    )
    kernels = tuple(
        _kernel(one, other, share) for one, other in zip(few.kernels, many.kernels, strict=True)
    )
    return replace(many, fixed_bytes=sizes, grown_bytes=grown, kernels=kernels)


def _is_one_structure(few: Footprint, many: Footprint) -> bool:
    import numpy as np

    if few.names != many.names or few.reductions != many.reductions:
        return False
    if [_kind(one) for one in few.kernels] != [_kind(one) for one in many.kernels]:
        return False
    return all(np.array_equal(getattr(few, column), getattr(many, column)) for column in _SAME)


def _kind(kernel: Kernel) -> tuple[object, ...]:
    """Return what of a kernel no number of GPUs changes."""
    alike = kernel.name, kernel.phase, kernel.dtype, kernel.num_pending, kernel.num_views
    return (*alike, kernel.fixed_product, kernel.grown_product, kernel.is_strided)


def _sizes(
    few: Numbers, many: Numbers, num_few: int, num_gpus: int, num_many: int
) -> Numbers | None:
    """Return sizes that stay, or that are divided; None if one is neither."""
    import numpy as np

    stays, is_shard = few == many, few * num_few == many * num_many
    if not (stays | is_shard).all():
        return None
    found: Numbers = np.where(stays, few, few * num_few // num_gpus)
    return found


def _kernel(few: Kernel, many: Kernel, share: Fraction) -> Kernel:
    def on_line(one: int, other: int) -> int:
        return round(other + (one - other) * share)

    return many._replace(
        fixed_flops=on_line(few.fixed_flops, many.fixed_flops),
        grown_flops=on_line(few.grown_flops, many.grown_flops),
        fixed_moved_bytes=on_line(few.fixed_moved_bytes, many.fixed_moved_bytes),
        grown_moved_bytes=on_line(few.grown_moved_bytes, many.grown_moved_bytes),
    )
