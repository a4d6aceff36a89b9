"""Stretches of a run -> those that a report lists: a run of weeks has thousands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count
from typing import Protocol, TypeVar

MOST_LISTED = 200


class Lasting(Protocol):
    @property
    def began_s(self) -> float: ...
    @property
    def ended_s(self) -> float: ...


Stretch = TypeVar("Stretch", bound=Lasting)


def longest(stretches: Sequence[Stretch]) -> tuple[Stretch, ...]:
    """By time."""
    return longest_of_each(stretches, lambda _: "")


def longest_of_each(
    stretches: Sequence[Stretch], name: Callable[[Stretch], str]
) -> tuple[Stretch, ...]:
    """The same, of each name alike: many long ones of one do not hide those of another."""
    places: dict[str, count[int]] = {}
    ranked = [
        (next(places.setdefault(name(one), count())), one)
        for one in sorted(stretches, key=lambda one: one.began_s - one.ended_s)
    ]
    kept = [one for _, one in sorted(ranked, key=lambda pair: pair[0])[:MOST_LISTED]]
    return tuple(sorted(kept, key=lambda one: one.began_s))
