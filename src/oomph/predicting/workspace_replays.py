"""Trace, every rule for workspaces -> what torch reserves at least, likely and at most.

The least is what is allocated at the peak: fewer holes than none there cannot be. What cuDNN
takes in between moves the order of requests, and so the holes that the allocator's cache keeps.
"""

from __future__ import annotations

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.device import SimulatedDevice
from oomph.predicting.replay import Replayed, replay
from oomph.predicting.workspaces import NO_COPIES, RULES, WorkspaceRule, likely_rule, requests
from oomph.records.trace import Trace


def replay_trace(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    limit_bytes: int | None = None,
    rule: WorkspaceRule = NO_COPIES,
) -> Replayed:
    """What becomes of a trace on a device of so many bytes; None: of one that has no end."""
    asked = requests(trace, rule)
    room = SimulatedDevice() if limit_bytes is None else SimulatedDevice(max(limit_bytes, 0))
    return replay(
        CachingAllocator(settings or AllocatorSettings(), room),
        asked.sizes,
        asked.events,
        asked.streams,
        asked.dispensable,
    )


class WorkspaceReplays:
    """The replays of one trace, each done once and only where it is asked for."""

    def __init__(self, trace: Trace, settings: AllocatorSettings, *, has_fast_tf32: bool) -> None:
        self._trace, self._settings, self._has_fast_tf32 = trace, settings, has_fast_tf32
        likely = likely_rule(trace.convolutions, has_fast_tf32=has_fast_tf32)
        # Rules that take the same are one: most models do not have every kind of convolution.
        by_taken = {self._taken(rule): rule for rule in (*RULES, NO_COPIES, likely)}
        self._likely, self._rules = by_taken[self._taken(likely)], tuple(by_taken.values())
        self._known: dict[tuple[WorkspaceRule, int | None], Replayed] = {}

    def of(self, other: Trace) -> WorkspaceReplays:
        """The replays of another trace on the same card; these, where it asks for the same."""
        if other.events == self._trace.events:
            return self
        return WorkspaceReplays(other, self._settings, has_fast_tf32=self._has_fast_tf32)

    def likely(self, limit_bytes: int) -> tuple[Replayed, Replayed]:
        """On a card with so much room, and where there is room for it.

        Where the card's end is met, the allocator gives its cache back and reserves less than it
        would on a larger one; where even that is too much, the larger one shows by how much.
        """
        on_card = self._under(self._likely, limit_bytes)
        return on_card, on_card if on_card.ran_out_at is None else self._under(self._likely, None)

    def reserved_bytes(self, limit_bytes: int) -> tuple[int, int]:
        """The least and the most, over all rules."""
        if not self._trace.convolutions:
            reserved = self.likely(limit_bytes)[1].peak_reserved_bytes
            return reserved, reserved
        on_card = [self._under(rule, limit_bytes) for rule in self._rules]
        found = [each.peak_reserved_bytes for each in on_card if each.ran_out_at is None]
        if len(found) < len(self._rules):
            found += [self._under(rule, None).peak_reserved_bytes for rule in self._rules]
        least = min(self._under(rule, None).peak_allocated_bytes for rule in self._rules)
        return min(*found, least), max(found)

    def any_fits(self, limit_bytes: int) -> bool:
        return any(self._fits(rule, limit_bytes) for rule in self._rules)

    def all_fit(self, limit_bytes: int) -> bool:
        return all(self._fits(rule, limit_bytes) for rule in self._rules)

    def likely_fits(self, limit_bytes: int) -> bool:
        return self._fits(self._likely, limit_bytes)

    def _fits(self, rule: WorkspaceRule, limit_bytes: int) -> bool:
        return self._under(rule, limit_bytes).ran_out_at is None

    def _under(self, rule: WorkspaceRule, limit_bytes: int | None) -> Replayed:
        known = self._known.get((rule, limit_bytes))
        if known is not None:
            return known
        if limit_bytes is not None:
            unlimited = self._under(rule, None)
            if unlimited.peak_reserved_bytes <= limit_bytes:
                return unlimited  # it never meets the limit
        done = replay_trace(self._trace, self._settings, limit_bytes, rule)
        return self._known.setdefault((rule, limit_bytes), done)

    def _taken(self, rule: WorkspaceRule) -> tuple[int, ...]:
        return tuple(rule.workspace_bytes(each) for each in self._trace.convolutions)
