"""What each block keeps and computes -> the sets of blocks that are worth recomputing.

The next block to recompute is the one that frees most bytes for each second of recomputation;
among equals an early one, because what a late block recomputes lies on top of all the others. The
last one is recomputed when all others still lie in memory, or none: it comes last.
"""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_S = 1e-9


def in_order(costs: Sequence[tuple[int, float]]) -> list[int]:
    """The blocks, the best to recompute first."""
    ratios = [saved / max(seconds, _LEAST_S) for saved, seconds in costs]
    highest = max(ratios, default=0) or 1
    # Equal blocks differ by chance in the last digits.
    return sorted(range(len(costs)), key=lambda place: (-round(ratios[place] / highest, 2), place))


def blocks_that_free(wanted_bytes: float, costs: Sequence[tuple[int, float]]) -> list[int]:
    """The first blocks of the order that together free so much."""
    chosen: list[int] = []
    freed = 0
    for place in in_order(costs):
        if freed >= wanted_bytes:
            break
        chosen.append(place)
        freed += costs[place][0]
    return sorted(chosen)
