"""Trace -> what a prediction needs of it, whatever the card: who holds the peak, and its replays.

What was found out of a trace on a GPU that has no end can be kept (`Weighed`). On a card with more
room than it took there is then nothing to replay, and the trace itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.kept_outputs import with_outputs_kept
from oomph.predicting.replay import Replayed
from oomph.predicting.timeline import by_category, by_module, find_peak, moment_of
from oomph.predicting.workspace_replays import WorkspaceReplays
from oomph.records.prediction import Moment
from oomph.records.trace import Category, Trace


class Replays(Protocol):
    """What is asked of the replays of a trace; limits are the room that torch's allocator has."""

    def likely(self, limit_bytes: int) -> tuple[Replayed, Replayed]: ...
    def reserved_bytes(self, limit_bytes: int) -> tuple[int, int]: ...
    def any_fits(self, limit_bytes: int) -> bool: ...
    def all_fit(self, limit_bytes: int) -> bool: ...
    def likely_fits(self, limit_bytes: int) -> bool: ...


Under = Callable[[int], Replayed]  # a replay on a device of so many bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """A trace without convolutions, on a GPU that has no end."""

    allocated_bytes: int
    reserved_bytes: int
    allocated_with_outputs_bytes: int  # where the loop keeps what the model returned
    reserved_with_outputs_bytes: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    peak_at: Moment


@dataclass(frozen=True, kw_only=True)
class Weights:
    """What a prediction needs of a trace."""

    replays: Replays
    with_outputs: Replays
    by_category: Mapping[Category, int]
    by_module: Mapping[str, int]
    peak_at: Moment
    has_convolutions: bool = False
    measures_convolutions: bool = False


def weights_of(trace: Trace, settings: AllocatorSettings, *, has_fast_tf32: bool) -> Weights:
    replays = WorkspaceReplays(trace, settings, has_fast_tf32=has_fast_tf32)
    peak = find_peak(trace)
    return Weights(
        replays=replays,
        with_outputs=replays.of(with_outputs_kept(trace)),
        by_category=by_category(peak.holders),
        by_module=by_module(peak.holders),
        peak_at=moment_of(trace, peak.at_event),
        has_convolutions=bool(trace.convolutions),
        measures_convolutions=trace.measures_convolutions,
    )


def weighed(weights: Weights) -> Weighed:
    """What is worth keeping of a trace that has no convolutions."""
    found = weights.replays.likely(_ENDLESS_BYTES)[0]
    with_outputs = weights.with_outputs.likely(_ENDLESS_BYTES)[0]
    return Weighed(
        allocated_bytes=found.peak_allocated_bytes,
        reserved_bytes=found.peak_reserved_bytes,
        allocated_with_outputs_bytes=with_outputs.peak_allocated_bytes,
        reserved_with_outputs_bytes=with_outputs.peak_reserved_bytes,
        by_category=weights.by_category,
        by_module=weights.by_module,
        peak_at=weights.peak_at,
    )


_ENDLESS_BYTES = 1 << 60


def weights_kept(kept: Weighed, under: Under, under_with_outputs: Under) -> Weights:
    """The weights of a trace that was weighed before, which is replayed only where need be."""
    return Weights(
        replays=_Kept(_unlimited(kept.allocated_bytes, kept.reserved_bytes), under),
        with_outputs=_Kept(
            _unlimited(kept.allocated_with_outputs_bytes, kept.reserved_with_outputs_bytes),
            under_with_outputs,
        ),
        by_category=kept.by_category,
        by_module=kept.by_module,
        peak_at=kept.peak_at,
    )


def _unlimited(allocated_bytes: int, reserved_bytes: int) -> Replayed:
    return Replayed(
        peak_allocated_bytes=allocated_bytes,
        peak_allocated_at=None,
        peak_reserved_bytes=reserved_bytes,
        peak_reserved_at=None,
        num_retries=0,
        num_cuda_mallocs=0,
        num_cuda_frees=0,
    )


@dataclass(frozen=True)
class _Kept:
    """What a replay would say is known where the limit is far; else it is made.

    There are no convolutions, and so one rule for workspaces is as good as any.
    """

    unlimited: Replayed
    under: Under

    def likely(self, limit_bytes: int) -> tuple[Replayed, Replayed]:
        on_card = self._on_card(limit_bytes)
        return on_card, on_card if on_card.ran_out_at is None else self.unlimited

    def reserved_bytes(self, limit_bytes: int) -> tuple[int, int]:
        reserved = self.likely(limit_bytes)[1].peak_reserved_bytes
        return reserved, reserved

    def any_fits(self, limit_bytes: int) -> bool:
        return self.likely_fits(limit_bytes)

    def all_fit(self, limit_bytes: int) -> bool:
        return self.likely_fits(limit_bytes)

    def likely_fits(self, limit_bytes: int) -> bool:
        return self._on_card(limit_bytes).ran_out_at is None

    def _on_card(self, limit_bytes: int) -> Replayed:
        """With more room than it reserves it never meets the limit."""
        if self.unlimited.peak_reserved_bytes <= limit_bytes:
            return self.unlimited
        if self.unlimited.peak_allocated_bytes > limit_bytes:
            return replace(self.unlimited, num_retries=1, ran_out_at=0)  # where, nobody asks
        return self.under(limit_bytes)
