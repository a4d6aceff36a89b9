"""Replays of a footprint are those of the trace that it is the columns of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.footprint import Footprint
from oomph.predicting.footprint_replays import FootprintReplays
from oomph.predicting.footprint_trace import trace_at
from oomph.predicting.kept_outputs import with_outputs_kept
from oomph.predicting.workspace_replays import replay_trace
from oomph.records.trace import Trace
from oomph.records.workload import Variant
from predicting.footprints import CAPABILITY
from predicting.test_footprint import MANY, ONCE, footprint

MICRO_BATCH = 5


def trace_of(columns: Footprint) -> Trace:
    return trace_at(columns, MICRO_BATCH, torch_version="2.13.0", compute_capability=CAPABILITY)


def without_outputs(columns: Footprint) -> Footprint:
    return replace(columns, is_output=np.zeros_like(columns.is_output))


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("variant", [MANY, ONCE])
def test_under_any_limit_they_are_those_of_the_trace(variant: Variant, expandable: bool) -> None:
    columns = footprint("adamw", variant)
    settings = AllocatorSettings(expandable_segments=expandable)
    found = FootprintReplays(columns, MICRO_BATCH, settings)
    trace = trace_of(columns)
    kept = with_outputs_kept(trace)
    assert kept.events != trace.events
    reserved = replay_trace(trace, settings).peak_reserved_bytes
    limits = (None, *(reserved * share // 16 for share in range(8, 20)))
    ends = set()
    for limit in limits:
        assert found.under(limit) == replay_trace(trace, settings, limit)
        assert found.under_with_outputs(limit) == replay_trace(kept, settings, limit)
        ends.add((found.under(limit).ran_out_at is None, found.under(limit).num_retries > 0))
    assert len(ends) > 1  # not all of them did the same


def test_where_nothing_is_returned_one_replay_serves_for_both() -> None:
    found = FootprintReplays(
        without_outputs(footprint("adamw", MANY)), MICRO_BATCH, AllocatorSettings()
    )
    assert found.under_with_outputs(None) is found.under(None)


def test_what_is_empty_at_a_micro_batch_is_not_asked_for() -> None:
    columns = footprint("adamw", MANY)
    at = int(columns.event[columns.event > 0][-1]) - 1
    fixed, grown = columns.fixed_bytes.copy(), columns.grown_bytes.copy()
    fixed[at], grown[at] = -MICRO_BATCH * 4096, 4096
    emptied = replace(columns, fixed_bytes=fixed, grown_bytes=grown)
    _, events, _ = emptied.requests(MICRO_BATCH)
    assert at + 1 not in events
    assert at + 1 in emptied.requests(MICRO_BATCH + 1)[1]
    found = FootprintReplays(emptied, MICRO_BATCH, AllocatorSettings()).under(None)
    # The events of a trace are counted with those of its empty tensors.
    direct = replay_trace(trace_of(emptied))
    assert found.peak_reserved_bytes == direct.peak_reserved_bytes
    assert found.peak_allocated_bytes == direct.peak_allocated_bytes
