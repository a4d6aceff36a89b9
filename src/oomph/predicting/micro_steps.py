"""The phases of a step's ops -> where its second micro-step is: what more of them would repeat.

The first is not like the others: gradients are made in it, and added to in the rest.
"""

from __future__ import annotations

from collections.abc import Sequence

_OF_A_MICRO_STEP = ("input", "forward", "backward")


def second_micro_step(phases: Sequence[str]) -> range:
    """The places of its ops; empty where a step has only one micro-step."""
    begin = next(
        (
            place
            for place in range(1, len(phases))
            if phases[place - 1] == "backward" and phases[place] in ("input", "forward")
        ),
        len(phases),
    )
    end = begin
    while end < len(phases) and phases[end] in _OF_A_MICRO_STEP:
        end += 1
    return range(begin, end)
