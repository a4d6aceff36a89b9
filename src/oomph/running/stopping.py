"""What was asked for has been seen -> the command ends: politely, then firmly.

As Ctrl-C would do it, to every process of the run: a script that saves on KeyboardInterrupt gets
the time to. Then SIGTERM, then SIGKILL.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence

# A checkpoint of tens of gigabytes takes about so long to write; SIGTERM's handlers end quickly.
_GRACES_S = ((signal.SIGINT, 30.0), (signal.SIGTERM, 10.0), (signal.SIGKILL, 5.0))


class Stopping:
    """Asked by the thread that waits for the command; told by the one that watches it."""

    def __init__(self, pids: Callable[[], Sequence[int]]) -> None:
        self.pids = pids
        self._wanted = threading.Event()
        self._step = 0
        self._next: float | None = None

    def want(self) -> None:
        """From any thread: it is enough."""
        self._wanted.set()

    @property
    def is_wanted(self) -> bool:
        return self._wanted.is_set()

    @property
    def has_begun(self) -> bool:
        return self._step > 0

    def next_signal(self, now: float) -> signal.Signals | None:
        """What to send now, if anything."""
        if not self._wanted.is_set() or (self._next is not None and now < self._next):
            return None
        number, grace_s = _GRACES_S[min(self._step, len(_GRACES_S) - 1)]
        self._step += 1
        self._next = now + grace_s
        return number
