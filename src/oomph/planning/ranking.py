"""Choices and estimates -> the plan to recommend, and the alternatives worth showing.

The search is exhaustive. The time, the GPUs and a lower bound of the memory of each candidate are
known at once. The exact memory needs a replay, which runs only if the bound leaves the verdict
open. A candidate is skipped only if it provably cannot fit, or if another one beats it whatever its
replay would say.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, isfinite, sqrt
from typing import Any, Protocol

from oomph.errors import UsageError
from oomph.planning.choices import Choices, variants
from oomph.predicting.speed import RATIO_OFF
from oomph.records.plan import Preference, Stability, Trick
from oomph.records.prediction import Verdict
from oomph.records.workload import Variant, as_text
from oomph.tricks import batch_size
from oomph.tricks.definition import Definition, Severity
from oomph.tricks.trick import tricks_beyond

STABILITIES: tuple[Stability, ...] = ("same", "rounding", "changes")
# Two plans whose times differ by less than this count as equally fast: predictions of two steps of
# one model err together, and their ratio is off by no more than this.
NEAR_RATIO = RATIO_OFF
# A plan gets a line of its own only if it needs this much less memory, or is faster. Judgement.
WORTH_MEMORY_RATIO = 0.10
MOST_SHOWN = 5  # plans, so that the table reads at a glance; judgement
_STEP_RATIO = 0.85  # of memory, from one shown plan to the next; judgement
# Extra memory to free, as a share of what the blocks save, because the guess is about this
# accurate. Judgement.
_SAFETY_RATIO = 0.03
_MOST_REPLAYED = 16  # candidates, to find the smallest of all; judgement: about a second
_LEAST_S = 1e-9  # no block takes less than a nanosecond, so a ratio to it stays finite


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A variant, with what is known of it before a replay."""

    variant: Variant
    stability: Stability
    num_tricks: int  # beyond those the workload already uses
    step_s: float
    least_bytes: int  # lower bound on the device
    host_bytes: int = 0
    # Of each trick that changes training, all allowed by the user; the most severe first.
    changes: tuple[Severity, ...] = ()
    num_inexact: int = 0  # tricks that change training or round
    is_split: bool = False  # accumulation is one of its tricks

    @property
    def is_over_bus(self) -> bool:
        """Return whether its time depends on the bus between GPU and host."""
        variant = self.variant
        of_optimizer = variant.offload_optimizer or variant.zero_offload
        return of_optimizer or variant.offload_activations


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """The result of a candidate's replay."""

    device_bytes: int
    fits: Verdict


Check = Callable[[Candidate], Checked]
# A candidate's time at each pace that host and bus may have: the same paces for all candidates.
Times = Callable[[Candidate], Sequence[float]]


def at_one_pace(one: Candidate) -> Sequence[float]:
    """Return the likely time alone."""
    return (one.step_s,)


class Estimator(Protocol):
    """Memory and time of variants. Bytes are on the device and include the CUDA context."""

    def knows(self, variant: Variant) -> bool: ...  # False if it could not be rehearsed
    def seconds(self, variant: Variant) -> float | None: ...
    def paced_seconds(self, variant: Variant) -> Sequence[float]: ...  # empty if unknown
    def host_bytes(self, variant: Variant) -> int: ...
    def has_host_for(self, variant: Variant) -> bool: ...
    def least_bytes(self, variant: Variant) -> int: ...  # a lower bound
    def reserved_bytes(self, variant: Variant) -> int: ...  # by torch's allocator
    def check(self, variant: Variant) -> Checked: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The result of a search."""

    choices: Choices
    compared: Sequence[Variant]  # including those that could not be rehearsed
    num_skipped: int = 0  # variants that only save memory and were not rehearsed
    best: Variant | None
    best_s: float | None  # its time for one batch; None if unknown
    is_certain: bool  # the best certainly fits
    shown: tuple[Variant, ...]  # the best, then the rest of the front, fastest first
    smallest: Variant  # the variant with the least memory, even if it does not fit
    fastest_s: float  # the best known time for one batch if memory were infinite
    num_candidates: int
    front: tuple[Variant, ...] = ()  # all that fit and that no other beats, also those not shown


def search(
    choices: Choices,
    estimates: Estimator,
    limit_bytes: int,
    prefer: Preference = "balance",
    most: int = MOST_SHOWN,
    compared: Sequence[Variant] | None = None,
    why_none: str = "none of them could be rehearsed",
) -> Found:
    """Compare all variants, or the given ones, and choose at most `most` to show.

    Raises UsageError if nothing is known of any of them, because of `why_none`.
    """
    compared = list(variants(choices)) if compared is None else compared
    known = [one for one in compared if estimates.knows(one) and estimates.has_host_for(one)]
    candidates = [candidate_of(one, estimates, choices) for one in known]
    if not candidates:
        raise UsageError(
            "there are no two variants to compare",
            because=why_none,
            attempt="oomph predict --micro-batch N, for one variant at a time",
        )
    checks: dict[int, Checked] = {}

    def check(candidate: Candidate) -> Checked:
        if id(candidate) not in checks:
            checks[id(candidate)] = estimates.check(candidate.variant)
        return checks[id(candidate)]

    times = times_of(estimates, choices)
    best = find_best(candidates, check, limit_bytes, prefer, times)
    front = find_front(candidates, check, limit_bytes)
    if best is not None:
        best, front = unbeaten(best, check(best).device_bytes, front, times)
    return Found(
        choices=choices,
        compared=compared,
        best=None if best is None else best.variant,
        best_s=best.step_s if best is not None and isfinite(best.step_s) else None,
        is_certain=best is not None and check(best).fits == "yes",
        shown=tuple(
            one.variant for one in varied(front, best, most, _on_all_gpus(front, best, times))
        ),
        smallest=_nearest(candidates, estimates).variant,
        fastest_s=min(one.step_s for one in candidates),
        num_candidates=len(candidates),
        front=tuple(one.variant for one, _ in front),
    )


def _nearest(candidates: Sequence[Candidate], estimates: Estimator) -> Candidate:
    """Return the one that needs least, also if it does not fit.

    Only a replay shows what the allocator takes beyond the live bytes, so those with the fewest
    live bytes are replayed.
    """
    ordered = sorted(candidates, key=lambda one: (one.least_bytes, one.step_s))[:_MOST_REPLAYED]
    return min(ordered, key=lambda one: (estimates.reserved_bytes(one.variant), one.step_s))


def times_of(estimates: Estimator, choices: Choices) -> Times:
    """Return what gives each candidate's times for the whole batch; infinite if unknown."""

    @functools.cache
    def paced(variant: Variant) -> Sequence[float]:
        ratio = choices.batch_size / variant.batch_size
        return [seconds * ratio for seconds in estimates.paced_seconds(variant)] or [inf]

    return lambda candidate: paced(candidate.variant)


def find_best(
    candidates: Iterable[Candidate],
    check: Check,
    limit_bytes: int,
    prefer: Preference = "balance",
    times: Times = at_one_pace,
) -> Candidate | None:
    """Return the candidate to recommend. An uncertain one is taken only if none surely fits.

    The mildest changes to training always come first, whatever the user prefers: a change is
    allowed only in case it is needed. The most severe change of a candidate counts first, then its
    next one, so none comes before any, and one before the same and another.
    """
    possible = [one for one in candidates if one.least_bytes <= limit_bytes]
    possible.sort(key=_changes)
    for accepted in (("yes",), ("yes", "uncertain")):
        for _, alike in groupby(possible, key=_changes):
            best = _CHOOSERS[prefer](list(alike), check, accepted, times)
            if best is not None:
                return best
    return None


def unbeaten(
    best: Candidate,
    best_bytes: int,
    front: Sequence[tuple[Candidate, Checked]],
    times: Times = at_one_pace,
) -> tuple[Candidate, list[tuple[Candidate, Checked]]]:
    """Return the candidate to recommend and the front without those that beat it.

    A plan of the front replaces the best if it is worse on no axis and clearly better in time or
    memory, even if it needs more exact tricks: their number was the only reason to prefer the best.
    Plans that are only slightly better are dropped from the front. A best plan without tricks is
    never replaced, and keeps the whole front.
    """
    beating = [one for one in front if _beats(*one, best, best_bytes)]
    clearly = [one for one in beating if _is_clear(*one, best, best_bytes, times)]
    if clearly and best.num_tricks:
        better, checked = min(clearly, key=lambda one: _by_mildness(one[0]))
        return unbeaten(better, checked.device_bytes, front, times)
    kept = front if not best.num_tricks else [one for one in front if one not in beating]
    return best, list(kept)


def _beats(plan: Candidate, checked: Checked, best: Candidate, best_bytes: int) -> bool:
    """Return whether the plan is worse on no axis and better on at least one."""
    mine = (*_costs(plan), checked.device_bytes)
    its = (*_costs(best), best_bytes)
    return mine != its and all(one <= other for one, other in zip(mine, its, strict=True))


def _costs(one: Candidate) -> tuple[Any, ...]:
    stability = STABILITIES.index(one.stability)
    exactness = one.changes, one.num_inexact, stability
    return (*exactness, one.variant.num_gpus, one.is_over_bus, one.host_bytes, one.step_s)


def _is_clear(
    plan: Candidate, checked: Checked, best: Candidate, best_bytes: int, times: Times
) -> bool:
    is_smaller = checked.device_bytes * (1 + WORTH_MEMORY_RATIO) < best_bytes
    return is_smaller or is_slower(best, plan, times)


def is_slower(one: Candidate, other: Candidate, times: Times = at_one_pace) -> bool:
    """Return whether one plan is slower than another, and not just as fast for all we know.

    Both run the same model on the same machine, so most of what is unknown is the same for both and
    cancels in the ratio of their times: kernels that are slower than predicted slow down both. What
    does not cancel is the pace of the host and of the bus, on which one plan may depend more than
    the other. They have the same pace in both plans, so the ratio is taken at each pace, and the
    middle of its range decides. A ratio within NEAR_RATIO of 1 is none.
    """
    mine, its = times(one), times(other)
    if not all(map(isfinite, its)):  # an unknown time is never the faster one
        return False
    if not all(map(isfinite, mine)):
        return True
    ratios = [a / max(b, _LEAST_S) for a, b in zip(mine, its, strict=True)]
    return sqrt(min(ratios) * max(ratios)) > 1 + NEAR_RATIO


def find_front(
    candidates: Iterable[Candidate], check: Check, limit_bytes: int
) -> list[tuple[Candidate, Checked]]:
    """Return all that fit and that no other beats, small differences aside; fastest first."""
    front: list[tuple[Candidate, Checked]] = []
    possible = [one for one in candidates if one.least_bytes <= limit_bytes]
    for candidate in sorted(possible, key=_by_time):
        if _is_beaten(front, candidate, candidate.least_bytes):
            continue  # beaten whatever its replay would say
        checked = check(candidate)
        if checked.fits == "yes" and not _is_beaten(front, candidate, checked.device_bytes):
            front.append((candidate, checked))
    return front


# ---- the best plan -------------------------------------------------------------------------------


def _fewest_gpus(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict], times: Times
) -> Candidate | None:
    """Return the fastest on the fewest GPUs, or one nearly as fast that changes less."""
    ordered = sorted(candidates, key=lambda one: one.variant.num_gpus)
    for _, group in groupby(ordered, key=lambda one: one.variant.num_gpus):
        best = _nearly_fastest(list(group), check, accepted, times)
        if best is not None:
            return best
    return None


def _nearly_fastest(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict], times: Times
) -> Candidate | None:
    """Return the mildest of those that are as fast as the fastest."""
    fastest = _first_that_fits(sorted(candidates, key=_by_time), check, accepted)
    if fastest is None:
        return None
    mildest = sorted(candidates, key=_by_mildness)
    as_fast = (one for one in mildest if not is_slower(one, fastest, times))
    return _first_that_fits(as_fast, check, accepted)


def _smallest(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict], _: Times
) -> Candidate | None:
    """Return the one with the least memory, trying by lower bound until none can be smaller."""
    best: tuple[tuple[float, ...], Candidate] | None = None
    for candidate in sorted(candidates, key=lambda one: (one.least_bytes, *_by_time(one))):
        if best is not None and candidate.least_bytes > best[0][0]:
            break
        checked = check(candidate)
        key = (float(checked.device_bytes), *_by_time(candidate))
        if checked.fits in accepted and (best is None or key < best[0]):
            best = key, candidate
    return None if best is None else best[1]


def _least_resources(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict], _: Times
) -> Candidate | None:
    """Return the one with the fewest GPUs, then the least host memory, then the shortest step."""
    ordered = sorted(
        candidates, key=lambda one: (one.variant.num_gpus, one.host_bytes, *_by_time(one))
    )
    return _first_that_fits(ordered, check, accepted)


_CHOOSERS = {
    "balance": _fewest_gpus,
    "time": _nearly_fastest,
    "memory": _smallest,
    "resources": _least_resources,
}


def _first_that_fits(
    ordered: Iterable[Candidate], check: Check, accepted: Sequence[Verdict]
) -> Candidate | None:
    return next((one for one in ordered if check(one).fits in accepted), None)


# ---- orders --------------------------------------------------------------------------------------


def _changes(one: Candidate) -> tuple[Severity, ...]:
    return one.changes


def _by_time(one: Candidate) -> tuple[float, ...]:
    return (one.step_s, *_mildness(one), one.least_bytes)


def _by_mildness(one: Candidate) -> tuple[float, ...]:
    return (*_mildness(one), one.step_s, one.least_bytes)


def _mildness(one: Candidate) -> tuple[float, ...]:
    """Return the order among plans that are equally fast, the best first.

    Exact updates come before rounded ones. Traffic over the bus comes after anything that avoids
    it: its pace is the least certain, and it needs host memory. Splitting the batch is no trick
    of its own here, and decides only where nothing else does.
    """
    return (
        STABILITIES.index(one.stability),
        one.is_over_bus,
        one.num_tricks - one.is_split,
        one.num_inexact,
        one.host_bytes,
        one.is_split,
    )


def _is_beaten(
    front: Iterable[tuple[Candidate, Checked]], candidate: Candidate, device_bytes: int
) -> bool:
    """Return whether a plan of the front is as good on every axis, or nearly.

    Candidates come fastest first, so every plan of the front is as fast.
    """
    near_bytes = device_bytes * (1 + WORTH_MEMORY_RATIO)
    return any(
        checked.device_bytes <= near_bytes and _is_no_dearer(plan, candidate)
        for plan, checked in front
    )


def _is_no_dearer(plan: Candidate, candidate: Candidate) -> bool:
    return (
        plan.changes <= candidate.changes
        and STABILITIES.index(plan.stability) <= STABILITIES.index(candidate.stability)
        and plan.variant.num_gpus <= candidate.variant.num_gpus
        and plan.host_bytes <= candidate.host_bytes
    )


# ---- the plans to show ---------------------------------------------------------------------------


def _on_all_gpus(
    front: Sequence[tuple[Candidate, Checked]], best: Candidate | None, times: Times
) -> Candidate | None:
    """Return the plan of the front to take for all GPUs, if they are more than recommended."""
    most = max((one.variant.num_gpus for one, _ in front), default=0)
    if best is None or most <= best.variant.num_gpus:
        return None
    mildest = min((one.changes for one, _ in front if one.variant.num_gpus == most))
    checks = {id(one): checked for one, checked in front}
    on_all = [o for o, _ in front if o.variant.num_gpus == most and o.changes == mildest]
    return _nearly_fastest(on_all, lambda one: checks[id(one)], ("yes",), times)


def varied(
    front: Sequence[tuple[Candidate, Checked]],
    best: Candidate | None,
    most: int = MOST_SHOWN,
    on_all_gpus: Candidate | None = None,
) -> list[Candidate]:
    """A front of dozens -> the few most informative plans.

    These are the best, the one for all GPUs, the fastest if it is much faster, the mildest, and
    plans at steps in memory.
    """
    if best is None:
        return []
    chosen = [best]
    chosen += [] if on_all_gpus is None else [on_all_gpus]
    fastest = [one for one, _ in front[:1] if one.step_s * (1 + NEAR_RATIO) < chosen[-1].step_s]
    chosen += [one for one in fastest if one not in chosen]
    mildest = [one for one, _ in front if _exactness(one) < _exactness(best)]
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


def _exactness(one: Candidate) -> tuple[tuple[Severity, ...], int]:
    return one.changes, STABILITIES.index(one.stability)


def candidate_of(variant: Variant, estimates: Estimator, choices: Choices) -> Candidate:
    """Return a variant with what is known of it before a replay."""
    seconds = estimates.seconds(variant)
    kept = stabilities_in(variant, choices)
    is_other_batch = variant.batch_size != choices.batch_size
    tricks = tricks_beyond(own_of(variant, choices), variant)
    return Candidate(
        variant=variant,
        stability=_weakest(kept),
        num_tricks=len(tricks) + is_other_batch,
        is_split=any(trick.name == "accumulation" for trick in tricks),
        changes=changes_in(variant, choices),
        num_inexact=len(kept) - kept.count("same"),
        # An unknown time never counts as the fastest.
        step_s=inf if seconds is None else seconds * choices.batch_size / variant.batch_size,
        least_bytes=estimates.least_bytes(variant),
        host_bytes=estimates.host_bytes(variant),
    )


# ---- how tricks affect training ------------------------------------------------------------------


def changes_in(variant: Variant, choices: Choices) -> tuple[Severity, ...]:
    """Return how severe each of the variant's changes to training is, the most severe first."""
    tricks = tricks_beyond(own_of(variant, choices), variant)
    found = [severity_of(trick) for trick in tricks if _is_change(trick, choices)]
    if _sees_other_examples(variant, choices):
        found.append(batch_size.SEVERITY)
    return tuple(sorted(found, reverse=True))


def severity_of(trick: Definition) -> Severity:
    """Return how severe a trick is where it changes training."""
    return Severity.BATCH if trick.splits_batch else trick.severity


def _is_change(trick: Definition, choices: Choices) -> bool:
    return stability_of([trick], choices.changing) == "changes"


def stability_in(variant: Variant, choices: Choices) -> Stability:
    """Return how closely the variant's training matches the original."""
    return _weakest(stabilities_in(variant, choices))


def stabilities_in(variant: Variant, choices: Choices) -> list[Stability]:
    """Return the stability of each trick of the variant, and of a different batch size."""
    tricks = tricks_beyond(own_of(variant, choices), variant)
    kept = [stability_of([trick], choices.changing) for trick in tricks]
    return [*kept, "changes"] if _sees_other_examples(variant, choices) else kept


def own_of(variant: Variant, choices: Choices) -> frozenset[str]:
    """Return the tricks that do not count because the workload already uses them."""
    is_split_alike = variant.micro_batch == choices.coupled_micro_batch
    return choices.own | {"accumulation"} if is_split_alike else choices.own


def _sees_other_examples(variant: Variant, choices: Choices) -> bool:
    """Return whether updates see another batch, or group coupled examples differently.

    Without accumulation, 16 x 1 for 8 x 2, no trick of the variant says so.
    """
    own = choices.coupled_micro_batch
    is_regrouped = own is not None and variant.micro_batch != own and variant.accumulation == 1
    return variant.batch_size != choices.batch_size or is_regrouped


def stability_of(tricks: Sequence[Definition], changing: frozenset[str] = frozenset()) -> Stability:
    """Return the weakest stability of these tricks."""
    return _weakest(["changes" if trick.name in changing else trick.stability for trick in tricks])


def _weakest(stabilities: Sequence[Stability]) -> Stability:
    return max(stabilities, key=STABILITIES.index, default="same")


def tricks_of(
    variant: Variant,
    changing: frozenset[str] = frozenset(),
    own: frozenset[str] = frozenset(),
) -> tuple[Trick, ...]:
    return tuple(
        trick.as_set(variant, "changes" if trick.name in changing else None)
        for trick in tricks_beyond(own, variant)
    )


# ---- which blocks to recompute -------------------------------------------------------------------
# The next block to recompute is the one that frees most bytes per second of recomputation. Among
# equals an early block comes first, because the memory to recompute a late block comes on top of
# what all the others save. The last block is recomputed while the activations of all others are
# still in memory, or while none are, so it comes last.


def in_order(costs: Sequence[tuple[int, float]]) -> list[int]:
    """Return the blocks, the best to recompute first."""
    ratios = [saved / max(seconds, _LEAST_S) for saved, seconds in costs]
    highest = max(ratios, default=0) or 1
    # Equal blocks differ in the last digits.
    return sorted(range(len(costs)), key=lambda place: (-round(ratios[place] / highest, 2), place))


def blocks_that_free(wanted_bytes: float, costs: Sequence[tuple[int, float]]) -> list[int]:
    """Return the first blocks in this order that together free `wanted_bytes`."""
    chosen: list[int] = []
    freed = 0
    for place in in_order(costs):
        if freed >= wanted_bytes:
            break
        chosen.append(place)
        freed += costs[place][0]
    return sorted(chosen)


def best_partial(
    variants: Iterable[Variant],
    costs: Sequence[tuple[int, float]],
    estimates: Estimator,
    room_bytes: int,
    faster_than_s: float,
) -> Variant | None:
    """Return the variant that would be fastest with some of its blocks recomputed.

    The given variants recompute no block and need too much memory; recomputing all blocks takes too
    much time. `room_bytes` is what torch may reserve in the worst case.
    """
    # Recomputing no block is fastest. A variant that is too slow even then is skipped.
    hopeful = [v for v in variants if (estimates.seconds(v) or faster_than_s) < faster_than_s]
    guesses = [guess for v in hopeful if (guess := _guess(v, costs, estimates, room_bytes))]
    best = min(guesses, key=lambda guess: guess[0], default=None)
    return best[1] if best is not None and best[0] < faster_than_s else None


def _guess(
    none: Variant, costs: Sequence[tuple[int, float]], estimates: Estimator, room_bytes: int
) -> tuple[float, Variant] | None:
    """Return the time of the smallest set of blocks that fits, and the variant with it.

    Memory and time are interpolated between no block and all blocks, in proportion to what the
    chosen blocks save and compute. The guess only decides which set is worth a rehearsal.
    """
    every = replace(none, checkpointing="blocks")
    most, least = estimates.reserved_bytes(none), estimates.reserved_bytes(every)
    fastest, slowest = estimates.seconds(none), estimates.seconds(every)
    if not least <= room_bytes < most or fastest is None or slowest is None:
        return None
    share = (most - room_bytes) / (most - least) + _SAFETY_RATIO
    chosen = blocks_that_free(share * sum(saved for saved, _ in costs), costs)
    if len(chosen) >= len(costs):
        return None
    recomputed = sum(costs[place][1] for place in chosen) / sum(s for _, s in costs)
    seconds = fastest + recomputed * (slowest - fastest)
    return seconds, replace(none, checkpointing=as_text(chosen, len(costs)))
