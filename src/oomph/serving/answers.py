"""Costly answers, made once for all who ask at the same time, and kept for a moment.

Reading a run of weeks takes a second of CPU. Fifty viewers who ask for it at once wait for the one
who asked first; whoever asks within the next seconds gets the same.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Answer = TypeVar("Answer")


class Kept(Generic[Answer]):
    """The last few answers of a function, each for `fresh_s` seconds. Safe from any thread."""

    def __init__(self, fresh_s: float, most: int) -> None:
        self._fresh_s = fresh_s
        self._most = most
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, tuple[float, Answer]] = OrderedDict()

    def get(self, question: Hashable, make: Callable[[], Answer]) -> Answer:
        """The answer, made anew where it is not kept. One at a time: they share the cores."""
        with self._lock:
            kept = self._answers.get(question)
            if kept is not None and time.monotonic() - kept[0] < self._fresh_s:
                return kept[1]
            answer = make()
            self._answers[question] = (time.monotonic(), answer)
            self._answers.move_to_end(question)
            while len(self._answers) > self._most:
                self._answers.popitem(last=False)
            return answer
