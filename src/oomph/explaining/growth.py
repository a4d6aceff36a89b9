"""Memory that grows from step to step -> which lines keep it; or what one snapshot has more."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence

from oomph.explaining.holdings import Allocation, Naming
from oomph.records.explanation import Growth, Holder
from oomph.records.snapshot import DeviceSnapshot, Snapshot
from oomph.units import MIB

_LEAST_STEPS = 3  # fewer cannot tell growth from a first step that is still filling up
_LEAST_BYTES = 1 * MIB
_MOST_LINES = 8


def step_ends(snapshot: Snapshot, device: DeviceSnapshot, naming: Naming) -> list[int]:
    """Return the events at which optimizer steps ended.

    torch names them since 2.5. Without names, a step ends where the optimizer's allocations do.
    """
    ends = [
        one.time_us
        for one in snapshot.annotations
        if not one.is_start and one.name.startswith("Optimizer.step")
    ]
    times = device.columns.times_us
    if ends and times and times[-1]:
        return sorted({bisect_left(times, end) for end in ends} - {0})
    found, was_inside = [], False
    for at, (code, stack) in enumerate(
        zip(device.columns.actions, device.columns.stacks, strict=True)
    ):
        if device.action_names[code] == "alloc":
            is_inside = naming.is_of_optimizer(stack)
            if was_inside and not is_inside:
                found.append(at)
            was_inside = is_inside
    return found


def growth_of(
    allocations: Iterable[Allocation], ends: Sequence[int], naming: Naming
) -> list[Growth]:
    """Return what is kept at the end although it was made in earlier steps, by line.

    What the first step makes and keeps is normal: gradients, and the optimizer's state. A line
    counts if it kept something from each of at least two later steps.
    """
    if len(ends) < _LEAST_STEPS:
        return []
    last = ends[-1]
    kept: dict[str, list[tuple[int, int]]] = defaultdict(list)  # line: step, bytes
    for one in allocations:
        is_kept = one.death is None or one.death > last
        step = bisect_right(ends, one.birth)
        # Alive at the end of the step after its own: not this step's activations or gradients.
        if is_kept and 1 <= step < len(ends) - 1:
            kept[naming.line(one.stack)].append((step, one.size_bytes))
    found = []
    num_steps = len(ends) - 2  # in which something could have been kept
    for line, pieces in kept.items():
        steps = {step for step, _ in pieces}
        grown = sum(size for _, size in pieces)
        if len(steps) >= min(2, num_steps) and grown >= _LEAST_BYTES:
            found.append(
                Growth(
                    name=line,
                    grown_bytes=grown,
                    num_blocks=len(pieces),
                    per_step_bytes=grown // num_steps,
                    since_step=min(steps) + 1,
                )
            )
    return sorted(found, key=lambda growth: -growth.grown_bytes)[:_MOST_LINES]


def difference(before: Iterable[Holder], after: Iterable[Holder]) -> list[Growth]:
    """Return the lines that hold more in the later of two snapshots."""
    held = {one.name: one for one in before if one.kind == "line"}
    found = []
    for one in after:
        if one.kind != "line":
            continue
        earlier = held.get(one.name)
        grown = one.size_bytes - (earlier.size_bytes if earlier else 0)
        if grown > 0:
            num = one.num_blocks - (earlier.num_blocks if earlier else 0)
            found.append(
                Growth(
                    name=one.name,
                    grown_bytes=grown,
                    num_blocks=num,
                    per_step_bytes=None,
                    since_step=None,
                )
            )
    return sorted(found, key=lambda growth: -growth.grown_bytes)[:_MOST_LINES]
