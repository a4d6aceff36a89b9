"""Deadline: when a search stops rehearsing, and what it left out because of that."""

from __future__ import annotations

import time
from collections.abc import Iterable

from oomph.records.plan import Cut


class Deadline:
    """The end of a search with a time limit. The workload as given is always rehearsed."""

    def __init__(self, limit_s: float | None = None) -> None:
        self.limit_s = limit_s
        self.has_base = False  # whether the least is known that a plan can be made of
        self._start_s = time.monotonic()
        self._left: dict[str, None] = {}

    @property
    def is_over(self) -> bool:
        """Return whether nothing more is to be rehearsed, except for the plan to recommend."""
        if self.limit_s is None or not self.has_base:
            return False
        return time.monotonic() - self._start_s >= self.limit_s

    def leave_out(self, names: Iterable[str]) -> None:
        """Note combinations of tricks that are not compared."""
        self._left.update(dict.fromkeys(names))

    def cut(self) -> Cut | None:
        """Return what was left out; None if nothing was."""
        if self.limit_s is None or not self._left:
            return None
        return Cut(limit_s=self.limit_s, left_out=tuple(self._left))
