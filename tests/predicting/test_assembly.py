"""A prediction is put together from exact parts and named intervals; the verdict is by replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.convolutions import Rules, WorkspaceRule
from oomph.predicting.demand import Replays, demand_of
from oomph.predicting.overhead import NOTHING, Interval, exactly
from oomph.predicting.prediction import (
    Card,
    assemble,
    assemble_demand,
    doubt_on,
    room_for_figures,
)
from oomph.predicting.replay import Replayed
from oomph.predicting.residuals import KINDS, Kind, width_of
from oomph.predicting.speed import StepTime
from oomph.records.prediction import Prediction
from oomph.records.trace import Convolution, Phase, Trace
from oomph.records.workload import Variant
from oomph.units import GIB, MIB
from predicting.test_scaling import trace_of

VARIANT = Variant(micro_batch=2)


def card(usable: int, context: tuple[int, int, int] = (300 * MIB, 400 * MIB, 500 * MIB)) -> Card:
    return Card(
        name="a card",
        usable=Interval(usable, usable, usable, "as given"),
        context=Interval(*context, "published"),
    )


def predicted(trace: Trace, usable: int = 16 * GIB) -> Prediction:
    return assemble(trace, VARIANT, card(usable))


def unseen(reserved_bytes: int, kind: Kind = "other model") -> int:
    """What no rule knows, to either side."""
    return int(width_of(kind).ratio * reserved_bytes) + 40 * MIB


def test_the_device_has_what_torch_reserves_and_the_context() -> None:
    told = predicted(trace_of([GIB, 2 * GIB], [1, 2, -1, -2], 2))
    assert told.reserved_bytes == 3 * GIB
    assert told.device_bytes == 3 * GIB + 400 * MIB
    assert told.low_bytes == 3 * GIB + 300 * MIB - unseen(3 * GIB)
    assert told.high_bytes == 3 * GIB + 500 * MIB + unseen(3 * GIB)


def test_figures_of_several_gpus_are_less_sure() -> None:
    trace = trace_of([GIB, 2 * GIB], [1, 2, -1, -2], 2)
    several = assemble(trace, replace(VARIANT, num_gpus=2, sharding="ddp"), card(16 * GIB))
    assert several.reserved_bytes == 3 * GIB
    of_several = unseen(3 * GIB, "model on several GPUs")
    assert (
        several.high_bytes
        == 3 * GIB + 500 * MIB + of_several
        > 3 * GIB + 500 * MIB + unseen(3 * GIB)
    )


def returning(phases: list[tuple[int, Phase]], sizes: list[int], events: list[int]) -> Trace:
    """A trace whose second and fourth blocks were returned by the model."""
    trace = trace_of(sizes, events, 2)
    allocations = [
        replace(each, is_output=number in (1, 3)) for number, each in enumerate(trace.allocations)
    ]
    return replace(trace, allocations=allocations, phase_starts=phases)


def test_outputs_that_a_loop_may_keep_are_an_unknown_of_the_size_that_they_would_add() -> None:
    phases: list[tuple[int, Phase]] = [(0, "forward"), (4, "forward")]
    # Each forward makes an activation and then its output; both die with the step.
    trace = returning(phases, [GIB, GIB, GIB, GIB], [1, 2, -2, -1, 3, 4, -4, -3])
    told = predicted(trace)
    named = [unknown for unknown in told.unknowns if "outputs" in unknown.what]
    assert [(unknown.low_bytes, unknown.high_bytes) for unknown in named] == [(0, GIB)]
    assert told.reserved_bytes == 2 * GIB
    assert told.high_bytes == 3 * GIB + 500 * MIB + unseen(2 * GIB)
    tight = 2 * GIB + 900 * MIB  # enough for all the rest
    assert predicted(trace, tight).fits == "uncertain"
    assert predicted(trace_of([GIB, GIB], [1, 2, -2, -1], 2), tight).fits == "yes"


def test_outputs_that_are_kept_already_are_no_unknown() -> None:
    phases: list[tuple[int, Phase]] = [(0, "forward"), (3, "forward")]
    trace = returning(phases, [GIB, GIB, GIB, GIB], [1, 2, -1, 3, 4, -2, -3])
    assert not [unknown for unknown in predicted(trace).unknowns if "outputs" in unknown.what]


ENOUGH = Replayed(peak_allocated_bytes=GIB, peak_reserved_bytes=GIB, num_retries=0)


@pytest.mark.parametrize(("runs_out", "verdict"), [(False, "yes"), (True, "uncertain")])
def test_certain_is_what_fits_with_kept_outputs_and_with_every_workspace_at_once(
    runs_out: bool, verdict: str
) -> None:
    likely, other = WorkspaceRule(), WorkspaceRule(transforms_tiles=True)

    def kept(rule: WorkspaceRule, limit_bytes: int | None) -> Replayed:
        is_over = runs_out and rule is other and limit_bytes is not None
        return replace(ENOUGH, ran_out_at=0 if is_over else None)

    rules = Rules((likely,), (likely, other))
    plain = demand_of(convolved(), AllocatorSettings())
    alone = replace(plain.replays, under=lambda *_: ENOUGH, rules=rules)
    demand = replace(plain, replays=alone, with_outputs=Replays(kept, rules))
    found = assemble_demand(demand, VARIANT, card(16 * GIB), kind="other model")
    assert found.fits == verdict


@pytest.mark.parametrize(
    ("usable", "verdict"),
    [
        (3 * GIB + 500 * MIB + unseen(3 * GIB), "yes"),
        (3 * GIB + 499 * MIB + unseen(3 * GIB), "uncertain"),
        (3 * GIB + 400 * MIB, "uncertain"),
        (3 * GIB + 300 * MIB, "uncertain"),
        (3 * GIB + 298 * MIB, "no"),
    ],
)
def test_it_fits_if_it_fits_at_the_worst_of_what_is_unknown(usable: int, verdict: str) -> None:
    assert predicted(trace_of([GIB, 2 * GIB], [1, 2, -1, -2], 2), usable).fits == verdict


def test_what_fits_only_after_the_cache_was_given_back_is_told() -> None:
    # Two small blocks are cached when a large one comes: together they do not fit.
    trace = trace_of([GIB, GIB, 2 * GIB], [1, 2, -1, -2, 3, -3], 2)
    roomy, tight = predicted(trace), predicted(trace, 3 * GIB)
    assert (roomy.fits, roomy.num_retries) == ("yes", 0)
    assert (tight.fits, tight.num_retries) == ("yes", 1)
    assert (roomy.reserved_bytes, tight.reserved_bytes) == (4 * GIB, 2 * GIB)


def convolved(**more: Any) -> Trace:
    """A tensor of 1 GiB, and a convolution that reads two of such."""
    convolution = Convolution(
        at_event=1,
        direction="filter gradient",
        dtype="float32",
        input_shape=(4, 4, 4096, 4096),
        weight_shape=(4, 4, 5, 5),
        output_shape=(4, 4, 4096, 4096),
        stride=(1, 1),
        dilation=(1, 1),
    )
    return replace(trace_of([GIB], [1], 2), convolutions=(convolution,), **more)


COPIES = 2 * GIB + 2 * MIB  # as the allocator rounds them, with the filter
EITHER = replace(card(16 * GIB), tf32="as fast as fp32")
FAST = replace(card(16 * GIB), tf32="faster than fp32")


def test_the_workspace_of_convolutions_is_an_unknown_that_widens_the_bar() -> None:
    plain = predicted(trace_of([GIB], [1], 2))
    wide = assemble(convolved(), VARIANT, EITHER)
    assert wide.high_bytes == plain.high_bytes + COPIES
    assert wide.device_bytes == plain.device_bytes
    (named,) = (unknown for unknown in wide.unknowns if "cuDNN" in unknown.what)
    assert (named.low_bytes, named.high_bytes) == (0, COPIES)


def test_a_copy_for_tensor_cores_is_likely_where_they_are_faster() -> None:
    told = assemble(convolved(), VARIANT, FAST)
    assert told.reserved_bytes == GIB + COPIES
    assert told.low_bytes < GIB + 300 * MIB  # it may also do without


def test_without_leave_to_use_tf32_there_is_no_such_copy() -> None:
    told = assemble(convolved(allows_tf32=False), VARIANT, FAST)
    assert told.reserved_bytes == GIB


def test_no_workspace_makes_a_model_too_large_for_a_card() -> None:
    told = assemble(convolved(), VARIANT, replace(card(1700 * MIB), tf32="faster than fp32"))
    assert (told.fits, told.reserved_bytes) == ("yes", GIB)


def test_where_cudnn_measures_it_may_try_all_the_room_there_is() -> None:
    told = predicted(convolved(measures_convolutions=True))
    assert told.high_bytes >= 16 * GIB
    assert any("benchmark" in unknown.what for unknown in told.unknowns)


def test_the_kernels_of_cudnn_count_where_there_are_convolutions() -> None:
    libraries = Interval(0, 300 * MIB, 600 * MIB, "published")
    eager = replace(card(16 * GIB), cudnn=libraries)
    plain, more = (assemble(t, VARIANT, eager) for t in (trace_of([GIB], [1], 2), convolved()))
    assert more.device_bytes == plain.device_bytes + 300 * MIB
    assert more.high_bytes == plain.high_bytes + 600 * MIB
    assert any("own kernels" in unknown.what for unknown in more.unknowns)
    assert not any("own kernels" in unknown.what for unknown in plain.unknowns)


def test_empty_tensors_take_nothing() -> None:
    assert predicted(trace_of([0, MIB], [1, 2, -1, -2], 2)).allocated_bytes == MIB


@given(st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=30))
def test_live_allocated_reserved_and_device_stand_in_this_order(sizes: list[int]) -> None:
    events = list(range(1, len(sizes) + 1))
    told = predicted(trace_of(sizes, events, 2))
    assert sum(told.by_category.values()) <= told.allocated_bytes <= told.reserved_bytes
    assert told.low_bytes <= told.device_bytes <= told.high_bytes


def test_nccl_is_taken_beside_the_context_and_named() -> None:
    trace = trace_of([GIB], [1], 2)
    alone = card(16 * GIB)
    together = replace(alone, nccl=Interval(500 * MIB, 700 * MIB, 1500 * MIB, "published"))
    on_two = replace(VARIANT, num_gpus=2, sharding="ddp")
    one, two = assemble(trace, on_two, alone), assemble(trace, on_two, together)
    assert two.device_bytes == one.device_bytes + 700 * MIB
    assert two.low_bytes == one.low_bytes + 500 * MIB
    assert two.high_bytes == one.high_bytes + 1500 * MIB
    assert any("NCCL" in unknown.what for unknown in two.unknowns)


def test_all_gpus_together_make_the_samples_of_a_second() -> None:
    trace = trace_of([GIB], [1], 2)
    time = StepTime(
        step_s=0.5,
        gpu_busy_s=0.5,
        host_s=0.1,
        bound_by="arithmetic",
        low_s=0.4,
        high_s=0.6,
    )
    four = Variant(micro_batch=2, accumulation=3, num_gpus=4, sharding="fsdp")
    assert assemble(trace, four, card(16 * GIB), time=time).samples_per_s == 48


EMULATED = Card(
    name="emulated", usable=exactly(2 * GIB, "as given"), context=NOTHING, is_emulated=True
)


def test_the_emulated_gpu_has_a_narrow_bar_and_no_workspaces() -> None:
    found = assemble(convolved(), VARIANT, EMULATED)
    assert found.high_bytes - found.device_bytes == int(0.01 * found.reserved_bytes)
    assert [unknown.what for unknown in found.unknowns] == [
        "what the CPU's kernels keep for backward unlike CUDA's"
    ]


def test_recurrent_layers_on_the_emulated_gpu_are_doubted() -> None:
    real = replace(EMULATED, is_emulated=False)
    assert doubt_on(EMULATED, ["mm", "_cudnn_rnn"]) is not None
    assert doubt_on(EMULATED, ["mm"]) is None
    assert doubt_on(real, ["_cudnn_rnn"]) is None


def test_a_figure_that_fits_into_its_room_fits_at_the_worst() -> None:
    outside = Interval(100 * MIB, 200 * MIB, 300 * MIB, "published")
    for kind in KINDS:
        worst, best = room_for_figures(kind, card(GIB), outside)
        ratio = width_of(kind).ratio
        assert worst * (1 + ratio) + 40 * MIB == pytest.approx(GIB - 300 * MIB)
        assert best * (1 - ratio) - 40 * MIB == pytest.approx(GIB - 100 * MIB)
