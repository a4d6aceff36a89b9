"""What an end means: host memory, GPU memory, or neither; and how a command is stopped."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from monitoring.diaries import gpu, gpu_span
from oomph.monitoring.wrapping import Ended, Evidence, Stopping, judge

NOTHING = Evidence(
    at_s=10.0,
    gpus=(gpu(total_bytes=100),),
    recent=(gpu_span(5, most_used_bytes=50),),
    says_out_of_memory=False,
    killed_in_group=False,
    killed_on_machine=False,
)
FULL = replace(NOTHING, recent=(gpu_span(5, most_used_bytes=97),))
FAILED, KILLED = Ended(1), Ended(None, signal.SIGKILL)


@pytest.mark.parametrize(
    ("ended", "evidence", "expected", "is_likely"),
    [
        (FAILED, NOTHING, None, False),
        (FAILED, FULL, "gpu", True),
        (Ended(0), FULL, None, False),
        (Ended(1, was_stopped=True), FULL, None, False),
        (KILLED, FULL, None, False),
        (FAILED, replace(FULL, gpus=(gpu(total_bytes=100, is_used=False),)), None, False),
        (FAILED, replace(FULL, gpus=(gpu(total_bytes=None),)), None, False),
        (FAILED, replace(NOTHING, says_out_of_memory=True), "gpu", False),
        (KILLED, replace(NOTHING, killed_in_group=True), "host", False),
        (FAILED, replace(NOTHING, killed_in_group=True), "host", False),  # a worker, by a launcher
        (KILLED, replace(NOTHING, killed_on_machine=True), "host", True),
        (Ended(137), replace(NOTHING, killed_on_machine=True), "host", True),
        (FAILED, replace(NOTHING, killed_on_machine=True), None, False),
        (Ended(0), replace(NOTHING, killed_in_group=True), None, False),
    ],
)
def test_an_end_is_judged_by_the_best_evidence_and_a_likeliness_is_called_one(
    ended: Ended, evidence: Evidence, expected: str | None, is_likely: bool
) -> None:
    ending, event = judge(ended, evidence)
    assert ending.out_of_memory == expected
    assert (event is not None) == is_likely
    if event:
        assert "probably" in event.text


def test_a_command_is_asked_then_told_then_killed() -> None:
    stopping = Stopping(tuple)
    assert stopping.next_signal(0.0) is None
    stopping.want()
    assert stopping.next_signal(1.0) == signal.SIGINT
    assert stopping.next_signal(30.9) is None
    assert stopping.next_signal(31.0) == signal.SIGTERM
    assert stopping.next_signal(41.0) == signal.SIGKILL
    assert stopping.next_signal(46.0) == signal.SIGKILL
