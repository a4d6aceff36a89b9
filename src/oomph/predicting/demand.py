"""Trace -> what a prediction needs of it on any card: what holds the peak, and its replays.

The peaks without a memory limit can be stored (`UnlimitedPeaks`). A card with more room than these
needs no replay and not even the trace.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import merge
from typing import Literal

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.replay import (
    EMPTY_CACHE,
    Replayed,
    Requests,
    replay_requests,
    with_outputs_kept,
)
from oomph.predicting.timeline import by_category, by_module, find_peak, moment_of
from oomph.records.prediction import Moment
from oomph.records.trace import Category, Convolution, ConvolutionKind, Direction, Trace

# ---- the workspaces of cuDNN's convolutions
# Which kernel cuDNN chooses depends on its version, the card and the shape, and cannot be derived
# from the model. What a workspace holds is known: tensor cores read channels last, torch's tensors
# have channels first, so cuDNN copies what a kernel reads, and sometimes what it writes, into its
# workspace (many published profiles show its nchwToNhwc and nhwcToNchw kernels). Each rule here is
# one such choice; together they give an interval. torch takes a workspace from its allocator for
# one call. If there is no room, it tries the next kernel of cuDNN's list, down to those without a
# workspace (Conv_v8.cpp, try_plans; before torch 2.1 Conv_v7.cpp, AlgoIterator::try_all). So a
# workspace alone never causes an out-of-memory error. Winograd and FFT workspaces are not included.
# cuDNN tries them when it benchmarks (torch.backends.cudnn.benchmark), and they can be many times
# as large if there is room.

Copied = Literal["nothing", "what is read", "what is read and written"]

_ALL: tuple[Direction, ...] = ("forward", "data gradient", "filter gradient")
_BACKWARD: tuple[Direction, ...] = ("data gradient", "filter gradient")
_DENSE: tuple[ConvolutionKind, ...] = ("dense",)
_PRODUCTS: tuple[ConvolutionKind, ...] = ("dense", "pointwise")
_EVERY: tuple[ConvolutionKind, ...] = ("dense", "pointwise", "depthwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRule:
    """Which tensors cuDNN copies into its workspace, and for which convolutions."""

    copied: Copied
    directions: tuple[Direction, ...] = _ALL
    kinds: tuple[ConvolutionKind, ...] = _DENSE

    def workspace_bytes(self, convolution: Convolution) -> int:
        each = convolution
        if each.kind not in self.kinds or each.direction not in self.directions:
            return 0
        if self.copied == "nothing":
            return 0
        tensors = {
            "forward": (each.input_bytes, each.weight_bytes, each.output_bytes),
            "data gradient": (each.output_bytes, each.weight_bytes, each.input_bytes),
            "filter gradient": (each.input_bytes, each.output_bytes, each.weight_bytes),
        }[each.direction]  # the last tensor is written
        return sum(tensors if self.copied == "what is read and written" else tensors[:2])


# A 1 x 1 convolution is a matrix product of the tensors as they are, and tensor cores have nothing
# to do in a depthwise one. Copies are unlikely for both.
NO_COPIES = WorkspaceRule(copied="nothing")
COPIED_FOR_TENSOR_CORES = WorkspaceRule(copied="what is read")

RULES: tuple[WorkspaceRule, ...] = (
    NO_COPIES,
    COPIED_FOR_TENSOR_CORES,
    WorkspaceRule(copied="what is read", directions=_BACKWARD),
    WorkspaceRule(copied="what is read and written"),
    WorkspaceRule(copied="what is read", kinds=_PRODUCTS),
    WorkspaceRule(copied="what is read", directions=_BACKWARD, kinds=_PRODUCTS),
    WorkspaceRule(copied="what is read and written", kinds=_PRODUCTS),
    WorkspaceRule(copied="what is read and written", kinds=_EVERY),
)


def likely_rule(convolutions: Sequence[Convolution], *, has_fast_tf32: bool) -> WorkspaceRule:
    """Return the rule for tensor cores if they pay: in half precision, or if TF32 is fast.

    On GeForce cards of compute capability 8 TF32 runs no faster than fp32 (NVIDIA's GA102 paper).
    """
    is_low = any(each.dtype in ("float16", "bfloat16") for each in convolutions)
    return COPIED_FOR_TENSOR_CORES if is_low or has_fast_tf32 else NO_COPIES


_EMPTIED = -1  # among workspaces: the cache is emptied here


def requests(trace: Trace, rule: WorkspaceRule = NO_COPIES) -> Requests:
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
    rule: WorkspaceRule = NO_COPIES,
) -> Replayed:
    """Replay a trace on a device of `limit_bytes`; None: without a limit."""
    return replay_requests(requests(trace, rule), settings or AllocatorSettings(), limit_bytes)


# ---- what torch reserves: minimum, likely, maximum -----------------------------------------------
# The minimum is what is allocated at the peak, as if nothing were fragmented. Workspaces change the
# order of requests, and with it the holes in the allocator's cache.


@dataclass(frozen=True)
class Replays:
    """The replays of one trace under every rule. Limits are the room for torch's allocator."""

    under: Callable[[WorkspaceRule, int | None], Replayed]  # limit in bytes; None: no limit
    rules: tuple[WorkspaceRule, ...] = (NO_COPIES,)
    likely_rule: WorkspaceRule = NO_COPIES

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
        if len(self.rules) == 1:
            reserved = self.likely(limit_bytes)[1].peak_reserved_bytes
            return reserved, reserved
        on_card = [self.under(rule, limit_bytes) for rule in self.rules]
        found = [each.peak_reserved_bytes for each in on_card if each.ran_out_at is None]
        unlimited = [self.under(rule, None) for rule in self.rules]
        if len(found) < len(self.rules):
            found += [each.peak_reserved_bytes for each in unlimited]
        return min(*found, *(each.peak_allocated_bytes for each in unlimited)), max(found)

    def any_fits(self, limit_bytes: int) -> bool:
        return any(self._fits(rule, limit_bytes) for rule in self.rules)

    def all_fit(self, limit_bytes: int) -> bool:
        return all(self._fits(rule, limit_bytes) for rule in self.rules)

    def likely_fits(self, limit_bytes: int) -> bool:
        return self._fits(self.likely_rule, limit_bytes)

    def _fits(self, rule: WorkspaceRule, limit_bytes: int) -> bool:
        return self.under(rule, limit_bytes).ran_out_at is None


def replays_of(trace: Trace, settings: AllocatorSettings, *, has_fast_tf32: bool) -> Replays:
    """Return the replays of a trace, each made once and only when needed."""

    def taken(rule: WorkspaceRule) -> tuple[int, ...]:
        return tuple(rule.workspace_bytes(each) for each in trace.convolutions)

    @functools.cache
    def under(rule: WorkspaceRule, limit_bytes: int | None) -> Replayed:
        if limit_bytes is not None and under(rule, None).peak_reserved_bytes <= limit_bytes:
            return under(rule, None)  # it never reaches the limit
        return replay_trace(trace, settings, limit_bytes, rule)

    likely = likely_rule(trace.convolutions, has_fast_tf32=has_fast_tf32)
    # Rules with the same workspaces count once: few models have every kind of convolution.
    by_taken = {taken(rule): rule for rule in (*RULES, NO_COPIES, likely)}
    return Replays(under, tuple(by_taken.values()), by_taken[taken(likely)])


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


def demand_of(trace: Trace, settings: AllocatorSettings, *, has_fast_tf32: bool) -> Demand:
    replays = replays_of(trace, settings, has_fast_tf32=has_fast_tf32)
    kept = with_outputs_kept(trace)
    with_outputs = replays
    if kept.events != trace.events:
        with_outputs = replays_of(kept, settings, has_fast_tf32=has_fast_tf32)
    peak = find_peak(trace)
    return Demand(
        replays=replays,
        with_outputs=with_outputs,
        by_category=by_category(peak.holders),
        by_module=by_module(peak.holders),
        peak_at=moment_of(trace, peak.at_event),
        has_convolutions=bool(trace.convolutions),
        measures_convolutions=trace.measures_convolutions,
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
