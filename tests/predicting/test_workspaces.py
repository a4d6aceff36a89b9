"""What cuDNN may take beside the tensors is an interval of replays, each by a named rule."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.convolutions import NOTHING, WHAT_IS_READ, WHAT_IS_READ_AND_WRITTEN
from oomph.predicting.demand import Replays, replays_of, requests
from oomph.predicting.replay import replay
from oomph.predicting.segments import SimulatedDevice
from oomph.records.gpu_model import Tf32
from oomph.records.trace import Convolution, Trace
from oomph.units import MIB
from predicting.test_scaling import trace_of

ROOMY = 2**50


def convolution(at_event: int = 1, factor: int = 1, dtype: str = "float32") -> Convolution:
    """A filter gradient that reads 20 and 40 bytes per factor, and writes 100."""
    return Convolution(
        at_event=at_event,
        direction="filter gradient",
        dtype=dtype,
        input_shape=(factor, 4, 5, 1),
        weight_shape=(1, 1, 5, 5),
        output_shape=(factor, 4, 5, 2),
        stride=(1, 1),
        dilation=(1, 1),
    )


def convolved(sizes: list[int], *places: int, factor: int = MIB) -> Trace:
    """Takes all, gives all back, with convolutions after so many events."""
    events = [*range(1, len(sizes) + 1), *range(-len(sizes), 0)]
    return replace(
        trace_of(sizes, events, 2),
        convolutions=tuple(convolution(place, factor=factor) for place in places),
    )


def replays(trace: Trace, tf32: Tf32 = "as fast as fp32") -> Replays:
    return replays_of(trace, AllocatorSettings(), tf32)


def test_a_workspace_stands_where_its_kernel_runs_and_is_given_back_at_once() -> None:
    trace = convolved([512, 0, 512], 2, factor=1)
    asked = requests(trace, WHAT_IS_READ)
    # The second tensor is empty: nothing is asked for it.
    assert list(asked.events) == [1, 4, -4, 3, -3, -1]
    assert asked.sizes[3] == 80 + 160 + 100
    assert asked.dispensable == {4}
    assert list(requests(trace).events) == [1, 3, -3, -1]


def test_what_can_be_done_without_never_makes_memory_run_out() -> None:
    allocator = CachingAllocator(AllocatorSettings(), SimulatedDevice(20 * MIB))
    done = replay(allocator, [15 * MIB, 90 * MIB], [1, 2, -2, -1], dispensable={2})
    assert done.ran_out_at is None
    assert done.peak_reserved_bytes == 16 * MIB
    allocator = CachingAllocator(AllocatorSettings(), SimulatedDevice(20 * MIB))
    assert replay(allocator, [15 * MIB, 90 * MIB], [1, 2, -2, -1]).ran_out_at == 1


def test_without_convolutions_there_is_no_interval() -> None:
    least, most = replays(convolved([30 * MIB])).reserved_bytes(ROOMY)
    assert least == most == 30 * MIB


def test_on_a_card_without_room_the_workspace_is_done_without() -> None:
    trace = convolved([30 * MIB, 30 * MIB], 2)
    fast = replays(trace, "faster than fp32")
    assert fast.likely(ROOMY)[1].peak_reserved_bytes == 60 * MIB + 242 * MIB
    assert fast.likely(64 * MIB)[1].peak_reserved_bytes == 60 * MIB
    assert fast.all_fit(64 * MIB)
    assert not fast.any_fits(50 * MIB)


sizes = st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=12)


@given(sizes=sizes, place=st.integers(1, 12), factor=st.integers(1, MIB))
def test_the_interval_holds_every_rule(sizes: list[int], place: int, factor: int) -> None:
    trace = convolved(sizes, min(place, len(sizes)), factor=factor)
    least, most = replays(trace).reserved_bytes(ROOMY)
    for rule in (NOTHING, WHAT_IS_READ, WHAT_IS_READ_AND_WRITTEN):
        asked = requests(trace, rule)
        allocator = CachingAllocator(AllocatorSettings(), SimulatedDevice())
        assert least <= replay(allocator, asked.sizes, asked.events).peak_reserved_bytes <= most


# From 10 MiB on a request has a segment of its own; a smaller one may bring a larger segment.
@given(sizes=sizes, less=st.integers(MIB // 10, MIB), more=st.integers(0, MIB))
def test_more_workspace_never_lowers_the_high_end(sizes: list[int], less: int, more: int) -> None:
    # The kernel is the last to ask: tensors after it could lie in what it gave back.
    smaller = replays(convolved(sizes, len(sizes), factor=less)).reserved_bytes(ROOMY)
    larger = replays(convolved(sizes, len(sizes), factor=less + more)).reserved_bytes(ROOMY)
    assert larger[1] >= smaller[1]


@given(sizes=sizes, place=st.integers(1, 12), limit=st.integers(1, 512 * MIB))
def test_a_workspace_alone_is_never_why_it_does_not_fit(
    sizes: list[int], place: int, limit: int
) -> None:
    plain, more = convolved(sizes), convolved(sizes, min(place, len(sizes)))
    if replays(plain).any_fits(limit):
        assert replays(more).any_fits(limit)
