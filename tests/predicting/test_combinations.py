"""Every combination of what was rehearsed is as if it had been rehearsed itself."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.combinations import Combinations, pass_settings_of, step_of
from oomph.predicting.demand import replay_trace
from oomph.predicting.footprint import Footprint
from oomph.predicting.replay import replay_requests
from oomph.predicting.speed import estimate
from oomph.predicting.timeline import find_peak
from oomph.records.workload import Variant
from oomph.sensing.catalog import find
from predicting.footprints import BASES, OPTIMIZERS, traced
from predicting.test_footprint import footprint

# As the names of optimizers in a Variant; the workload's own is AdamW.
NAMES = {"adamw": "as-is", "for-loop": "for-loop", "sgd": "sgd", "momentum": "fused"}
A100 = find("a100-80gb").model


@pytest.fixture(scope="module")
def ways() -> Combinations:
    pass_footprints, steps = {}, {}
    for precision, checkpointing in BASES:
        how = Variant(
            micro_batch=2, accumulation=2, precision=precision, checkpointing=checkpointing
        )
        pass_footprints[pass_settings_of(how)] = footprint("adamw", how)
    for optimizer in OPTIMIZERS:
        how = Variant(micro_batch=2, accumulation=2, optimizer=NAMES[optimizer])
        steps[step_of(how)] = footprint(optimizer, replace(how, optimizer="as-is"))
    return Combinations(pass_footprints=pass_footprints, steps=steps, model=A100)


@pytest.mark.parametrize(
    ("optimizer", "base", "accumulation"), list(product(OPTIMIZERS, BASES, (1, 2)))
)
def test_memory_and_time_are_those_of_a_rehearsal(
    ways: Combinations, optimizer: str, base: tuple[str, str], accumulation: int
) -> None:
    how = Variant(
        micro_batch=7,
        accumulation=accumulation,
        precision=base[0],  # type: ignore[arg-type] # one of them
        checkpointing=base[1],
    )
    variant = replace(how, optimizer=NAMES[optimizer])
    trace = traced(optimizer, how)
    most = 0 if accumulation > 1 else 8  # the loss divided by the micro-steps
    assert 0 <= ways.least_bytes(variant) - find_peak(trace).live_bytes <= most
    reserved = replay_trace(trace).peak_reserved_bytes
    assert ways.reserved_bytes(variant) == reserved
    assert ways.least_bytes(variant) <= reserved
    expected = estimate(trace.ops, A100, num_micro_steps=accumulation)
    assert expected is not None
    assert ways.seconds(variant) == pytest.approx(expected.step_s, rel=0.03)


def test_the_bound_is_the_live_bytes_of_the_whole(ways: Combinations) -> None:
    for base, optimizer, accumulation, n in product(BASES, NAMES.values(), (1, 2), (2, 9, 64)):
        variant = Variant(
            micro_batch=n,
            accumulation=accumulation,
            precision=base[0],
            checkpointing=base[1],
            optimizer=optimizer,
        )
        whole: Footprint = ways.footprint(variant)
        assert ways.least_bytes(variant) == whole.live_bytes(n)


@pytest.mark.parametrize("num_replays", [0, 1, 2, 12])
def test_the_boundary_is_nearer_the_more_is_replayed_and_always_true(
    ways: Combinations, num_replays: int
) -> None:
    variant = Variant(micro_batch=3, accumulation=2)
    limit_bytes = ways.reserved_bytes(replace(variant, micro_batch=9))
    fit, too_many = ways.boundary(variant, limit_bytes, 3, num_replays)
    assert 3 <= fit < too_many
    for examples, passes in ((fit, True), (1.01 * too_many, False)):
        requests = ways.footprint(variant).requests(examples)
        replayed = replay_requests(requests, AllocatorSettings(), limit_bytes)
        assert (replayed.ran_out_at is None) == passes
    if num_replays == 12:
        assert too_many - fit <= fit / 64
