"""A question -> its newest answer, asked at a steady pace on a thread of its own.

NVML can hang for many seconds (a GPU that falls off the bus, a driver that is reloaded). Whoever
looks here meanwhile sees the last answer, and for how long there has been no other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    value: T
    number: int  # of the tick that it was asked at; ticks that were missed leave a gap


class Background(Generic[T]):
    """Asks on each tick; a tick that comes while an answer is still due is missed."""

    def __init__(
        self, ask: Callable[[], T], interval_s: float, on_answer: Callable[[], None]
    ) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._on_answer = on_answer
        self._stopped = threading.Event()
        self._asked_at_s: float | None = None
        self.newest: Answer[T] | None = None
        self.error: BaseException | None = None  # it asks no more: this is why
        # A daemon, because a call that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._work, name="oomph-readings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def waiting_s(self) -> float:
        """For how long the answer that is due now has been due."""
        asked_at_s = self._asked_at_s
        return 0.0 if asked_at_s is None else time.monotonic() - asked_at_s

    def _work(self) -> None:
        try:
            self._ask_again_and_again()
        except BaseException as error:  # noqa: BLE001 - raised again where it can be seen
            self.error = error
        self._on_answer()

    def _ask_again_and_again(self) -> None:
        began_s = time.monotonic()
        number = 0
        while not self._stopped.is_set():
            self._asked_at_s = time.monotonic()
            value = self._ask()
            self._asked_at_s = None
            self.newest = Answer(value, number)
            self._on_answer()
            passed_s = time.monotonic() - began_s
            number = int(passed_s / self._interval_s) + 1
            self._stopped.wait(began_s + number * self._interval_s - time.monotonic())
