"""Choices, what each takes -> the plan to recommend, the others worth a look, and the rest.

The planner is handed three functions: a lower bound of the memory, the time, and an exact check of
one variant. It knows nothing of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oomph.planning.choices import Choices, variants
from oomph.planning.search import (
    STABILITIES,
    Candidate,
    Checked,
    find_best,
    find_front,
)
from oomph.planning.tricks import Lever, levers_of
from oomph.records.plan import Preference, Stability, Trick
from oomph.records.workload import Variant


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
    front: tuple[Variant, ...]  # the best first, then by time
    smallest: Variant  # the one with the least memory, whether it fits or not
    fastest_s: float  # of all, on a GPU of infinite memory
    num_candidates: int
    changing: frozenset[str]  # tricks that change this model's training


def search(
    choices: Choices, known: Known, limit_bytes: int, prefer: Preference = "balance"
) -> Found:
    """Look at every combination."""
    changing = _changed_by_part_of_the_batch(choices)
    candidates = [
        _candidate(variant, known, changing)
        for variant in variants(choices)
        if known.is_known(variant)
    ]
    checks: dict[int, Checked] = {}

    def check(candidate: Candidate) -> Checked:
        if id(candidate) not in checks:
            checks[id(candidate)] = known.check(candidate.variant)
        return checks[id(candidate)]

    best = find_best(candidates, check, limit_bytes, prefer)
    front = [one.variant for one, _ in find_front(candidates, check, limit_bytes)]
    chosen = [] if best is None else [best.variant]
    return Found(
        best=None if best is None else best.variant,
        front=(*chosen, *(variant for variant in front if variant not in chosen)),
        smallest=min(candidates, key=lambda one: (one.least_bytes, one.step_s)).variant,
        fastest_s=min(one.step_s for one in candidates),
        num_candidates=len(candidates),
        changing=changing,
    )


def _candidate(variant: Variant, known: Known, changing: frozenset[str]) -> Candidate:
    levers = levers_of(variant)
    return Candidate(
        variant=variant,
        stability=stability_of(levers, changing),
        num_tricks=len(levers),
        step_s=known.seconds(variant) or 0.0,
        least_bytes=known.least_bytes(variant),
        host_bytes=known.host_bytes(variant),
    )


def _changed_by_part_of_the_batch(choices: Choices) -> frozenset[str]:
    """The tricks that change this model's training, though not that of others."""
    return frozenset({"accumulation", "ddp", "fsdp"}) if choices.has_batch_norm else frozenset()


def stability_of(levers: Sequence[Lever], changing: frozenset[str] = frozenset()) -> Stability:
    """The weakest of what the levers keep."""
    kept: list[Stability] = [
        "changes" if lever.name in changing else lever.stability for lever in levers
    ]
    return max(kept, key=STABILITIES.index, default="same")


def tricks_of(variant: Variant, changing: frozenset[str] = frozenset()) -> tuple[Trick, ...]:
    return tuple(
        lever.as_set(variant, "changes" if lever.name in changing else None)
        for lever in levers_of(variant)
    )
