"""The peak: how much, when, and who."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from oomph.predicting.timeline import by_category, by_module, find_peak, live_at, moment_of
from predicting.test_scaling import trace_of


def test_the_peak_is_the_first_moment_of_the_most_live_bytes() -> None:
    trace = trace_of([10, 30, 5, 30], [1, 2, -2, 3, -1, 4], micro_batch=2)
    peak = find_peak(trace)
    assert (peak.live_bytes, peak.at_event) == (40, 1)
    assert [holder.size_bytes for holder in peak.holders] == [10, 30]
    assert moment_of(trace, peak.at_event).phase == "forward"
    assert by_category(peak.holders) == {"activations": 40}
    assert by_module(peak.holders) == {"": 40}


@given(st.lists(st.tuples(st.integers(0, 1000), st.booleans()), max_size=40))
def test_the_holders_of_the_peak_add_up_to_it(blocks: list[tuple[int, bool]]) -> None:
    events: list[int] = []
    for number, (_, dies_at_once) in enumerate(blocks, start=1):
        events += [number, -number] if dies_at_once else [number]
    trace = trace_of([size for size, _ in blocks], events, micro_batch=2)
    peak = find_peak(trace)
    assert sum(holder.size_bytes for holder in peak.holders) == (peak.live_bytes if blocks else 0)


def test_what_was_freed_is_not_alive() -> None:
    assert live_at([1, 2, -1, 3], 3) == [1, 2]
