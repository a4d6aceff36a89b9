"""A footprint, a micro-batch -> the Trace that it is the columns of.

For what is shown of a way to train: who holds the peak, where it is, and how memory runs over a
step. Convolutions' workspaces are not in a footprint.
"""

from __future__ import annotations

from oomph.predicting.footprint import CATEGORIES, PHASES, Footprint
from oomph.records.trace import Allocation, Phase, Trace


def trace_at(
    footprint: Footprint,
    micro_batch: int,
    *,
    torch_version: str,
    compute_capability: tuple[int, int],
    notes: tuple[str, ...] = (),
) -> Trace:
    """The trace at a micro-batch."""
    kernels = [kernel.at(micro_batch) for kernel in footprint.kernels]
    return Trace(
        allocations=_allocations(footprint, micro_batch),
        events=footprint.event.tolist(),
        step_starts=[int((footprint.step < number).sum()) for number in (1, 2)],
        phase_starts=phase_starts(footprint),
        ops=[kernels[number] for number in footprint.op.tolist()],
        micro_batch=micro_batch,
        torch_version=torch_version,
        compute_capability=compute_capability,
        notes=notes,
        host_peak_bytes=footprint.host_bytes_at(micro_batch),
    )


def _allocations(footprint: Footprint, micro_batch: int) -> list[Allocation]:
    sizes = (footprint.fixed_bytes + footprint.grown_bytes * micro_batch).tolist()
    columns = (
        footprint.label,
        footprint.module,
        footprint.born,
        footprint.category,
        footprint.stream,
        footprint.is_output,
    )
    return [
        Allocation(
            size_bytes=size,
            op=footprint.names[label],
            module=footprint.names[module],
            phase=PHASES[born],  # type: ignore[arg-type] # they are
            category=CATEGORIES[category],  # type: ignore[arg-type]
            stream=stream,
            is_output=bool(is_output),
        )
        for size, label, module, born, category, stream, is_output in zip(
            sizes, *(column.tolist() for column in columns), strict=True
        )
    ]


def phase_starts(footprint: Footprint) -> list[tuple[int, Phase]]:
    """The event at which each phase begins; before training there are none."""
    import numpy as np

    begins = np.zeros(len(footprint.event), dtype=bool)
    begins[:1] = True
    for column in (footprint.step, footprint.micro_step, footprint.phase):
        begins[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(begins & (footprint.step > 0))
    numbers = footprint.phase[starts].tolist()
    names: list[Phase] = [PHASES[number] for number in numbers]  # type: ignore[misc] # they are
    return list(zip(starts.tolist(), names, strict=True))
