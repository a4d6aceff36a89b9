"""Short runs with several batch sizes -> the smallest that trains as well, the largest useful."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence

from oomph.records.check import Confidence
from oomph.records.stability_study import RateRule, StabilityStudy, StudyCell, StudyRun
from oomph.stability.watch import oscillation_of

# Judgement: a twentieth of what was learnt is less than seeds differ by in most short runs.
_TOLERANCE = 0.05
_MOST_OSCILLATION = 3.0  # of held-out losses: healthy runs stay below, broken ones have 7 and more
_FEWEST_STEPS = 50
_CLEAR_RATIO = 5.0  # what was learnt, over what seeds differ by


def judged(
    runs: Sequence[StudyRun],
    *,
    workload: str,
    batch_size: int,
    num_examples: int,
    device: str,
    diverging_rate: float | None,
) -> StabilityStudy:
    """Judge all runs beside those with the workload's own batch size."""
    cells = _cells(runs, batch_size)
    own = next(cell for cell in cells if cell.rule == "as-is")
    start = statistics.fmean(run.losses[0] or 0.0 for run in runs if run.rule == "as-is")
    scales = [run.noise_scale for run in runs if run.rule == "as-is" and run.noise_scale]
    best = {}
    for cell in cells:  # as well as the workload's own; the learning rate by rule goes first
        if cell.trains_as_well and cell.batch_size not in best:
            best[cell.batch_size] = cell
    sizes = sorted({cell.batch_size for cell in cells})
    at = sizes.index(batch_size)
    smaller = list(itertools.takewhile(best.__contains__, reversed(sizes[: at + 1])))
    larger = list(itertools.takewhile(best.__contains__, sizes[at:]))
    confidence, limits = _confidence(runs, own, start)
    return StabilityStudy(
        workload=workload,
        batch_size=batch_size,
        num_examples=num_examples,
        num_seeds=len({run.seed for run in runs}),
        device=device,
        start_loss=start,
        cells=cells,
        runs=tuple(runs),
        diverging_rate=diverging_rate,
        noise_scale=statistics.fmean(scales) if scales else None,
        smallest=best[smaller[-1]] if smaller else None,
        largest=best[larger[-1]] if larger else None,
        confidence=confidence,
        limits=limits,
    )


_ORDER: tuple[RateRule, ...] = ("as-is", "scaled", "kept")


def _cells(runs: Sequence[StudyRun], batch_size: int) -> tuple[StudyCell, ...]:
    groups: dict[tuple[int, RateRule], list[StudyRun]] = {}
    for run in runs:
        groups.setdefault((run.batch_size, run.rule), []).append(run)
    own = groups[(batch_size, "as-is")]
    tolerance, most = 0.0, None
    if (loss := _mean(own)) is not None:
        learnt = statistics.fmean(run.losses[0] or 0.0 for run in own) - loss
        tolerance = max(_spread(own), _TOLERANCE * max(learnt, 0.0))
        most = loss + tolerance
    keys = sorted(groups, key=lambda key: (key[0], _ORDER.index(key[1])))
    return tuple(_cell(groups[key], most) for key in keys)


def _cell(runs: Sequence[StudyRun], most: float | None) -> StudyCell:
    loss, ways = _mean(runs), [_oscillation(run) for run in runs]
    known = [way for way in ways if way is not None]
    way = statistics.fmean(known) if len(known) == len(ways) else None
    is_calm = way is not None and way <= _MOST_OSCILLATION
    first = runs[0]
    return StudyCell(
        batch_size=first.batch_size,
        rule=first.rule,
        learning_rate=first.learning_rate,
        num_steps=first.num_steps,
        loss=loss,
        spread=_spread(runs),
        oscillation=way,
        trains_as_well=loss is not None and most is not None and loss <= most and is_calm,
    )


def _mean(runs: Iterable[StudyRun]) -> float | None:
    losses = [run.loss for run in runs]
    known = [loss for loss in losses if loss is not None]
    return statistics.fmean(known) if len(known) == len(losses) else None


def _spread(runs: Iterable[StudyRun]) -> float:
    known = [run.loss for run in runs if run.loss is not None]
    return max(known) - min(known) if known else 0.0


def _oscillation(run: StudyRun) -> float | None:
    known = [loss for loss in run.losses if loss is not None]
    way = None if run.has_diverged else oscillation_of(known)
    return way if way is not None and way != float("inf") else None


def _confidence(
    runs: Sequence[StudyRun], own: StudyCell, start: float
) -> tuple[Confidence, tuple[str, ...]]:
    limits = []
    seeds = {run.seed for run in runs}
    if len(seeds) < 2:
        limits.append("one seed only: how much runs differ by chance is not known")
    fewest = min(run.num_steps for run in runs)
    if fewest < _FEWEST_STEPS:
        limits.append(f"the largest batch made {fewest} steps only")
    if own.loss is None:
        limits.append("your own batch size and learning rate diverge")
    elif start - own.loss < _CLEAR_RATIO * own.spread:
        limits.append("what was learnt is hardly more than what seeds differ by")
    limits.append("short runs from the start of the training: the useful batch grows later")
    return ("low" if len(limits) > 1 else "fair"), tuple(limits)
