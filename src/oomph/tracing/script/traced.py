"""A script's loop at its end -> Trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from oomph.records.trace import Trace
from oomph.tracing.label import labelled
from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.loop import NUM_STEPS, Loop


def trace_of(loop: Loop, micro_batch: int) -> Trace:
    """What was recorded, with its categories. Of more than two steps, the last two are named."""
    return labelled(
        loop.recorder,
        micro_batch,
        parameters=_parameters(loop),
        gradients=loop.gradients,
        states=_states(loop),
        outputs=set(),  # what the script keeps of them was seen
        step_starts=loop.step_starts[-NUM_STEPS:] or [0],
        phase_starts=loop.phase_starts,
    )


def _parameters(loop: Loop) -> set[int]:
    """Of all parameters that are alive, and of the buffers of what was trained."""
    tensors = [reference() for reference in list(loop.parameters.values())]
    for module in loop.roots.values():
        tensors += module.buffers()
    return _numbers(loop, tensors)


def _states(loop: Loop) -> set[int]:
    """Of what the optimizers keep."""
    kept = [state for _, optimizer in loop.alive() for state in optimizer.state.values()]
    return _numbers(loop, [v for one in kept if isinstance(one, dict) for v in one.values()])


def _numbers(loop: Loop, tensors: Iterable[Any]) -> set[int]:
    pretended = [t for t in tensors if isinstance(t, torch.Tensor) and is_pretended(t)]
    return {n for n in map(loop.recorder.number_of, pretended) if n is not None}
