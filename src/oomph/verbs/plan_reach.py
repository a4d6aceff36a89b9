"""A plan -> how many examples fit by it at a time: what whoever trains by it begins with."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from oomph.predicting.ways import Ways
    from oomph.records.plan import Plan, Reach
    from oomph.verbs.plan_figures import Figures

# Of replays that only tell how far pieces may grow: some 0.03 s of CPU for each plan.
_MOST_EVENTS = 10_000


def reach_of(plan: Plan, figures: Figures) -> Reach | None:
    """None where nobody can tell."""
    from oomph.records.plan import Reach

    several = replace(plan.variant, micro_batch=max(plan.micro_batch, 2))  # one is no line
    if figures.lines.points or not figures.lines.knows(several) or plan.prediction.doubt:
        return None
    ways = figures.lines.of(several)
    worst, best = _rooms(plan, figures, ways)
    if plan.fits != "yes" and not ways.passes(plan.variant, worst):
        return None
    num_replays = _num_replays(plan, len(ways.footprint(several).event))
    fit, _ = ways.boundary(several, worst, plan.micro_batch, num_replays)
    _, too_many = ways.boundary(several, best, fit, num_replays)
    if not math.isfinite(too_many):
        return None
    if num_replays:
        fit = max([fit, *_sizes_that_pass(plan, ways, (fit, too_many), worst)])
    return Reach(fit=fit, too_many=too_many, elements=figures.rehearsed.example_elements)


def _rooms(plan: Plan, figures: Figures, ways: Ways) -> tuple[int, int]:
    """For what a line says that torch reserves: at the worst of what is unknown, and at the best.

    What the plan's own prediction has beyond its line is kept free: workspaces, for one.
    """
    from oomph.predicting.assembly import room_for_figures

    outside = figures.outside_of(plan.variant)
    worst, best = room_for_figures(plan.variant, figures.card, outside)
    predicted_bytes = max(plan.prediction.reserved_bytes, 1)
    return int(worst * min(ways.reserved_bytes(plan.variant) / predicted_bytes, 1)), best


def _num_replays(plan: Plan, num_events: int) -> int:
    """None where all of the batch fits at once, nor of what takes long: there is measuring, too."""
    return 0 if plan.accumulate == 1 else _MOST_EVENTS // num_events


def _sizes_that_pass(
    plan: Plan, ways: Ways, between: tuple[float, float], limit_bytes: int
) -> Iterator[int]:
    """Of those that divide the batch: what is between two replays may pass by itself."""
    share = plan.batch_size // plan.gpus
    for size in range(math.floor(between[0]) + 1, min(math.ceil(between[1]), share)):
        variant = replace(plan.variant, micro_batch=size)
        if share % size == 0 and ways.passes(variant, limit_bytes):
            yield size
