"""Trace -> what a prediction needs of it, whatever the card: who holds the peak, and its replays.

What was found out of a trace on a GPU that has no end can be kept (`Weighed`). On a card with more
room than it took there is then nothing to replay, and the trace itself is not needed.
"""

from __future__ import annotations

import functools
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
    def knowing(self, unlimited: Replayed) -> Replays: ...


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


def weights_kept(kept: Weighed, again: Callable[[], Weights]) -> Weights:
    """The weights of a trace that was weighed before; `again` makes them anew where need be."""
    made = functools.cache(again)
    return Weights(
        replays=_Kept(
            _unlimited(kept.allocated_bytes, kept.reserved_bytes), lambda: made().replays
        ),
        with_outputs=_Kept(
            _unlimited(kept.allocated_with_outputs_bytes, kept.reserved_with_outputs_bytes),
            lambda: made().with_outputs,
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
    """What a replay would say is known where the limit is far; else it is made."""

    unlimited: Replayed
    again: Callable[[], Replays]

    def knowing(self, _: Replayed) -> Replays:
        return self

    def _made(self) -> Replays:
        return self.again().knowing(self.unlimited)

    def likely(self, limit_bytes: int) -> tuple[Replayed, Replayed]:
        if self._meets(limit_bytes):
            return self._made().likely(limit_bytes)
        if self._reserved_bytes <= limit_bytes:
            return self.unlimited, self.unlimited
        # Where it ran out nobody asks.
        return replace(self.unlimited, num_retries=1, ran_out_at=0), self.unlimited

    def reserved_bytes(self, limit_bytes: int) -> tuple[int, int]:
        if self._meets(limit_bytes):
            return self._made().reserved_bytes(limit_bytes)
        return self._reserved_bytes, self._reserved_bytes

    def any_fits(self, limit_bytes: int) -> bool:
        if self._meets(limit_bytes):
            return self._made().any_fits(limit_bytes)
        return self._reserved_bytes <= limit_bytes

    def all_fit(self, limit_bytes: int) -> bool:
        if self._meets(limit_bytes):
            return self._made().all_fit(limit_bytes)
        return self._reserved_bytes <= limit_bytes

    def likely_fits(self, limit_bytes: int) -> bool:
        if self._meets(limit_bytes):
            return self._made().likely_fits(limit_bytes)
        return self._reserved_bytes <= limit_bytes

    def _meets(self, limit_bytes: int) -> bool:
        """Whether it depends on what the allocator does at the limit.

        With more room than it reserves it never meets it, with less than it allocates it fails.
        """
        return self.unlimited.peak_allocated_bytes <= limit_bytes < self._reserved_bytes

    @property
    def _reserved_bytes(self) -> int:
        return self.unlimited.peak_reserved_bytes
