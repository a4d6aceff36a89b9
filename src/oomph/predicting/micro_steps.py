"""The phases of a step's ops -> where its second micro-step is: what more of them would repeat.

The first is not like the others: gradients are made in it, and added to in the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from oomph.predicting.communication import COMMUNICATION
from oomph.predicting.work import Work

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

_OF_A_MICRO_STEP = ("input", "forward", "backward")
_TRACED = 2  # micro-steps


def second_micro_step(phases: Sequence[str], order: Numbers) -> range:
    """The places of its ops; empty where a step has only one micro-step.

    `phases` are those of the different ops, `order` says which of them each op is.
    """
    import numpy as np

    is_backward, begins, is_inside = (
        np.array([phase in ones for phase in phases], dtype=bool)[order]
        for ones in (("backward",), ("input", "forward"), _OF_A_MICRO_STEP)
    )
    starts = np.flatnonzero(is_backward[:-1] & begins[1:])
    if not len(starts):
        return range(len(order), len(order))
    begin = int(starts[0]) + 1
    ends = np.flatnonzero(~is_inside[begin:])
    return range(begin, begin + int(ends[0]) if len(ends) else len(order))


def parts_of_work(work: Work, num_micro_steps: int | None) -> list[tuple[Numbers, int]]:
    """Ops that follow each other and how often: as they are, or with so many micro-steps."""
    if num_micro_steps is None or num_micro_steps <= _TRACED:
        return [(work.order, 1)]
    second = second_micro_step([op.phase for op in work.kernels], work.order)
    repeated = between(
        [op.name for op in work.kernels],
        work.order[: second.start],
        work.order[second.start : second.stop],
    )
    return [
        (work.order[: second.stop], 1),
        (repeated, num_micro_steps - _TRACED),
        (work.order[second.stop :], 1),
    ]


def between(names: Sequence[str], first: Numbers, last: Numbers) -> Numbers:
    """The ops of a micro-step that is neither the first nor the last of its step.

    Where nothing is sent in the first, gradients are sent after the last only: DDP's no_sync.
    """
    import numpy as np

    sends = np.array([name in COMMUNICATION for name in names], dtype=bool)
    if sends[first].any() or not sends[last].any():
        return last
    waits = np.array([name == "wait" for name in names], dtype=bool)
    kept: Numbers = last[~(sends | waits)[last]]
    return kept
