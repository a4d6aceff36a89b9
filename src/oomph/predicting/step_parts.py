"""A footprint -> its peak, apart for what comes before the optimizer's step and for the step.

So that the peak with another optimizer is a sum: its state lies below all that forward and
backward hold, and what its step takes comes on top of what they leave.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.predicting.footprint import PHASES, Footprint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

_STEP = PHASES.index("step")


@dataclass(frozen=True, eq=False, kw_only=True)
class StepParts:
    """Of both training steps: what lives outside of the optimizer's step, and what it adds."""

    rest: tuple[Line, ...]  # of the first and second step: what is live, the optimizer's aside
    before: tuple[Line, ...]  # the same, where the optimizer's step begins
    state_bytes: tuple[int, ...]  # of the optimizer, while forward and backward run
    step_bytes: tuple[int, ...]  # the most that its step has on top of `before`

    def peak_with(self, other: StepParts, micro_batch: int) -> int:
        """The most live bytes with the optimizer of the other."""
        return max(
            max(rest.most(micro_batch) + state, before.most(micro_batch) + step)
            for rest, before, state, step in zip(
                self.rest, self.before, other.state_bytes, other.step_bytes, strict=True
            )
        )

    def least_with_state_of(self, other: StepParts, micro_batch: int) -> int:
        """The most live bytes of the second step, with no more of the other's than its state."""
        return self.rest[-1].most(micro_batch) + other.state_bytes[-1]


@dataclass(frozen=True, eq=False)
class Line:
    """Live bytes at some events: fixed + grown x micro-batch."""

    fixed: Numbers
    grown: Numbers

    def most(self, micro_batch: int) -> int:
        return int((self.fixed + self.grown * micro_batch).max(initial=0))


def parts_of(footprint: Footprint) -> StepParts:
    """The parts of a footprint of two training steps."""
    import numpy as np

    places = np.abs(footprint.event) - 1
    signs = np.sign(footprint.event)
    is_steps = footprint.born[places] == _STEP
    fixed, grown = (
        np.cumsum(np.where(is_steps, 0, column[places] * signs))
        for column in (footprint.fixed_bytes, footprint.grown_bytes)
    )
    of_step = np.cumsum(np.where(is_steps, footprint.fixed_bytes[places] * signs, 0))
    rest, before, state, most = [], [], [], []
    for number in (1, 2):
        inside = (footprint.step <= 1) if number == 1 else (footprint.step == number)
        outside = inside & (footprint.phase != _STEP)
        last = np.flatnonzero(outside)[-1:]
        rest.append(Line(fixed[outside], grown[outside]))
        before.append(Line(fixed[last], grown[last]))
        state.append(int(of_step[outside].max(initial=0)))
        most.append(int(of_step[inside & (footprint.phase == _STEP)].max(initial=0)))
    return StepParts(
        rest=tuple(rest), before=tuple(before), state_bytes=tuple(state), step_bytes=tuple(most)
    )
