"""Alignment: how far two programs request the same blocks in the same order."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One request to the allocator, and when it is freed."""

    size_bytes: int
    label: str  # what asks for it: "aten::mm"
    # Number of blocks requested before it is freed; None: still alive at the end.
    freed_at: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmatched:
    """Blocks of one label and size that only one side requests."""

    label: str
    size_bytes: int  # of each
    num_blocks: int

    @property
    def total_bytes(self) -> int:
        return self.size_bytes * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first place where the two sides part; None for a side that has ended there."""

    at: int  # number of blocks that both sides requested before
    predicted: Block | None
    recorded: Block | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Alignment:
    """Two sequences of requests, matched in order by size."""

    num_predicted: int
    num_recorded: int
    num_matched: int
    num_freed_elsewhere: int  # matched, but freed before or after another block than in the other
    only_predicted: tuple[Unmatched, ...]  # the most bytes first
    only_recorded: tuple[Unmatched, ...]
    first_difference: Difference | None  # None: both request the same blocks

    @property
    def matched_ratio(self) -> float:
        """The share of the recorded blocks that are matched; 1 if nothing was recorded."""
        return self.num_matched / self.num_recorded if self.num_recorded else 1.0
