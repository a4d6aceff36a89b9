"""What the page of `oomph explain` draws: memory over time, its layout, and who held it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Neighbouring blocks of one kind, by address."""

    size_bytes: int
    category: int | None  # None: a hole


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """A place in the program, and what was asked for from there and below."""

    name: str
    size_bytes: int
    parts: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One GPU of a snapshot. The timeline has one entry per column in each of its lists."""

    categories: tuple[str, ...]
    events: tuple[int, ...]  # the event of each column: the fullest of those that it stands for
    live_bytes: tuple[tuple[int, ...], ...]  # by category
    reserved_bytes: tuple[int, ...]
    num_events: int
    at: int  # the event that is explained
    budget_bytes: int | None
    requested_bytes: int | None
    segments: tuple[tuple[Piece, ...], ...]
    largest_hole_bytes: int
    by_category: tuple[Held, ...]  # then lines
    by_stack: tuple[Held, ...]  # then what it called
