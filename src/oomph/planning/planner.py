"""Choices, what each takes -> the plan to recommend, the others worth a look, and the rest.

The planner is handed three functions: a lower bound of the memory, the time, and an exact check of
one variant. It knows nothing of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Protocol

from oomph.errors import UsageError
from oomph.planning.choices import Choices, variants
from oomph.planning.search import (
    NEAR_RATIO,
    STABILITIES,
    Candidate,
    Checked,
    find_best,
    find_front,
    unbeaten,
)
from oomph.planning.tricks import Lever, levers_beyond
from oomph.records.plan import Preference, Stability, Trick
from oomph.records.workload import Variant

_STEP_RATIO = 0.85  # of memory, from one plan that is shown to the next


@dataclass(frozen=True, kw_only=True)
class Known:
    """What can be asked of a variant. Bytes are of the device, the CUDA context included."""

    is_known: Callable[[Variant], bool]  # False: it was not possible to rehearse it
    least_bytes: Callable[[Variant], int]
    seconds: Callable[[Variant], float | None]
    check: Callable[[Variant], Checked]
    host_bytes: Callable[[Variant], int] = field(default=lambda _: 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found."""

    best: Variant | None
    best_s: float | None  # its time for one batch, where that is known
    is_certain: bool  # whether the best fits for certain
    shown: tuple[Variant, ...]  # the best first, then others of the front by time
    smallest: Variant  # the one with the least memory, whether it fits or not
    fastest_s: float  # of all with a known time, for one batch, on a GPU of infinite memory
    num_candidates: int
    changing: frozenset[str]  # tricks that change this model's training


def search(
    choices: Choices,
    known: Known,
    limit_bytes: int,
    prefer: Preference = "balance",
    most: int = 6,
    every: Iterable[Variant] | None = None,
) -> Found:
    """Look at every combination, or at those that are given; show at most so many.

    Raises UsageError if none of them could be rehearsed.
    """
    candidates = [
        _candidate(variant, known, choices)
        for variant in (variants(choices) if every is None else every)
        if known.is_known(variant)
    ]
    if not candidates:
        raise UsageError(
            "no way to train can be compared with another",
            because="the model's allocations are no line in the micro-batch",
            attempt="oomph predict with a --micro-batch, for one way at a time",
        )
    checks: dict[int, Checked] = {}

    def check(candidate: Candidate) -> Checked:
        if id(candidate) not in checks:
            checks[id(candidate)] = known.check(candidate.variant)
        return checks[id(candidate)]

    best = find_best(candidates, check, limit_bytes, prefer)
    front = find_front(candidates, check, limit_bytes)
    if best is not None:
        best, front = unbeaten(best, check(best).device_bytes, front)
    return Found(
        best=None if best is None else best.variant,
        best_s=best.step_s if best is not None and isfinite(best.step_s) else None,
        is_certain=best is not None and check(best).fits == "yes",
        shown=tuple(one.variant for one in varied(front, best, most)),
        smallest=min(candidates, key=lambda one: (one.least_bytes, one.step_s)).variant,
        fastest_s=min(one.step_s for one in candidates),
        num_candidates=len(candidates),
        changing=choices.changing,
    )


def varied(
    front: Sequence[tuple[Candidate, Checked]], best: Candidate | None, most: int
) -> list[Candidate]:
    """A front of dozens -> the few that tell most.

    The best, the fastest if it is much faster, the mildest, and steps in memory.
    """
    if best is None:
        return []
    chosen = [best]
    chosen += [one for one, _ in front[:1] if one.step_s * (1 + NEAR_RATIO) < best.step_s]
    mildest = [
        one
        for one, _ in front
        if STABILITIES.index(one.stability) < STABILITIES.index(best.stability)
    ]
    chosen += [one for one in mildest[:1] if one not in chosen]
    last = min((checked.device_bytes for one, checked in front if one is best), default=0)
    for one, checked in front:
        if one not in chosen and (not last or checked.device_bytes <= _STEP_RATIO * last):
            chosen.append(one)
            last = checked.device_bytes
    smallest = min(front, key=lambda pair: pair[1].device_bytes, default=None)
    kept = chosen[:most]
    if most > 1 and smallest is not None and smallest[0] not in kept:
        kept[most - 1 :] = [smallest[0]]
    return [best, *sorted((one for one in kept if one is not best), key=lambda one: one.step_s)]


def _candidate(variant: Variant, known: Known, choices: Choices) -> Candidate:
    levers = levers_beyond(own_of(variant, choices), variant)
    batch_size, seconds = choices.batch_size, known.seconds(variant)
    is_other_batch = variant.batch_size != batch_size
    return Candidate(
        variant=variant,
        stability=max(_kept(variant, choices), key=STABILITIES.index, default="same"),
        num_tricks=len(levers) + is_other_batch,
        num_changes=num_changes(variant, choices),
        num_inexact=num_inexact(variant, choices),
        # What takes nobody knows how long is never the fastest.
        step_s=inf if seconds is None else seconds * batch_size / variant.batch_size,
        least_bytes=known.least_bytes(variant),
        host_bytes=known.host_bytes(variant),
    )


def num_changes(variant: Variant, choices: Choices) -> int:
    """How much of training is changed by it: that many of its tricks had to be allowed."""
    return _kept(variant, choices).count("changes")


def num_inexact(variant: Variant, choices: Choices) -> int:
    """How many of its tricks do not give the very same update."""
    kept = _kept(variant, choices)
    return len(kept) - kept.count("same")


def _kept(variant: Variant, choices: Choices) -> list[Stability]:
    """What each of its tricks keeps of training; another batch is one, too."""
    levers = levers_beyond(own_of(variant, choices), variant)
    kept = [stability_of([lever], choices.changing) for lever in levers]
    is_other = variant.batch_size != choices.batch_size or is_coupled_otherwise(variant, choices)
    return [*kept, "changes"] if is_other else kept


class _AsGiven(Protocol):
    @property
    def own(self) -> frozenset[str]: ...
    @property
    def coupled_micro_batch(self) -> int | None: ...


def own_of(variant: Variant, given: _AsGiven) -> frozenset[str]:
    """What is no trick of a variant, because it was so before."""
    is_split_alike = variant.micro_batch == given.coupled_micro_batch
    return given.own | {"accumulation"} if is_split_alike else given.own


def is_coupled_otherwise(variant: Variant, given: _AsGiven) -> bool:
    """Whether other examples meet in it, though it accumulates no more: 16 x 1 for 8 x 2."""
    own = given.coupled_micro_batch
    return own is not None and variant.micro_batch != own and variant.accumulation == 1


def stability_of(levers: Sequence[Lever], changing: frozenset[str] = frozenset()) -> Stability:
    """The weakest of what the levers keep."""
    kept: list[Stability] = [
        "changes" if lever.name in changing else lever.stability for lever in levers
    ]
    return max(kept, key=STABILITIES.index, default="same")


def tricks_of(
    variant: Variant,
    changing: frozenset[str] = frozenset(),
    own: frozenset[str] = frozenset(),
) -> tuple[Trick, ...]:
    return tuple(
        lever.as_set(variant, "changes" if lever.name in changing else None)
        for lever in levers_beyond(own, variant)
    )
