"""Trace -> what a prediction needs of it on any card: what holds the peak, and its replays.

The peaks without a memory limit can be stored (`UnlimitedPeaks`). A card with more room than these
needs no replay and not even the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import merge

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.convolutions import NOTHING, Rules, WorkspaceRule, rules_for
from oomph.predicting.replay import (
    EMPTY_CACHE,
    Replayed,
    Requests,
    replay_requests,
    with_outputs_kept,
)
from oomph.predicting.timeline import by_category, by_module, find_peak, moment_of
from oomph.records.gpu_model import Tf32
from oomph.records.prediction import Moment
from oomph.records.trace import Category, Trace

_NO_RULES = Rules(likely=(NOTHING,), possible=(NOTHING,))


_EMPTIED = -1  # among workspaces: the cache is emptied here


def requests(trace: Trace, rule: WorkspaceRule = NOTHING) -> Requests:
    """Return a trace's requests, with the workspaces that the rule gives its convolutions."""
    # torch requests nothing for an empty tensor
    is_empty = [not allocation.size_bytes for allocation in trace.allocations]
    sizes = [allocation.size_bytes or 1 for allocation in trace.allocations]
    events: list[int] = []
    done = 0
    workspaces = ((each.at_event, rule.workspace_bytes(each)) for each in trace.convolutions)
    emptied = ((place, _EMPTIED) for place in trace.emptied_at)
    for place, taken in merge(workspaces, emptied):
        if taken:
            events += trace.events[done:place]
            done = place
        if taken == _EMPTIED:
            events.append(EMPTY_CACHE)
        elif taken:
            sizes.append(taken)
            events += (len(sizes), -len(sizes))
    events += trace.events[done:]
    num_own = len(trace.allocations)
    streams = [allocation.stream for allocation in trace.allocations]
    return Requests(
        sizes,
        [
            event
            for event in events
            if event == EMPTY_CACHE or abs(event) > num_own or not is_empty[abs(event) - 1]
        ],
        [*streams, *[0] * (len(sizes) - num_own)] if any(streams) else None,
        frozenset(range(num_own + 1, len(sizes) + 1)),
    )


def replay_trace(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    limit_bytes: int | None = None,
    rule: WorkspaceRule = NOTHING,
) -> Replayed:
    """Replay a trace on a device of `limit_bytes`; None: without a limit."""
    return replay_requests(requests(trace, rule), settings or AllocatorSettings(), limit_bytes)


# ---- what torch reserves: minimum, likely, maximum -----------------------------------------------
# Workspaces change the order of requests, and with it the holes in the allocator's cache: a larger
# workspace can mean a smaller figure, and each rule is replayed.


@dataclass(frozen=True)
class Replays:
    """The replays of one trace under every rule. Limits are the room for torch's allocator."""

    under: Callable[[WorkspaceRule, int | None], Replayed]  # limit in bytes; None: no limit
    rules: Rules = _NO_RULES

    @property
    def likely_rule(self) -> WorkspaceRule:
        """Return the likely rule with the largest figure.

        The rules differ mostly by the holes that workspaces leave, and a figure that is too low
        hurts more.
        """
        likely = self.rules.likely
        if len(likely) == 1:
            return likely[0]
        return max(likely, key=lambda rule: self.under(rule, None).peak_reserved_bytes)

    def likely(self, limit_bytes: int) -> tuple[Replayed, Replayed]:
        """Replay on a card with this much room, and on one that is large enough.

        At the card's limit the allocator releases its cache and reserves less than on a larger
        card. If even that is too much, the larger card shows how much is missing.
        """
        on_card = self.under(self.likely_rule, limit_bytes)
        is_over = on_card.ran_out_at is not None
        return on_card, self.under(self.likely_rule, None) if is_over else on_card

    def reserved_bytes(self, limit_bytes: int) -> tuple[int, int]:
        """Return the least and the most over all rules."""
        rules = self.rules.possible
        if len(rules) == 1:
            reserved = self.likely(limit_bytes)[1].peak_reserved_bytes
            return reserved, reserved
        on_card = [self.under(rule, limit_bytes) for rule in rules]
        found = [each.peak_reserved_bytes for each in on_card if each.ran_out_at is None]
        if len(found) < len(rules):
            found += [self.under(rule, None).peak_reserved_bytes for rule in rules]
        return min(found), max(found)

    def any_fits(self, limit_bytes: int) -> bool:
        return any(self._fits(rule, limit_bytes) for rule in self.rules.possible)

    def all_fit(self, limit_bytes: int) -> bool:
        return all(self._fits(rule, limit_bytes) for rule in self.rules.possible)

    def likely_fits(self, limit_bytes: int) -> bool:
        return self._fits(self.likely_rule, limit_bytes)

    def _fits(self, rule: WorkspaceRule, limit_bytes: int) -> bool:
        return self.under(rule, limit_bytes).ran_out_at is None


def replays_of(trace: Trace, settings: AllocatorSettings, tf32: Tf32 = "none") -> Replays:
    """Return the replays of a trace, each made once and only when needed."""

    def taken(rule: WorkspaceRule) -> tuple[int, ...]:
        return tuple(rule.workspace_bytes(each) for each in trace.convolutions)

    @functools.cache
    def under(rule: WorkspaceRule, limit_bytes: int | None) -> Replayed:
        if limit_bytes is not None and under(rule, None).peak_reserved_bytes <= limit_bytes:
            return under(rule, None)  # it never reaches the limit
        return replay_trace(trace, settings, limit_bytes, rule)

    if not trace.convolutions:
        return Replays(under)
    rules = rules_for(
        trace.convolutions,
        tf32=tf32 if trace.allows_tf32 else "none",
        are_measured=trace.measures_convolutions,
    )
    # Rules with the same workspaces count once: few models have every kind of convolution.
    by_taken = {taken(rule): rule for rule in reversed(rules.possible)}
    likely = dict.fromkeys(by_taken[taken(rule)] for rule in rules.likely)
    return Replays(under, Rules(tuple(likely), tuple(by_taken.values())))


# ---- demand --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a prediction needs of a trace."""

    replays: Replays
    with_outputs: Replays  # if the loop keeps the outputs of the model
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    peak_at: Moment
    has_convolutions: bool = False
    measures_convolutions: bool = False


def demand_of(trace: Trace, settings: AllocatorSettings, tf32: Tf32 = "none") -> Demand:
    replays = replays_of(trace, settings, tf32)
    kept = with_outputs_kept(trace)
    with_outputs = replays
    if kept.events != trace.events:
        with_outputs = replays_of(kept, settings, tf32)
    peak = find_peak(trace)
    return Demand(
        replays=replays,
        with_outputs=with_outputs,
        by_category=by_category(peak.holders),
        by_module=by_module(peak.holders),
        peak_at=moment_of(trace, peak.at_event),
        has_convolutions=bool(trace.convolutions),
        measures_convolutions=trace.measures_convolutions and bool(trace.convolutions),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UnlimitedPeaks:
    """The stored part of a trace without convolutions: its peaks without a memory limit."""

    allocated_bytes: int
    reserved_bytes: int
    allocated_with_outputs_bytes: int  # if the loop keeps the outputs of the model
    reserved_with_outputs_bytes: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    peak_at: Moment


def unlimited_peaks(demand: Demand) -> UnlimitedPeaks:
    found, with_outputs = (
        replays.under(replays.likely_rule, None)
        for replays in (demand.replays, demand.with_outputs)
    )
    return UnlimitedPeaks(
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        allocated_with_outputs_bytes=with_outputs.peak_allocated_bytes,
        reserved_with_outputs_bytes=with_outputs.peak_reserved_bytes,
        by_category=demand.by_category,
        by_module=demand.by_module,
        peak_at=demand.peak_at,
    )


ReplayUnder = Callable[[int], Replayed]  # from the device's bytes


def demand_from(
    peaks: UnlimitedPeaks, under: ReplayUnder, under_with_outputs: ReplayUnder
) -> Demand:
    """Return the demand from stored peaks; the trace is replayed only near a limit."""
    return Demand(
        replays=_near_limits(peaks.allocated_bytes, peaks.reserved_bytes, under),
        with_outputs=_near_limits(
            peaks.allocated_with_outputs_bytes,
            peaks.reserved_with_outputs_bytes,
            under_with_outputs,
        ),
        by_category=peaks.by_category,
        by_module=peaks.by_module,
        peak_at=peaks.peak_at,
    )


def _near_limits(allocated_bytes: int, reserved_bytes: int, replayed: ReplayUnder) -> Replays:
    unlimited = Replayed(
        peak_allocated_bytes=allocated_bytes, peak_reserved_bytes=reserved_bytes, num_retries=0
    )

    def under(_: WorkspaceRule, limit_bytes: int | None) -> Replayed:
        if limit_bytes is None or reserved_bytes <= limit_bytes:
            return unlimited  # it never reaches the limit
        if allocated_bytes > limit_bytes:
            return replace(unlimited, num_retries=1, ran_out_at=0)  # the event does not matter
        return replayed(limit_bytes)

    return Replays(under)
