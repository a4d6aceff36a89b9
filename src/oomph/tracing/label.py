"""A recording -> Trace: each allocation as parameter, gradient, optimizer, activation or other."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import torch

from oomph.records.trace import Allocation, Category, Phase, Trace
from oomph.tracing.ranks import GATHERED


def labelled(
    recorder: Any,
    micro_batch: int,
    *,
    parameters: Container[int],
    gradients: set[int],
    states: set[int],
    outputs: set[int],
    step_starts: Sequence[int],
    phase_starts: Sequence[tuple[int, Phase]],
) -> Trace:
    """The recording with its categories."""
    deaths = _deaths(recorder.events, phase_starts)
    allocations = [
        Allocation(
            size_bytes=size_bytes,
            op=op,
            module=module,
            phase=phase,
            category="optimizer"
            if number in states
            else _category(number, op, phase, deaths.get(number), parameters, gradients),
            stream=stream,
            is_output=number in outputs,
        )
        for number, (size_bytes, (op, module, phase), stream) in enumerate(
            zip(recorder.sizes, recorder.born, recorder.streams, strict=True)
        )
    ]
    return Trace(
        allocations=allocations,
        events=recorder.events,
        step_starts=step_starts,
        phase_starts=phase_starts,
        ops=recorder.ops,
        convolutions=tuple(recorder.convolutions),
        measures_convolutions=torch.backends.cudnn.benchmark,
        micro_batch=micro_batch,
        torch_version=str(torch.__version__),  # a plain text: its class would bring torch along
        compute_capability=recorder.capability,
        notes=tuple(sorted(recorder.notes)),
        host_peak_bytes=recorder.host.peak_bytes,
    )


def _deaths(
    events: Sequence[int], phase_starts: Sequence[tuple[int, Phase]]
) -> dict[int, Phase | None]:
    """The phase in which each allocation is freed."""
    deaths: dict[int, Phase | None] = {}
    starts = iter(phase_starts)
    next_start, next_phase = next(starts, (len(events), None))
    phase: Phase | None = None
    for index, event in enumerate(events):
        while index >= next_start:
            phase = next_phase
            next_start, next_phase = next(starts, (len(events) + 1, None))
        if event < 0:
            deaths[-event - 1] = phase
    return deaths


def _category(
    number: int,
    op: str,
    phase: Phase,
    death: Phase | None,
    parameters: Container[int],
    gradients: set[int],
) -> Category:
    if number in parameters or op == GATHERED:
        return "parameters"
    if op == "cublas workspace":
        return "workspace"
    if number in gradients:
        return "gradients"
    if phase == "input":
        return "inputs"
    if phase in ("step", "build") and death is None:
        return "optimizer"
    if phase == "forward" and death not in ("forward", None):
        return "activations"
    return "temporaries"
