"""The workloads that stand beside the example scripts can be rehearsed, and are theirs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest

from examples.commands import COMMANDS
from examples.twins import TWINS, WITHOUT, options_of
from oomph.records.trace import Trace
from oomph.rehearsing.child import in_a_child
from oomph.rehearsing.traces import MOST_MICRO_STEPS

CAPABILITY = (8, 0)
SMALL = [name for name in TWINS if name.endswith(" tiny")]


@pytest.fixture(scope="module")
def traces() -> Mapping[str, Trace]:
    """Of all small twins, in one child."""
    return in_a_child(lambda: dict(rehearsed()))


def rehearsed() -> Iterator[tuple[str, Trace]]:
    from oomph.rehearsing.rehearse import prepare, rehearse

    prepare(CAPABILITY)
    for name in SMALL:
        twin = TWINS[name]
        micro_steps = min(twin.variant.accumulation, MOST_MICRO_STEPS)
        variant = replace(twin.variant, accumulation=micro_steps)
        trace = rehearse(twin.workload, variant, CAPABILITY)
        yield name, replace(trace, events=list(trace.events))  # its end comes later


@pytest.mark.parametrize("name", SMALL)
def test_its_second_step_ends_where_the_first_did(traces: Mapping[str, Trace], name: str) -> None:
    trace = traces[name]
    first, second = trace.step_starts
    assert live_bytes(trace, second) > live_bytes(trace, first)  # the optimizer's state
    left = live_bytes(trace, len(trace.events))
    assert left == pytest.approx(live_bytes(trace, second), abs=64)  # single figures


def live_bytes(trace: Trace, at_event: int) -> int:
    sizes = [one.size_bytes for one in trace.allocations]
    return sum(
        sizes[abs(event) - 1] * (1 if event > 0 else -1) for event in trace.events[:at_event]
    )


def test_every_script_has_a_twin_in_small_and_as_it_is() -> None:
    named = {f"{name} {size}" for name in COMMANDS for size in ("tiny", "default")}
    without = {f"{name} {size}" for name in WITHOUT for size in ("tiny", "default")}
    assert named - without <= TWINS.keys()
    assert not without & TWINS.keys()


def test_a_workload_has_the_batch_of_its_variant() -> None:
    for twin in TWINS.values():
        assert twin.workload.batch_size == twin.variant.batch_size


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        (("--batch-size", "16", "--amp"), {"batch_size": 16, "amp": True}),
        (("--n_layer=2", "--device=cpu"), {"n_layer": 2, "device": "cpu"}),
        (("users=50", "dim=8"), {"users": 50, "dim": 8}),
        (("--layers", "1,1"), {"layers": (1, 1)}),
    ],
)
def test_arguments_are_read_as_the_scripts_read_them(
    arguments: tuple[str, ...], options: dict[str, object]
) -> None:
    assert options_of(arguments) == options
