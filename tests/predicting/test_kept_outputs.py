"""A loop that keeps what the model returned holds it until the next call has returned."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.replay import with_outputs_kept
from oomph.records.trace import Convolution, Phase, Trace
from predicting.test_scaling import trace_of


def returning(
    outputs: set[int], events: list[int], starts: list[tuple[int, Phase]], phase: Phase = "forward"
) -> Trace:
    """A trace whose allocations of these numbers, counted from 1, were returned."""
    trace = trace_of([512] * max(events), events, 2)
    allocations = [
        replace(each, is_output=number in outputs, phase=phase)
        for number, each in enumerate(trace.allocations, 1)
    ]
    return replace(trace, allocations=allocations, phase_starts=starts)


def test_it_dies_when_the_last_of_the_next_outputs_is_there() -> None:
    starts: list[tuple[int, Phase]] = [(0, "forward"), (3, "forward")]
    trace = returning({1, 2, 4, 5}, [1, 2, -1, 3, 4, 5, -3, -2, -4, -5], starts)
    assert with_outputs_kept(trace).events == [1, 2, 3, 4, 5, -1, -3, -2]


def test_what_lives_longer_anyway_is_left_as_it_is() -> None:
    starts: list[tuple[int, Phase]] = [(0, "forward"), (1, "forward")]
    trace = returning({1, 2}, [1, 2, 3, -3, -1], starts)
    assert with_outputs_kept(trace).events == trace.events


def test_places_among_the_events_move_with_them() -> None:
    starts: list[tuple[int, Phase]] = [(0, "forward"), (2, "forward"), (3, "backward")]
    convolution = Convolution(
        at_event=3,
        direction="forward",
        dtype="float32",
        input_shape=(1, 1, 3, 3),
        weight_shape=(1, 1, 3, 3),
        output_shape=(1, 1, 1, 1),
        stride=(1, 1),
        dilation=(1, 1),
    )
    trace = replace(returning({1, 2}, [1, -1, 2, -2], starts), convolutions=(convolution,))
    moved = with_outputs_kept(trace)
    assert moved.events == [1, 2, -1]
    assert moved.phase_starts == [(0, "forward"), (1, "forward"), (3, "backward")]
    assert moved.convolutions[0].at_event == 3


def test_a_batch_that_is_returned_is_no_output_of_the_forward_pass() -> None:
    starts: list[tuple[int, Phase]] = [(0, "input"), (2, "input")]
    trace = returning({1, 2}, [1, -1, 2, -2], starts, phase="input")
    assert with_outputs_kept(trace).events == trace.events


@given(st.data())
def test_nothing_is_lost_and_nothing_is_freed_before_it_is_there(data: st.DataObject) -> None:
    num = data.draw(st.integers(1, 12))
    events: list[int] = []
    for number in range(1, num + 1):
        events.append(number)
        living = [one for one in events if one > 0 and -one not in events]
        events += [-one for one in data.draw(st.lists(st.sampled_from(living), unique=True))]
    places = data.draw(st.lists(st.integers(0, len(events)), max_size=4).map(sorted))
    outputs = data.draw(st.sets(st.integers(1, num)))
    starts: list[tuple[int, Phase]] = [(place, "forward") for place in places]
    kept = with_outputs_kept(returning(outputs, events, starts)).events
    assert [event for event in kept if event > 0] == list(range(1, num + 1))
    for place, event in enumerate(kept):
        assert event > 0 or -event in kept[:place]
    never = {-event for event in events if event < 0} - {-event for event in kept if event < 0}
    assert never <= outputs  # only those of the last forward stay
