"""A footprint as a trace again is the trace that was rehearsed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oomph.predicting.demand import replay_trace
from oomph.predicting.footprint import trace_at
from oomph.predicting.timeline import find_peak
from oomph.records.workload import Variant
from predicting.footprints import BASES, CAPABILITY, traced
from predicting.test_footprint import footprint


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("accumulation", [1, 2])
def test_peak_reserved_bytes_and_phases_are_those_of_a_direct_trace(
    base: tuple[str, str], accumulation: int
) -> None:
    how = Variant(
        micro_batch=7,
        accumulation=accumulation,
        precision=base[0],  # type: ignore[arg-type] # one of them
        checkpointing=base[1],
    )
    direct = traced("adamw", how)
    made = trace_at(
        footprint("adamw", how), 7, torch_version="2.13.0", compute_capability=CAPABILITY
    )
    assert find_peak(made).live_bytes == find_peak(direct).live_bytes
    assert replay_trace(made).peak_reserved_bytes == replay_trace(direct).peak_reserved_bytes
    assert [name for _, name in made.phase_starts if name != "zero_grad"] == [
        name for _, name in direct.phase_starts if name != "zero_grad"
    ]
    # Which module an op is in is not among the columns.
    assert made.ops == [replace(op, module="") for op in direct.ops]
