"""What was seen in a turn of several seconds -> what was seen in each of them. Pure.

The driver is asked less often than a run keeps figures: its samples have times of their own, so
they can be put into the seconds that they are of. Where nobody looked at the memory it is unknown.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

PART_S = 1.0
_MOST_PARTS = 60  # after a halt of hours there is nothing to be cut

Seen = tuple[float, int]  # when, and what


@dataclass(frozen=True, slots=True)
class Part:
    """About a second of a turn."""

    began_s: float
    ended_s: float
    used_bytes: list[int] = field(default_factory=list)  # of each look
    percents: list[int] = field(default_factory=list)


def cut(
    began_s: float, ended_s: float, looks: Sequence[Seen], percents: Sequence[Seen]
) -> list[Part]:
    """Equal parts of about a second, at least one.

    >>> [part.used_bytes for part in cut(0.0, 2.0, [(1.01, 5), (2.02, 7)], [])]
    [[5], [7]]
    """
    number = min(round((ended_s - began_s) / PART_S), _MOST_PARTS)
    if number <= 1:
        return [whole(began_s, ended_s, looks, percents)]
    part_s = (ended_s - began_s) / number
    edges = [began_s + place * part_s for place in range(number)] + [ended_s]
    parts = [Part(edges[place], edges[place + 1]) for place in range(number)]
    for at_s, used_bytes in looks:
        # A look stands for the second before it, though it comes a little early or late.
        parts[_place((at_s - began_s) / part_s - 0.5, number)].used_bytes.append(used_bytes)
    for at_s, percent in percents:  # of the time before
        parts[_place((at_s - began_s) / part_s, number)].percents.append(percent)
    return parts


def whole(began_s: float, ended_s: float, looks: Sequence[Seen], percents: Sequence[Seen]) -> Part:
    """All in one, whenever it was."""
    return Part(began_s, ended_s, [used for _, used in looks], [value for _, value in percents])


def _place(end: float, number: int) -> int:
    return min(max(math.ceil(end) - 1, 0), number - 1)


def share(whole: int | None, place: int, number: int) -> int | None:
    """Of what was counted over all parts, that of one: together they are the whole."""
    if whole is None:
        return None
    return whole * (place + 1) // number - whole * place // number
