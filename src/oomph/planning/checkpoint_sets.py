"""What each block keeps and computes -> the sets of blocks that are worth recomputing.

The next block to recompute is the one that frees most bytes for each second of recomputation;
among equals an early one, because what a late block recomputes lies on top of all the others. The
last one is recomputed when all others still lie in memory, or none: it comes last.
"""

from __future__ import annotations

from collections.abc import Sequence

from oomph.records.checkpointing import as_text

# Of all that the blocks keep: so much is freed by the sets that are rehearsed.
_SHARES = (0.25, 0.5, 0.75)
_LEAST_S = 1e-9


def in_order(costs: Sequence[tuple[int, float]]) -> list[int]:
    """The blocks, the best to recompute first."""
    ratios = [saved / max(seconds, _LEAST_S) for saved, seconds in costs]
    highest = max(ratios, default=0) or 1
    # Equal blocks differ by chance in the last digits.
    return sorted(range(len(costs)), key=lambda place: (-round(ratios[place] / highest, 2), place))


def sets_of_blocks(costs: Sequence[tuple[int, float]]) -> list[str]:
    """Sets that free about a quarter, a half, three quarters and all of what blocks keep."""
    whole = sum(saved for saved, _ in costs)
    found = []
    for share in _SHARES:
        chosen = blocks_that_free(share * whole, costs)
        if 0 < len(chosen) < len(costs):
            found.append(as_text(chosen, len(costs)))
    return [*dict.fromkeys(found), "blocks"] if costs else []


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
