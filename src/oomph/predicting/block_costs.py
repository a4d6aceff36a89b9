"""A trace without checkpointing -> what each block keeps for backward, and what it computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from oomph.records.trace import Op, Trace


class BlockCost(NamedTuple):
    """What recomputing a block would free, and what it would cost."""

    saved_bytes: int
    forward_s: float


def block_costs(
    trace: Trace, block_names: Sequence[str], seconds: Callable[[Op], float]
) -> list[BlockCost]:
    """Of each block, in a micro-step of the last training step."""
    places = {name: place for place, name in enumerate(block_names)}
    saved = [0] * len(block_names)
    forward_s = [0.0] * len(block_names)
    for number in _requested_in_last_step(trace):
        allocation = trace.allocations[number]
        place = _block_of(allocation.module, places)
        if place is not None and allocation.category == "activations":
            saved[place] += allocation.size_bytes
    for op in trace.ops:
        place = _block_of(op.module, places)
        if place is not None and op.phase == "forward":
            forward_s[place] += seconds(op)
    return [BlockCost(*pair) for pair in zip(saved, forward_s, strict=True)]


def _requested_in_last_step(trace: Trace) -> list[int]:
    return [event - 1 for event in trace.events[trace.step_starts[-1] :] if event > 0]


def _block_of(module: str, places: dict[str, int]) -> int | None:
    """The block that a module is, or is in."""
    while module:
        if module in places:
            return places[module]
        module = module.rpartition(".")[0]
    return None
