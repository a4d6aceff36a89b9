"""Ops -> the different ones of them, and the order in which they come: a step has few kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.records.trace import Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Work:
    """What the ops of a step compute and move."""

    kernels: Sequence[Op]  # the different ones, whatever their module
    order: Numbers  # which of them each op is


def work_of(ops: Sequence[Op]) -> Work:
    import numpy as np

    numbers: dict[tuple[str, str, str, int, int, int], int] = {}
    kernels: list[Op] = []
    order = []
    for op in ops:
        key = (op.name, op.phase, op.dtype, op.flops, op.moved_bytes, op.num_pending)
        number = numbers.setdefault(key, len(kernels))
        if number == len(kernels):
            kernels.append(op)
        order.append(number)
    return Work(kernels, np.array(order, dtype=np.int64))
