"""Recordings that the replica makes of itself: what is truncated, refused or broken in them."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomph.predicting.allocator import CachingAllocator, OutOfMemory
from oomph.predicting.allocator_settings import AllocatorSettings, parse_settings
from oomph.predicting.recorded import recorded_requests, recorded_settings, state_before
from oomph.predicting.replay import EMPTY_CACHE, replay
from oomph.predicting.reproduction import Reproduction, reproduce
from oomph.units import GIB, KIB, MIB
from predicting.recording import Recorder


def reproduced(recorder: Recorder, begin: int = 0, **options: int) -> Reproduction:
    return reproduce(recorder.segments(), recorder.trace[begin:], recorder.settings, **options)


def play(recorder: Recorder, steps: list[tuple[int, int, int]]) -> None:
    """Requests, frees, pending frees and releases, as numbers choose them."""
    live: list[int] = []
    for kind, choice, size in steps:
        if kind < 5 or not live:
            with suppress(OutOfMemory):
                live.append(recorder.malloc(size, stream=choice % 3 // 2))
        elif kind < 8:
            recorder.free(live.pop(choice % len(live)))
        elif kind == 8:
            recorder.free_requested(live.pop(choice % len(live)))
        else:
            recorder.empty_cache()


steps = st.lists(
    st.tuples(
        st.integers(0, 9),
        st.integers(0, 1000),
        st.one_of(st.integers(1, 64 * KIB), st.integers(1, 4 * MIB), st.integers(1, 60 * MIB)),
    ),
    min_size=1,
    max_size=60,
)
CONFIGURATIONS = ("", "expandable_segments:True", "max_split_size_mb:24")


@settings(deadline=None)
@given(steps=steps, conf=st.sampled_from(CONFIGURATIONS), limit=st.sampled_from([200, 10000]))
def test_a_whole_recording_is_reproduced_exactly(
    steps: list[tuple[int, int, int]], conf: str, limit: int
) -> None:
    recorder = Recorder(parse_settings(conf), limit * MIB)
    play(recorder, steps)
    result = reproduced(recorder)
    assert result.problem is None
    assert result.num_exact_allocs == result.num_allocs
    assert result.num_exact_segment_events == result.num_segment_events
    assert result.num_exact_blocks == result.num_blocks
    assert result.peak_reserved_bytes == recorder.peak_reserved_bytes
    assert result.num_retries == recorder.num_retries
    assert result.budget_bytes <= limit * MIB < (result.too_much_bytes or GIB * GIB)


@settings(deadline=None)
@given(steps=steps, conf=st.sampled_from(CONFIGURATIONS))
def test_given_only_the_budget_the_failures_are_predicted(
    steps: list[tuple[int, int, int]], conf: str
) -> None:
    recorder = Recorder(parse_settings(conf), 200 * MIB)
    play(recorder, steps)
    result = reproduced(recorder, budget_bytes=200 * MIB)
    assert result.problem is None
    assert result.num_retries == recorder.num_retries


@settings(deadline=None)
@given(steps=steps, conf=st.sampled_from(CONFIGURATIONS), data=st.data())
def test_what_lived_before_a_truncated_trace_is_found(
    steps: list[tuple[int, int, int]], conf: str, data: st.DataObject
) -> None:
    recorder = Recorder(parse_settings(conf), 300 * MIB)
    play(recorder, steps)
    begin = data.draw(st.integers(0, len(recorder.trace)))
    active: set[int] = set()
    for event in recorder.trace[:begin]:
        if event["action"] == "alloc":
            active.add(event["addr"])
        elif event["action"] == "free_completed":
            active.remove(event["addr"])
    before = state_before(recorder.segments(), recorder.trace[begin:], recorder.settings)
    assert {block.address for held in before.segments for block in held.live} == active


def test_a_block_that_could_not_be_split_has_all_of_its_segment() -> None:
    recorder = Recorder(parse_settings("max_split_size_mb:24"))
    recorder.free(recorder.malloc(40 * MIB))
    kept = recorder.malloc(25 * MIB)  # takes all of the 40
    begin = len(recorder.trace)
    recorder.malloc(10 * MIB)
    recorder.free(kept)
    assert reproduced(recorder, begin).problem is None


def test_a_trace_that_begins_in_the_middle_of_a_release_is_reproduced() -> None:
    recorder = Recorder(free_bytes=100 * MIB)
    recorder.free_requested(recorder.malloc(40 * MIB))
    recorder.free(recorder.malloc(30 * MIB))
    recorder.malloc(40 * MIB)  # now the first 40 are waited for, and all is given back
    actions = [event["action"] for event in recorder.trace]
    begin = actions.index("segment_free")
    assert actions[begin - 1] == "free_completed"
    for cut in (0, begin - 1, begin, begin + 1):
        assert reproduced(recorder, cut).problem is None


def test_slack_inside_a_segment_is_known_by_the_next_request() -> None:
    recorder = Recorder()
    first = recorder.malloc(3 * MIB)
    second = recorder.malloc(2 * MIB)
    third = recorder.malloc(4 * MIB)
    recorder.free(first)
    first = recorder.malloc(2 * MIB + 512 * KIB)  # keeps the half MiB behind it
    recorder.free(second)
    begin = len(recorder.trace)
    assert recorder.malloc(2 * MIB) == second
    recorder.free(first)
    recorder.free(third)
    recorder.malloc(5 * MIB)
    assert reproduced(recorder, begin).problem is None


def test_running_out_is_found_at_its_event_and_tells_the_budget() -> None:
    recorder = Recorder(AllocatorSettings(expandable_segments=True), 100 * MIB)
    recorder.malloc(50 * MIB)
    with pytest.raises(OutOfMemory):
        recorder.malloc(60 * MIB)
    recorder.malloc(30 * MIB)
    result = reproduced(recorder)
    assert result.problem is None
    assert [recorder.trace[at]["action"] for at in result.ran_out_at] == ["oom"]
    assert result.budget_bytes == 100 * MIB


def test_a_request_that_runs_out_only_here_is_a_difference() -> None:
    recorder = Recorder(free_bytes=100 * MIB)
    recorder.malloc(50 * MIB)
    recorder.malloc(40 * MIB)
    assert reproduced(recorder, budget_bytes=60 * MIB).problem == (
        "event 3: memory runs out, which is not recorded"
    )


def test_emptying_the_cache_is_told_from_a_refusal_by_its_place_in_the_program() -> None:
    recorder = Recorder(free_bytes=100 * MIB)
    recorder.free(recorder.malloc(40 * MIB))
    recorder.empty_cache()
    recorder.free(recorder.malloc(60 * MIB))
    recorder.malloc(70 * MIB)
    assert reproduced(recorder).num_retries == recorder.num_retries == 1


def test_without_places_a_refusal_is_known_by_its_size() -> None:
    recorder = Recorder(free_bytes=100 * MIB)
    recorder.free(recorder.malloc(40 * MIB))
    recorder.empty_cache()
    recorder.free(recorder.malloc(20 * MIB))  # beside the 40 there was room for it
    recorder.malloc(90 * MIB)
    for event in recorder.trace:
        del event["frames"]
    result = reproduced(recorder)
    assert (result.problem, result.num_retries) == (None, 1)
    assert result.too_much_bytes == 110 * MIB


def test_another_address_is_a_difference() -> None:
    recorder = Recorder()
    recorder.malloc(2 * MIB)
    recorder.malloc(2 * MIB)
    recorder.trace[-1]["addr"] += 512
    recorder.trace.append({**recorder.trace[-1], "action": "free_requested"})
    recorder.trace.append({**recorder.trace[-1], "action": "free_completed"})
    result = reproduced(recorder)
    assert not result.is_exact
    assert result.num_exact_allocs < result.num_allocs


def test_private_pools_are_not_modelled_and_it_says_so() -> None:
    recorder = Recorder()
    recorder.malloc(2 * MIB)
    segments = [{**segment, "segment_pool_id": (0, 1)} for segment in recorder.segments()]
    result = reproduce(segments, recorder.trace, recorder.settings)
    assert result.problem == "before the first event: private pools are not modelled"


@settings(deadline=None)
@given(steps=steps, conf=st.sampled_from(CONFIGURATIONS), data=st.data())
def test_a_broken_recording_is_a_problem_and_not_a_crash(
    steps: list[tuple[int, int, int]], conf: str, data: st.DataObject
) -> None:
    recorder = Recorder(parse_settings(conf), 300 * MIB)
    play(recorder, steps)
    trace: list[dict[str, Any]] = [dict(event) for event in recorder.trace]
    at = data.draw(st.integers(0, len(trace) - 1))
    change = data.draw(st.sampled_from(["drop", "repeat", "move", "resize", "rename"]))
    if change == "drop":
        del trace[at]
    elif change == "repeat":
        trace.insert(at, trace[at])
    elif change == "move":
        trace[at]["addr"] += data.draw(st.sampled_from([-512, 512, 2 * MIB]))
    elif change == "resize":
        trace[at]["size"] *= 3
    else:
        trace[at]["action"] = data.draw(st.sampled_from(["alloc", "segment_free", "annotate"]))
    reproduce(recorder.segments(), trace, recorder.settings)


def test_the_requests_of_a_recording_can_be_put_to_another_allocator() -> None:
    recorder = Recorder(free_bytes=GIB)
    before = recorder.malloc(30 * MIB)
    begin = len(recorder.trace)
    recorder.free(before)
    recorder.empty_cache()
    recorder.free(recorder.malloc(50 * MIB, stream=5))
    trace = recorder.trace[begin:]
    held = state_before(recorder.segments(), trace, recorder.settings).segments
    requests = recorded_requests(held, trace)
    assert requests.sizes == (30 * MIB, 50 * MIB)
    assert requests.events == (1, -1, EMPTY_CACHE, 2, -2)
    assert requests.streams == (0, 5)
    result = replay(CachingAllocator(), requests.sizes, requests.events, requests.streams)
    assert result.peak_reserved_bytes == recorder.peak_reserved_bytes


def test_the_settings_of_a_recording_are_those_that_were_in_force() -> None:
    written = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True,large_segment_size_mb:40",
        "max_split_size": -1,
        "garbage_collection_threshold": 0.0,
        "expandable_segments": False,  # switched off since
        "roundup_power2_divisions": {str(2**power): 0 for power in range(16)},
    }
    found = recorded_settings(written, [])
    assert (found.expandable_segments, found.max_split_bytes) == (False, None)
    assert found.large_segment_bytes == 40 * MIB
    assert found.divisions_by_interval() == ()


def test_before_settings_were_recorded_the_segments_show_whether_they_expand() -> None:
    assert recorded_settings(None, [{"is_expandable": True}]).expandable_segments
    assert not recorded_settings(None, [{}]).expandable_segments
