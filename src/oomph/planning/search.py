"""Candidates, a way to check one exactly -> the best, and the front of all that nothing beats.

Nothing is left out by chance. Of each candidate the time, the GPUs and a lower bound of its memory
are known at once; the exact memory is a replay, and is asked for only where the bound leaves it
open. What is skipped is proven: it cannot fit, or another beats it whatever its replay would say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from oomph.records.plan import Preference, Stability
from oomph.records.prediction import Verdict
from oomph.records.workload import Variant

STABILITIES: tuple[Stability, ...] = ("same", "rounding", "changes")
# So much slower may be what changes less and needs fewer tricks. Judgement: the estimates of time
# are no better than that.
NEAR_RATIO = 0.05
# What is less than this better in time and in memory is not worth a line of its own. Judgement.
WORTH_TIME_RATIO, WORTH_MEMORY_RATIO = 0.03, 0.10


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One way to train, with what is known of it before it is replayed."""

    variant: Variant
    stability: Stability
    num_tricks: int  # how far it is from the workload as it was given
    step_s: float
    least_bytes: int  # on the device: never more than the truth
    host_bytes: int = 0
    num_changes: int = 0  # of its tricks: those that change training, and were allowed
    num_inexact: int = 0  # of its tricks: those, and the ones that round


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """What a replay of a candidate says."""

    device_bytes: int
    fits: Verdict


Check = Callable[[Candidate], Checked]


def find_best(
    candidates: Iterable[Candidate],
    check: Check,
    limit_bytes: int,
    prefer: Preference = "balance",
) -> Candidate | None:
    """The one to recommend; one that may or may not fit only where none does for certain.

    What changes training is allowed for where it is needed: with fewer of such changes comes
    first, whatever is preferred.
    """
    possible = [one for one in candidates if one.least_bytes <= limit_bytes]
    possible.sort(key=_changes)
    for accepted in (("yes",), ("yes", "uncertain")):
        for _, alike in groupby(possible, key=_changes):
            best = _CHOOSERS[prefer](list(alike), check, accepted)
            if best is not None:
                return best
    return None


def unbeaten(
    best: Candidate, best_bytes: int, front: Sequence[tuple[Candidate, Checked]]
) -> tuple[Candidate, list[tuple[Candidate, Checked]]]:
    """The one to recommend, or what of the front beats it; and the front without what still does.

    What is worse in nothing and clearly better in time or memory takes its place, though it needs
    more tricks that are exact: that was the reason to prefer the other. It must not be a plan that
    needs none. What is hardly better is not worth a line.
    """
    beating = [one for one in front if _beats(*one, best, best_bytes)]
    clearly = [one for one in beating if _is_clear(*one, best, best_bytes)]
    if clearly and best.num_tricks:
        better, checked = min(clearly, key=lambda one: _by_mildness(one[0]))
        return unbeaten(better, checked.device_bytes, front)
    kept = front if not best.num_tricks else [one for one in front if one not in beating]
    return best, list(kept)


def _beats(plan: Candidate, checked: Checked, best: Candidate, best_bytes: int) -> bool:
    """Worse on no axis, and better on one."""
    mine = (*_costs(plan), checked.device_bytes)
    its = (*_costs(best), best_bytes)
    return mine != its and all(one <= other for one, other in zip(mine, its, strict=True))


def _costs(one: Candidate) -> tuple[float, ...]:
    stability = STABILITIES.index(one.stability)
    exactness = one.num_changes, one.num_inexact, stability
    return (*exactness, one.variant.num_gpus, one.host_bytes, one.step_s)


def _is_clear(plan: Candidate, checked: Checked, best: Candidate, best_bytes: int) -> bool:
    is_faster = plan.step_s * (1 + WORTH_TIME_RATIO) < best.step_s
    return is_faster or checked.device_bytes * (1 + WORTH_MEMORY_RATIO) < best_bytes


def find_front(
    candidates: Iterable[Candidate], check: Check, limit_bytes: int
) -> list[tuple[Candidate, Checked]]:
    """All that fit and that no other beats on every axis by more than a trifle; fastest first."""
    front: list[tuple[Candidate, Checked]] = []
    possible = [one for one in candidates if one.least_bytes <= limit_bytes]
    for candidate in sorted(possible, key=_by_time):
        if _is_beaten(front, candidate, candidate.least_bytes):
            continue  # whatever its replay would say
        checked = check(candidate)
        if checked.fits == "yes" and not _is_beaten(front, candidate, checked.device_bytes):
            front.append((candidate, checked))
    return front


# ---- which one is the best -----------------------------------------------------------------------


def _fewest_gpus(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict]
) -> Candidate | None:
    """On as few GPUs as will do: the fastest, or what is nearly as fast and changes less."""
    ordered = sorted(candidates, key=lambda one: one.variant.num_gpus)
    for _, group in groupby(ordered, key=lambda one: one.variant.num_gpus):
        best = _nearly_fastest(list(group), check, accepted)
        if best is not None:
            return best
    return None


def _nearly_fastest(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict]
) -> Candidate | None:
    fastest = _first_that_fits(sorted(candidates, key=_by_time), check, accepted)
    if fastest is None:
        return None
    near_s = fastest.step_s * (1 + NEAR_RATIO)
    near = sorted((one for one in candidates if one.step_s <= near_s), key=_by_mildness)
    return _first_that_fits(near, check, accepted)


def _smallest(
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict]
) -> Candidate | None:
    """The least memory: candidates by their bounds, until no bound is below the best found."""
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
    candidates: Sequence[Candidate], check: Check, accepted: Sequence[Verdict]
) -> Candidate | None:
    """The fewest GPUs, then the least of the host's memory, then the fastest."""
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


def _changes(one: Candidate) -> int:
    return one.num_changes


def _by_time(one: Candidate) -> tuple[float, ...]:
    return (one.step_s, *_by_mildness(one)[:2], one.least_bytes)


def _by_mildness(one: Candidate) -> tuple[float, ...]:
    return (STABILITIES.index(one.stability), one.num_tricks, one.step_s, one.least_bytes)


def _is_beaten(
    front: Iterable[tuple[Candidate, Checked]], candidate: Candidate, device_bytes: int
) -> bool:
    """Whether a plan of the front is as good as a candidate on every axis, or nearly."""
    near_s = candidate.step_s * (1 + WORTH_TIME_RATIO)
    near_bytes = device_bytes * (1 + WORTH_MEMORY_RATIO)
    return any(
        plan.step_s <= near_s
        and checked.device_bytes <= near_bytes
        and _is_no_dearer(plan, candidate)
        for plan, checked in front
    )


def _is_no_dearer(plan: Candidate, candidate: Candidate) -> bool:
    return (
        plan.num_changes <= candidate.num_changes
        and STABILITIES.index(plan.stability) <= STABILITIES.index(candidate.stability)
        and plan.variant.num_gpus <= candidate.variant.num_gpus
        and plan.host_bytes <= candidate.host_bytes
    )
