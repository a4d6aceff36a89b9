"""Answers from a thread of its own, whatever the question does."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from oomph.sensing.background import Background


def until(condition: Callable[[], bool]) -> None:
    """Wait as long as it takes."""
    while not condition():
        time.sleep(0.002)


def test_the_newest_answer_is_there_and_is_announced() -> None:
    answers, announced = iter(range(1000)), threading.Event()
    background = Background(lambda: next(answers), 0.01, announced.set)
    background.start()
    announced.wait()
    until(lambda: background.newest is not None and background.newest.value >= 3)
    background.stop()


def test_while_a_question_hangs_the_last_answer_stays_and_the_time_is_told() -> None:
    let_go, num_asked = threading.Event(), 0

    def ask() -> int:
        nonlocal num_asked
        num_asked += 1
        if num_asked == 2:
            let_go.wait()
        return num_asked

    background = Background(ask, 0.02, lambda: None)
    background.start()
    until(lambda: num_asked == 2)
    until(lambda: background.waiting_s() > 0.2)
    assert background.newest is not None
    assert background.newest.value == 1
    let_go.set()
    until(lambda: background.newest is not None and background.newest.value >= 3)
    background.stop()
    # Ticks that were missed are left out, so that a history has a gap of the right length.
    assert background.newest.number >= 10


def test_a_question_that_raises_ends_it_and_says_why() -> None:
    def ask() -> int:
        raise LookupError("nonsense")

    announced = threading.Event()
    background = Background(ask, 0.01, announced.set)
    background.start()
    announced.wait()
    with pytest.raises(LookupError, match="nonsense"):
        raise background.error or AssertionError
