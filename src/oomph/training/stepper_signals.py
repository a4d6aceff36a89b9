"""Ctrl-C in the middle of an update -> right after it: an update is done whole or not begun.

Signals are held back only in the main thread, where Python delivers them, and only those that a
Python function handles: another's default action ends the process, which holds no half of anything.
"""

from __future__ import annotations

# The functions of signal turn numbers into enums, which takes ten times as long.
import _signal  # type: ignore[import-not-found]
import threading
from types import FrameType, TracebackType
from typing import Any

_HELD = (int(_signal.SIGINT), int(_signal.SIGTERM))


class SignalsHeld:
    """Around what must be done whole. What came in the meantime is delivered at the end."""

    __slots__ = ("_handlers", "_received")

    def __enter__(self) -> None:
        self._received: list[tuple[int, FrameType | None]] = []
        self._handlers: dict[int, Any] = {}
        if threading.get_ident() != threading.main_thread().ident:
            return
        for number in _HELD:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._handlers[number] = handler
                _signal.signal(number, self._note)

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        for number, handler in self._handlers.items():
            _signal.signal(number, handler)
        received, self._received = self._received, []
        for number, frame in received:
            self._handlers[number](number, frame)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._received.append((number, frame))
