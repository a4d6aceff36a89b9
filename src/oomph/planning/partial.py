"""Where recomputing no block is too much memory and all is too much time: the set in between.

Memory and time of a set are taken as lying between those of none and of all, in proportion to what
its blocks keep and compute. That is a guess, and only says which set is worth a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from oomph.planning.checkpoint_sets import blocks_that_free
from oomph.records.checkpointing import as_text
from oomph.records.workload import Variant

_SAFETY_RATIO = 0.03  # of what blocks keep: freed beyond what is needed


@dataclass(frozen=True, kw_only=True)
class Measures:
    """What is known of variants with no block recomputed and with all."""

    reserved_bytes: Callable[[Variant], int]
    seconds: Callable[[Variant], float | None]
    room_bytes: int  # for what torch reserves, at the worst


def best_partial(
    variants: Iterable[Variant],
    costs: Sequence[tuple[int, float]],
    measures: Measures,
    faster_than_s: float,
) -> Variant | None:
    """Of all variants without recomputation the one that would be fastest with a part of it."""
    # With no block recomputed it is faster than with any: what is slower even so is not looked at.
    hopeful = [v for v in variants if (measures.seconds(v) or faster_than_s) < faster_than_s]
    guesses = [guess for guess in (_guess(v, costs, measures) for v in hopeful) if guess]
    best = min(guesses, key=lambda guess: guess[0], default=None)
    return best[1] if best is not None and best[0] < faster_than_s else None


def _guess(
    none: Variant, costs: Sequence[tuple[int, float]], measures: Measures
) -> tuple[float, Variant] | None:
    """The seconds of the smallest set that fits, and the variant with it."""
    every = replace(none, checkpointing="blocks")
    most, least = measures.reserved_bytes(none), measures.reserved_bytes(every)
    fastest, slowest = measures.seconds(none), measures.seconds(every)
    if not least <= measures.room_bytes < most or fastest is None or slowest is None:
        return None
    share = (most - measures.room_bytes) / (most - least) + _SAFETY_RATIO
    whole = sum(saved for saved, _ in costs)
    chosen = blocks_that_free(share * whole, costs)
    if len(chosen) >= len(costs):
        return None
    recomputed = sum(costs[place][1] for place in chosen) / sum(s for _, s in costs)
    seconds = fastest + recomputed * (slowest - fastest)
    return seconds, replace(none, checkpointing=as_text(chosen, len(costs)))
