"""The rules of torch's caching allocator, one by one, and what holds for all sequences."""

from __future__ import annotations

from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.errors import UsageError
from oomph.predicting.allocator import CachingAllocator, OutOfMemory, PlacedBlock
from oomph.predicting.allocator_settings import AllocatorSettings, parse_settings
from oomph.predicting.replay import EMPTY_CACHE, replay
from oomph.predicting.segments import Reservation, SimulatedDevice
from oomph.units import GIB, KIB, MIB

EXPANDABLE = AllocatorSettings(expandable_segments=True)


def on_gpu(free_bytes: int, conf: str = "", total_bytes: int | None = None) -> CachingAllocator:
    device = SimulatedDevice(free_bytes, total_bytes=total_bytes)
    return CachingAllocator(parse_settings(conf), device)


def states(allocator: CachingAllocator) -> list[tuple[int, str]]:
    """The sizes in MiB and the states, by address."""
    return [(block.size_bytes // MIB, block.state) for block in allocator.blocks()]


# ---- segments, splitting and merging -------------------------------------------------------------


def test_small_requests_share_a_segment_of_two_mebibytes() -> None:
    allocator = CachingAllocator()
    first, second = allocator.malloc(100), allocator.malloc(1000)
    assert second == first + 512
    assert allocator.reserved_bytes == 2 * MIB
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (512 + 1024, 1100)


def test_small_and_large_requests_never_share() -> None:
    allocator = CachingAllocator()
    allocator.malloc(MIB + 1)  # its segment has 19 MiB left
    allocator.malloc(MIB)
    assert allocator.reserved_bytes == 22 * MIB


def test_a_large_block_keeps_a_rest_of_up_to_one_mebibyte() -> None:
    allocator = CachingAllocator()
    allocator.malloc(11 * MIB)
    assert states(allocator) == [(12, "live")]
    assert (allocator.allocated_bytes, allocator.requested_bytes) == (12 * MIB, 11 * MIB)


def test_a_large_block_is_split_if_more_than_one_mebibyte_remains() -> None:
    allocator = CachingAllocator()
    allocator.malloc(5 * MIB)
    assert states(allocator) == [(5, "live"), (15, "free")]
    allocator.malloc(14 * MIB - 512)
    assert states(allocator)[1:] == [(13, "live"), (1, "free")]


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    allocator = CachingAllocator()
    addresses = {size: allocator.malloc(size * MIB) for size in (40, 20, 30)}
    for address in addresses.values():
        allocator.free(address)
    assert allocator.malloc(18 * MIB) == addresses[20]
    assert allocator.malloc(28 * MIB) == addresses[30]


def test_among_equals_the_lowest_address_is_taken() -> None:
    allocator = CachingAllocator()
    addresses = [allocator.malloc(20 * MIB) for _ in range(3)]
    for address in (addresses[1], addresses[2], addresses[0]):
        allocator.free(address)
    assert [allocator.malloc(20 * MIB) for _ in range(3)] == addresses


def test_a_stream_takes_only_its_own_blocks() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(20 * MIB, stream=1))
    allocator.malloc(20 * MIB, stream=2)
    assert allocator.reserved_bytes == 40 * MIB


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_freeing_merges_with_both_neighbours_and_restores_the_segment(
    order: tuple[int, ...],
) -> None:
    allocator = CachingAllocator()
    addresses = [allocator.malloc(3 * MIB) for _ in range(3)]
    for number in order:
        allocator.free(addresses[number])
    assert states(allocator) == [(20, "free")]


def test_a_block_that_other_streams_use_stays_active_until_they_are_done() -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(20 * MIB)
    allocator.free_requested(address)
    assert (allocator.allocated_bytes, allocator.active_bytes) == (0, 20 * MIB)
    assert allocator.malloc(20 * MIB) != address
    allocator.free_completed(address)
    assert allocator.malloc(20 * MIB) == address


@pytest.mark.parametrize("free", ["free", "free_requested", "free_completed"])
def test_what_is_not_live_cannot_be_freed(free: str) -> None:
    allocator = CachingAllocator()
    address = allocator.malloc(512)
    allocator.free(address)
    with pytest.raises(UsageError, match="no block at 0x"):
        getattr(allocator, free)(address)


# ---- giving back, and running out ----------------------------------------------------------------


def test_emptying_the_cache_gives_back_whole_segments_only() -> None:
    allocator = CachingAllocator()
    kept, freed, whole = (allocator.malloc(size * MIB) for size in (3, 3, 30))
    allocator.free(freed)
    allocator.free(whole)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 20 * MIB
    allocator.free(kept)
    allocator.empty_cache()
    assert allocator.reserved_bytes == 0
    assert (allocator.num_cuda_mallocs, allocator.num_cuda_frees) == (2, 2)
    assert allocator.num_retries == 0


def test_when_cuda_has_no_room_the_cache_is_released_and_it_is_tried_again() -> None:
    allocator = on_gpu(100 * MIB)
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    assert (allocator.num_retries, allocator.reserved_bytes) == (1, 70 * MIB)
    assert allocator.peak_reserved_bytes == 70 * MIB


def test_before_the_release_pending_frees_are_waited_for() -> None:
    allocator = on_gpu(100 * MIB)
    allocator.free_requested(allocator.malloc(60 * MIB))
    allocator.malloc(70 * MIB)
    assert (allocator.active_bytes, allocator.reserved_bytes) == (70 * MIB, 70 * MIB)


def test_running_out_tells_the_figures_and_leaves_the_allocator_usable() -> None:
    allocator = on_gpu(100 * MIB)
    kept = allocator.malloc(5 * MIB)
    allocator.free(allocator.malloc(40 * MIB))
    with pytest.raises(OutOfMemory) as raised:
        allocator.malloc(90 * MIB)
    shortage = raised.value.shortage
    assert shortage.requested_bytes == 90 * MIB
    assert shortage.allocated_bytes == 5 * MIB
    assert shortage.reserved_bytes == 20 * MIB  # the 40 MiB were given back
    assert shortage.largest_free_block_bytes == 15 * MIB
    assert shortage.device_free_bytes == 80 * MIB
    assert allocator.malloc(15 * MIB) == kept + 5 * MIB
    allocator.malloc(80 * MIB)


def test_a_memory_fraction_is_of_the_whole_gpu_and_limits_what_is_reserved() -> None:
    allocator = on_gpu(100 * MIB, "per_process_memory_fraction:0.25", total_bytes=160 * MIB)
    allocator.malloc(40 * MIB)
    with pytest.raises(OutOfMemory):
        allocator.malloc(512)


# ---- settings ------------------------------------------------------------------------------------


def test_a_block_from_max_split_on_is_not_for_smaller_requests() -> None:
    allocator = on_gpu(GIB, "max_split_size_mb:32")
    large = allocator.malloc(32 * MIB)
    allocator.free(large)
    assert allocator.malloc(20 * MIB) != large
    larger = allocator.malloc(40 * MIB)
    allocator.free(larger)
    assert allocator.malloc(38 * MIB) == larger
    assert states(allocator) == [(32, "free"), (20, "live"), (40, "live")]  # whole


def test_a_block_that_cannot_be_split_may_be_only_so_much_too_large() -> None:
    allocator = on_gpu(GIB, "max_split_size_mb:32,max_non_split_rounding_mb:20")
    large = allocator.malloc(80 * MIB)
    allocator.free(large)
    assert allocator.malloc(60 * MIB) != large
    assert allocator.malloc(62 * MIB) == large


def test_with_max_split_only_as_much_is_released_as_is_needed() -> None:
    allocator = on_gpu(200 * MIB, "max_split_size_mb:32")
    addresses = [allocator.malloc(size * MIB) for size in (40, 50, 90, 20)]
    for address in addresses:
        allocator.free(address)
    allocator.malloc(60 * MIB)  # 90 is too large to use, and large enough to give back
    assert (allocator.num_cuda_frees, allocator.num_retries) == (1, 0)
    assert allocator.reserved_bytes == (40 + 50 + 20 + 60) * MIB


def test_with_max_split_several_are_released_from_the_largest_down() -> None:
    allocator = on_gpu(130 * MIB, "max_split_size_mb:32")
    addresses = [allocator.malloc(size * MIB) for size in (34, 40, 50)]
    for address in addresses:
        allocator.free(address)
    allocator.malloc(80 * MIB)
    assert (allocator.num_cuda_frees, allocator.num_retries) == (2, 0)
    assert allocator.reserved_bytes == (34 + 80) * MIB


def test_with_max_split_all_is_released_if_the_large_blocks_do_not_suffice() -> None:
    allocator = on_gpu(100 * MIB, "max_split_size_mb:32")
    addresses = [allocator.malloc(size * MIB) for size in (34, 30, 30)]
    for address in addresses:
        allocator.free(address)
    allocator.malloc(80 * MIB)
    assert (allocator.num_cuda_frees, allocator.num_retries) == (3, 1)


def test_garbage_collection_frees_the_blocks_that_waited_longest() -> None:
    conf = "garbage_collection_threshold:0.5,per_process_memory_fraction:0.5"
    allocator = on_gpu(400 * MIB, conf)
    old, young, busy = (allocator.malloc(size * MIB) for size in (40, 42, 44))
    allocator.free(old)
    for _ in range(3):
        allocator.free(busy)
        allocator.malloc(44 * MIB)
    allocator.free(young)
    allocator.malloc(60 * MIB)  # nothing fits, and 126 of 200 MiB are reserved
    assert (allocator.num_cuda_frees, allocator.num_retries) == (1, 0)
    assert states(allocator) == [(42, "free"), (44, "live"), (60, "live")]


def test_garbage_collection_frees_an_only_block() -> None:
    conf = "garbage_collection_threshold:0.1,per_process_memory_fraction:0.5"
    allocator = on_gpu(400 * MIB, conf)
    allocator.free(allocator.malloc(40 * MIB))
    allocator.malloc(60 * MIB)
    assert states(allocator) == [(60, "live")]


def test_garbage_is_not_collected_without_a_memory_fraction() -> None:
    allocator = on_gpu(200 * MIB, "garbage_collection_threshold:0.1")
    allocator.free(allocator.malloc(60 * MIB))
    allocator.malloc(80 * MIB)
    assert allocator.num_cuda_frees == 0


def test_roundup_makes_requests_of_different_sizes_share_blocks() -> None:
    allocator = on_gpu(GIB, "roundup_power2_divisions:4")
    address = allocator.malloc(33 * MIB)
    assert allocator.allocated_bytes == 40 * MIB
    allocator.free(address)
    assert allocator.malloc(39 * MIB) == address


# ---- expandable segments -------------------------------------------------------------------------


def test_an_expandable_segment_grows_in_place_by_pages() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first = allocator.malloc(15 * MIB)
    assert allocator.reserved_bytes == 20 * MIB
    assert allocator.malloc(15 * MIB) == first + 15 * MIB
    assert allocator.reserved_bytes == 40 * MIB
    assert allocator.malloc(KIB) not in range(first, first + 40 * MIB)
    assert allocator.reserved_bytes == 42 * MIB  # the small pool's pages have 2 MiB


def test_what_cannot_be_split_natively_is_split_in_an_expandable_segment() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.malloc(20 * MIB - 512)
    assert allocator.allocated_bytes == 20 * MIB - 512


def test_pages_in_the_middle_are_unmapped_and_filled_again_from_the_lowest() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    addresses = [allocator.malloc(40 * MIB) for _ in range(3)]
    allocator.free(addresses[1])
    allocator.empty_cache()
    assert allocator.reserved_bytes == 80 * MIB
    assert [block.state for block in allocator.blocks()] == ["live", "live"]
    assert allocator.malloc(30 * MIB) == addresses[1]
    assert allocator.reserved_bytes == 120 * MIB


def test_only_whole_pages_are_unmapped() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    first, middle, last = (allocator.malloc(size * MIB) for size in (10, 60, 10))
    allocator.free(middle)
    allocator.empty_cache()  # of 10 to 70 MiB the pages from 20 to 60
    assert states(allocator) == [(10, "live"), (10, "free"), (10, "free"), (10, "live")]
    allocator.free(first)
    allocator.free(last)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.blocks()) == (0, [])


def test_a_block_that_can_grow_is_left_for_larger_requests() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    hole, wall, last = (allocator.malloc(size * MIB) for size in (38, 20, 20))
    allocator.free(hole)
    allocator.free(last)  # 22 MiB, with all of the address space behind them
    assert wall == hole + 38 * MIB
    assert allocator.malloc(15 * MIB) == hole


def test_expandable_segments_fit_where_native_ones_are_fragmented() -> None:
    def leave_a_hole_and_ask(conf: str) -> CachingAllocator:
        allocator = on_gpu(200 * MIB, conf)
        allocator.free(allocator.malloc(100 * MIB))
        allocator.malloc(60 * MIB)
        allocator.malloc(110 * MIB)
        return allocator

    with pytest.raises(OutOfMemory):
        leave_a_hole_and_ask("")
    assert leave_a_hole_and_ask("expandable_segments:True").reserved_bytes == 180 * MIB


def free_segment(address: int, size_mib: int) -> list[PlacedBlock]:
    return [PlacedBlock(address, size_mib * MIB, 0, "free")]


def test_expandable_blocks_are_not_used_any_more_when_the_setting_is_off() -> None:
    allocator = CachingAllocator()
    expandable = Reservation(GIB, 40 * MIB, 20 * MIB)
    allocator.adopt(free_segment(GIB, 40), stream=0, is_small=False, reservation=expandable)
    allocator.adopt(free_segment(2 * GIB, 60), stream=0, is_small=False)
    assert allocator.malloc(40 * MIB) == 2 * GIB
    assert allocator.malloc(30 * MIB) not in range(GIB, GIB + 40 * MIB)
    allocator.empty_cache()
    assert GIB not in [block.address for block in allocator.blocks()]


def test_native_blocks_are_still_used_when_the_setting_is_on() -> None:
    allocator = CachingAllocator(EXPANDABLE)
    allocator.adopt(free_segment(GIB, 40), stream=0, is_small=False)
    assert allocator.malloc(30 * MIB) == GIB
    assert allocator.reserved_bytes == 40 * MIB


def test_a_failed_growth_leaves_what_it_mapped_as_free_memory() -> None:
    allocator = on_gpu(100 * MIB, "expandable_segments:True")
    first, second, third = (allocator.malloc(20 * MIB) for _ in range(3))
    allocator.free(first)
    allocator.free(third)
    allocator.empty_cache()
    with pytest.raises(OutOfMemory):
        allocator.malloc(100 * MIB)
    allocator.free(second)
    assert allocator.malloc(95 * MIB) == first


def test_a_gpu_of_which_nothing_is_left_runs_out_with_segments_that_grow_too() -> None:
    for conf in ("", "expandable_segments:True"):
        with pytest.raises(OutOfMemory):
            on_gpu(0, conf).malloc(100)


# ---- many at once --------------------------------------------------------------------------------


def test_a_replay_tells_the_peaks_and_their_events() -> None:
    result = replay(CachingAllocator(), [30 * MIB, 50 * MIB, 20 * MIB], [1, 2, -1, 3, -2, -3])
    assert (result.peak_allocated_bytes, result.peak_reserved_bytes) == (80 * MIB, 80 * MIB)
    assert (result.num_retries, result.ran_out_at) == (0, None)


def test_a_replay_ends_where_memory_runs_out() -> None:
    allocator = on_gpu(100 * MIB)
    assert replay(allocator, [60 * MIB, 50 * MIB, MIB], [1, 2, 3]).ran_out_at == 1
    assert allocator.device.free_bytes == 40 * MIB


def test_a_replay_can_empty_the_cache() -> None:
    allocator = CachingAllocator()
    result = replay(allocator, [60 * MIB, 40 * MIB], [1, -1, EMPTY_CACHE, 2])
    assert (result.peak_reserved_bytes, allocator.num_cuda_frees) == (60 * MIB, 1)


def test_a_replay_of_nothing_has_no_peak() -> None:
    result = replay(CachingAllocator(), [], [])
    assert (result.peak_reserved_bytes, result.ran_out_at) == (0, None)


def test_a_replay_knows_streams() -> None:
    events = [1, -1, 2]
    assert replay(CachingAllocator(), [MIB, MIB], events).peak_reserved_bytes == 2 * MIB
    other = replay(CachingAllocator(), [MIB, MIB], events, streams=[0, 1])
    assert other.peak_reserved_bytes == 4 * MIB


# ---- what holds for all sequences ----------------------------------------------------------------

CONFIGURATIONS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:24",
    "max_split_size_mb:24,expandable_segments:True",
    "roundup_power2_divisions:[1:2,>:8]",
    "garbage_collection_threshold:0.4,per_process_memory_fraction:0.7",
)
request_sizes = st.one_of(
    st.integers(1, 8 * KIB), st.integers(1, 2 * MIB), st.integers(1, 64 * MIB)
)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    """Sizes, streams, and events: requests and frees of what is live, in any order."""
    sizes = draw(st.lists(request_sizes, min_size=1, max_size=40))
    streams = draw(st.lists(st.integers(0, 1), min_size=len(sizes), max_size=len(sizes)))
    events: list[int] = []
    live: list[int] = []
    for number in range(1, len(sizes) + 1):
        for _ in range(min(draw(st.integers(0, 2)), len(live))):
            freed = live.pop(draw(st.integers(0, len(live) - 1)))
            events.append(-freed)
        if draw(st.integers(0, 15)) == 0:
            events.append(EMPTY_CACHE)
        events.append(number)
        live.append(number)
    return sizes, streams, events


def check(allocator: CachingAllocator) -> None:
    blocks = allocator.blocks()
    for block, after in pairwise(blocks):
        assert block.address + block.size_bytes <= after.address
    assert sum(block.size_bytes for block in blocks) == allocator.reserved_bytes
    live = [block for block in blocks if block.state == "live"]
    assert sum(block.size_bytes for block in live) == allocator.allocated_bytes
    assert sum(block.requested_bytes for block in live) == allocator.requested_bytes
    assert allocator.requested_bytes <= allocator.allocated_bytes <= allocator.reserved_bytes
    assert allocator.num_cuda_frees <= allocator.num_cuda_mallocs


def peaks(allocator: CachingAllocator) -> tuple[int, ...]:
    return (
        allocator.peak_allocated_bytes,
        allocator.peak_active_bytes,
        allocator.peak_requested_bytes,
        allocator.peak_reserved_bytes,
    )


@settings(deadline=None)
@given(
    sequence=sequences(),
    conf=st.sampled_from(CONFIGURATIONS),
    free_bytes=st.sampled_from([64 * MIB, 300 * MIB, 100 * GIB]),
)
def test_blocks_never_overlap_and_the_counters_are_their_sums(
    sequence: tuple[list[int], list[int], list[int]], conf: str, free_bytes: int
) -> None:
    sizes, streams, events = sequence
    allocator = on_gpu(free_bytes, conf)
    live: dict[int, int] = {}
    for event in events:
        before = peaks(allocator)
        if event == EMPTY_CACHE:
            allocator.empty_cache()
        elif event > 0:
            with suppress(OutOfMemory):
                live[event] = allocator.malloc(sizes[event - 1], streams[event - 1])
        elif -event in live:
            allocator.free(live.pop(-event))
        check(allocator)
        assert all(now >= then for now, then in zip(peaks(allocator), before, strict=True))
        assert allocator.reserved_bytes <= free_bytes
        assert allocator.reserved_bytes + allocator.device.free_bytes == free_bytes
    for address in live.values():
        allocator.free(address)
    allocator.empty_cache()
    assert (allocator.reserved_bytes, allocator.allocated_bytes, allocator.blocks()) == (0, 0, [])


@settings(deadline=None)
@given(
    sequence=sequences(),
    conf=st.sampled_from(CONFIGURATIONS),
    free_bytes=st.sampled_from([300 * MIB, 100 * GIB]),
)
def test_a_replay_comes_to_the_same_as_its_calls_one_by_one(
    sequence: tuple[list[int], list[int], list[int]], conf: str, free_bytes: int
) -> None:
    sizes, streams, events = sequence
    at_once, one_by_one = on_gpu(free_bytes, conf), on_gpu(free_bytes, conf)
    result = replay(at_once, sizes, events, streams)
    addresses: dict[int, int] = {}
    for event in events[: result.ran_out_at]:
        if event == EMPTY_CACHE:
            one_by_one.empty_cache()
        elif event > 0:
            addresses[event] = one_by_one.malloc(sizes[event - 1], streams[event - 1])
        else:
            one_by_one.free(addresses.pop(-event))
    if result.ran_out_at is not None:
        event = events[result.ran_out_at]
        with pytest.raises(OutOfMemory):
            one_by_one.malloc(sizes[event - 1], streams[event - 1])
    assert at_once.blocks() == one_by_one.blocks()
    assert peaks(at_once) == peaks(one_by_one)
    assert result.peak_reserved_bytes == one_by_one.peak_reserved_bytes
    assert result.num_retries == one_by_one.num_retries
