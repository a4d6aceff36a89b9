"""The quick replay gives, to the byte, what torch's allocator as it was ported gives."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.quick_replay import replay_quickly
from oomph.predicting.replay import Replayed, Requests, replay, replay_requests
from oomph.predicting.segments import UNLIMITED_BYTES, SimulatedDevice
from oomph.units import KIB, MIB, TIB

# Sizes around every limit of the allocator: rounding, the small pool, segments of their own.
SIZES = st.one_of(
    st.sampled_from([0, 1, 512, 513, MIB - 1, MIB, MIB + 1, 2 * MIB, 10 * MIB - 1, 10 * MIB]),
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 60 * MIB),
)


@st.composite
def lists_of_requests(draw: st.DrawFn) -> Requests:
    """Requests and frees in any order, on one or two streams, some of them dispensable."""
    sizes = draw(st.lists(SIZES, min_size=1, max_size=60))
    events: list[int] = []
    live: list[int] = []
    for number in range(1, len(sizes) + 1):
        while draw(st.booleans()) and live:
            events.append(-live.pop(draw(st.integers(0, len(live) - 1))))
        if not draw(st.integers(0, 20)):
            events.append(0)
        events.append(number)
        live.append(number)
    streams: list[int] | None = draw(
        st.none() | st.lists(st.integers(0, 3), min_size=len(sizes), max_size=len(sizes))
    )
    dispensable = draw(st.frozensets(st.sampled_from(range(1, len(sizes) + 1)), max_size=5))
    return Requests(sizes, events, streams, dispensable)


def reference(requests: Requests, limit_bytes: int, *, is_expandable: bool) -> Replayed:
    chosen = AllocatorSettings(expandable_segments=is_expandable)
    return replay(CachingAllocator(chosen, SimulatedDevice(limit_bytes)), *requests)


@settings(max_examples=400)
@given(lists_of_requests(), st.booleans(), st.floats(0.3, 1.2))
@example(Requests([TIB, TIB], [1, 2, -1, -2], None), True, 1.0)
def test_any_list_of_requests_has_the_figures_of_the_reference(
    requests: Requests, is_expandable: bool, share: float
) -> None:
    unlimited = reference(requests, UNLIMITED_BYTES, is_expandable=is_expandable)
    limited = int(unlimited.peak_reserved_bytes * share)
    chosen = AllocatorSettings(expandable_segments=is_expandable)
    assert replay_requests(requests, chosen, None) == unlimited
    expected = reference(requests, limited, is_expandable=is_expandable)
    assert replay_requests(requests, chosen, limited) == expected


@pytest.mark.parametrize("is_expandable", [False, True])
def test_what_does_not_reach_the_limit_is_never_left_to_the_reference(is_expandable: bool) -> None:
    requests = Requests([30 * MIB, MIB, 50 * MIB, 20 * MIB], [1, 2, -1, 3, 4, -2, -4, -3])
    most = reference(requests, UNLIMITED_BYTES, is_expandable=is_expandable).peak_reserved_bytes
    for limit_bytes in (most, UNLIMITED_BYTES):
        assert replay_quickly(*requests, limit_bytes, is_expandable=is_expandable) is not None


def test_where_the_cache_is_released_the_reference_is_not_asked() -> None:
    requests = Requests([60 * MIB, 90 * MIB], [1, -1, 2])
    quick = replay_quickly(*requests, 100 * MIB, is_expandable=False)
    assert quick == (90 * MIB, 90 * MIB, 1, None)
    assert replay_quickly(*requests, 40 * MIB, is_expandable=False) == (0, 0, 1, 0)
