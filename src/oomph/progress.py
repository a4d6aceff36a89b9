"""How far the work is -> one line on a terminal that is kept up to date, or lines in a log.

A forked child may say where it is as well: it writes to a pipe, and only the process that made the
Progress shows anything.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from oomph.units import format_duration

_TICK_S = 0.5  # how often a terminal's line is renewed; judgement
_BEATS_S = (10.0, 30.0)  # without a terminal: the first line, and from one to the next; judgement
_MOST_WRITTEN = 500  # bytes of one message; a pipe takes 512 at once on every system
_DETAIL = "\x01"  # before what only adds to the line

_shown: list[Progress | Relay] = []  # what is shown now, in this process and its forks


class Progress:
    """Shows what is being done, and for how long it has been going on.

    >>> with Progress("reading") as say:
    ...     say("comparing")
    """

    def __init__(self, first: str) -> None:
        self._what, self._detail = first, ""
        self._start = time.monotonic()
        self._stream = sys.stderr
        self._own_pid = os.getpid()
        self._is_terminal = self._stream is not None and self._stream.isatty()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep_up, daemon=True)
        self._reading, self._writing = -1, -1

    def __enter__(self) -> Progress:
        if hasattr(os, "fork"):
            self._reading, self._writing = os.pipe()
            os.set_blocking(self._reading, False)
            os.set_blocking(self._writing, False)
        _shown.append(self)
        if self._is_terminal:
            self._draw()
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()
        self._thread.join()
        _shown.remove(self)
        for end in {self._reading, self._writing} - {-1}:
            os.close(end)
        if self._is_terminal:
            self._write("\r\033[K")

    def __call__(self, what: str) -> None:
        """Show what begins now."""
        if os.getpid() != self._own_pid:
            self._send(what)
            return
        self._what, self._detail = what, ""
        if self._is_terminal:
            self._draw()

    def detail(self, text: str) -> None:
        """Show how far it is, beside what it is."""
        if os.getpid() != self._own_pid:
            self._send(_DETAIL + text)
        else:
            self._detail = text

    def __reduce__(self) -> tuple[object, ...]:
        return _teller, ()  # in a new process: whatever is shown there, which may tell its parent

    # ---- showing ---------------------------------------------------------------------------------

    def _keep_up(self) -> None:
        """Show what children say, and that the work is still going on."""
        next_beat_s = _BEATS_S[0]
        while not self._is_over.wait(_TICK_S):
            self._receive()
            if self._is_terminal:
                self._draw()
            elif time.monotonic() - self._start >= next_beat_s:
                next_beat_s += _BEATS_S[1]
                self._write(f"oomph: {self._line()}\n")

    def _line(self) -> str:
        passed = format_duration(time.monotonic() - self._start)
        detail = f" ({self._detail})" if self._detail else ""
        return f"{passed}: {self._what}{detail}"

    def _draw(self) -> None:
        self._write(f"\r\033[K{self._line()[: self._width()]}")

    def _width(self) -> int:
        try:
            columns = os.get_terminal_size(self._stream.fileno()).columns
        except (OSError, ValueError):
            columns = 0
        return (columns or 80) - 1  # 0 if the terminal has no size

    def _write(self, text: str) -> None:
        """Write past Python's buffers: a lock that this thread held would be held in a fork."""
        with contextlib.suppress(OSError, ValueError, AttributeError):  # nobody is looking any more
            os.write(self._stream.fileno(), text.encode("utf-8", "replace"))

    # ---- from children ---------------------------------------------------------------------------

    def _send(self, text: str) -> None:
        with contextlib.suppress(OSError):  # full, or closed: the line is for looking at
            line = text.replace("\n", " ").encode("utf-8", "replace")[:_MOST_WRITTEN]
            os.write(self._writing, line + b"\n")

    def _receive(self) -> None:
        if self._reading < 0:
            return
        with contextlib.suppress(BlockingIOError):
            for line in os.read(self._reading, 1 << 16).decode("utf-8", "replace").splitlines():
                if line.startswith(_DETAIL):
                    self._detail = line.removeprefix(_DETAIL)
                else:
                    self._what, self._detail = line, ""


class Relay:
    """Stands for a Progress in a process that was started anew, and passes on what is said."""

    def __init__(self, send: Callable[[str, str], None]) -> None:
        self._send = send
        _shown.append(self)

    def __call__(self, what: str) -> None:
        self._send("says", what)

    def detail(self, text: str) -> None:
        self._send("adds", text)


def tell(what: str) -> None:
    """Show what begins now, if anything is shown."""
    if _shown:
        _shown[-1](what)


def _teller() -> Callable[[str], None]:
    return tell


def silent(_what: str) -> None:
    """Show nothing, where nobody wants to know how far the work is."""


def is_shown() -> bool:
    """Return whether somebody can see how far the work is."""
    return bool(_shown)


def tell_detail(text: str) -> None:
    """Say how far the work is that is shown now, if any is."""
    if _shown:
        _shown[-1].detail(text)
