"""Replays of a footprint are those of the trace that it is the columns of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.demand import replay_trace
from oomph.predicting.footprint import Footprint, trace_at
from oomph.predicting.replay import Replayed, replay_requests, with_outputs_kept
from oomph.records.trace import Trace
from oomph.records.workload import Variant
from oomph.units import MIB
from predicting.footprints import CAPABILITY
from predicting.test_footprint import MANY, ONCE, footprint

MICRO_BATCH = 5


def trace_of(columns: Footprint) -> Trace:
    return trace_at(columns, MICRO_BATCH, torch_version="2.13.0", compute_capability=CAPABILITY)


def replayed(
    columns: Footprint, settings: AllocatorSettings, limit: int | None, *, keeps_outputs: bool
) -> Replayed:
    requests = columns.requests(MICRO_BATCH, keeps_outputs=keeps_outputs)
    return replay_requests(requests, settings, limit)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("variant", [MANY, ONCE])
def test_under_any_limit_they_are_those_of_the_trace(variant: Variant, expandable: bool) -> None:
    columns = footprint("adamw", variant)
    settings = AllocatorSettings(expandable_segments=expandable)
    trace = trace_of(columns)
    kept = with_outputs_kept(trace)
    assert kept.events != trace.events
    reserved = replay_trace(trace, settings).peak_reserved_bytes
    limits = (None, *(reserved * share // 16 for share in range(8, 20)))
    ends = set()
    for limit in limits:
        found = replayed(columns, settings, limit, keeps_outputs=False)
        assert found == replay_trace(trace, settings, limit)
        with_outputs = replayed(columns, settings, limit, keeps_outputs=True)
        assert with_outputs == replay_trace(kept, settings, limit)
        ends.add((found.ran_out_at is None, found.num_retries > 0))
    assert len(ends) > 1  # not all of them did the same


def test_where_nothing_is_returned_nothing_is_kept() -> None:
    columns = footprint("adamw", MANY)
    columns = replace(columns, is_output=np.zeros_like(columns.is_output))
    assert columns.requests(MICRO_BATCH, keeps_outputs=True) == columns.requests(MICRO_BATCH)


def emptied(columns: Footprint, which: Any) -> Footprint:
    """The same, where these allocations have nothing in them at the micro-batch."""
    return replace(
        columns,
        fixed_bytes=np.where(which, -MICRO_BATCH * 4096, columns.fixed_bytes),
        grown_bytes=np.where(which, 4096, columns.grown_bytes),
    )


def test_what_is_empty_at_a_micro_batch_is_not_asked_for() -> None:
    columns = footprint("adamw", MANY)
    last = int(columns.event.max())
    found = emptied(columns, np.arange(1, last + 1) == last)
    assert last not in found.requests(MICRO_BATCH)[1]
    assert last in found.requests(MICRO_BATCH + 1)[1]


def test_outputs_are_kept_as_long_where_much_is_empty() -> None:
    """What is not asked for must not move the places at which forwards begin."""
    columns = footprint("adamw", MANY)
    requested = columns.event[(columns.event > 0) & (columns.step <= 1)] - 1
    is_early = np.isin(np.arange(len(columns.fixed_bytes)), requested)
    found = emptied(columns, is_early & (columns.is_output == 0))
    trace = trace_of(found)
    for limit in (None, 16 * MIB):
        settings = AllocatorSettings()
        own = replayed(found, settings, limit, keeps_outputs=False)
        assert own == replay_trace(trace, None, limit)
        with_outputs = replayed(found, settings, limit, keeps_outputs=True)
        assert with_outputs == replay_trace(with_outputs_kept(trace), None, limit)
