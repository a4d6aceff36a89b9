"""Lines -> the terminal, in place: only changed lines are rewritten.

Uses the alternate screen, without echo. However it ends (a key, Ctrl-C, a signal, an exception),
the terminal is restored; also while stopped by Ctrl-Z. Only SIGKILL leaves it changed: `reset`
fixes that.

Limits: POSIX, on the main thread; the sequences are those of ECMA-48 and xterm.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import sys
import termios
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Any

# Alternate screen, no cursor, no wrapping at the edge (a terminal may count cells differently).
_ENTER = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[2J"
_LEAVE = "\x1b[0m\x1b[?7h\x1b[?25h\x1b[?1049l"
# Clear before writing: after a full line the cursor is on its last cell.
_LINE = "\x1b[{};1H\x1b[2K{}\x1b[0m"
_CLEAR_FROM = "\x1b[{};1H\x1b[J"
_UNKNOWN_SIZE = (80, 24)
_MOST_KEY_BYTES = 1024


class Ended(BaseException):
    """A signal asks the process to end. Not an Exception, so that no handler swallows it."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(signal.Signals(number).name)


class Screen:
    """Control the terminal behind standard output (and input, for keys) while we use it."""

    def __init__(self) -> None:
        self._output = sys.stdout.fileno()
        self._input = _terminal_input()
        self._modes_before: list[Any] | None = None
        self._shown: list[str] = []
        self._is_ours = False
        self._is_leaving = False
        self._is_stop_wanted = False
        self._was_stopped = False
        # Never closed: a hung thread may want to wake us much later.
        self._wake_read, self._wake_write = os.pipe()
        for end in (self._wake_read, self._wake_write):
            os.set_blocking(end, False)

    @property
    def hears_keys(self) -> bool:
        return self._input is not None

    @property
    def is_blank(self) -> bool:
        """Return whether all of it has to be drawn: at the start, after Ctrl-Z or a new size."""
        return not self._shown

    def size(self) -> tuple[int, int]:
        """Return columns and lines."""
        try:
            size = os.get_terminal_size(self._output)
        except OSError:  # the terminal is gone
            return _UNKNOWN_SIZE
        return size.columns or _UNKNOWN_SIZE[0], size.lines or _UNKNOWN_SIZE[1]

    # ---- take and restore

    @contextlib.contextmanager
    def taken(self) -> Iterator[Screen]:
        """Take the terminal; restore it in any case."""
        with self._signals():
            try:
                try:
                    self._enter()
                    yield self
                finally:
                    self._leave()
            finally:  # a signal can arrive between the block's end and the first line of _leave
                self._leave()

    def _enter(self) -> None:
        self._is_leaving = False
        if self._input is not None:
            with _a_lost_terminal_hangs_up():
                modes = termios.tcgetattr(self._input)
            if self._modes_before is None:
                self._modes_before = [*modes[:6], list(modes[6])]
            # Read keys as they are pressed, without echo. Ctrl-C, Ctrl-Z and Ctrl-\ stay signals.
            modes[3] &= ~(termios.ICANON | termios.ECHO)
            modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
            termios.tcsetattr(self._input, termios.TCSANOW, modes)
        self._shown = []
        self._is_ours = True
        self._write(_ENTER)

    def _leave(self) -> None:
        self._is_leaving = True  # from here on no signal interrupts
        if not self._is_ours:
            return
        self._is_ours = False
        before, self._modes_before = self._modes_before, None
        with contextlib.suppress(OSError, termios.error, Ended):  # the terminal may be gone
            if before is not None and self._input is not None:
                termios.tcsetattr(self._input, termios.TCSANOW, before)
            self._write(_LEAVE)

    # ---- writing

    def show(self, lines: Sequence[str]) -> None:
        """Make the screen show these lines."""
        parts = []
        for i, line in enumerate(lines):
            if i >= len(self._shown) or self._shown[i] != line:
                parts.append(_LINE.format(i + 1, line))
        if len(lines) < len(self._shown):
            parts.append(_CLEAR_FROM.format(len(lines) + 1))
        self._shown = list(lines)
        if parts:
            self._write("".join(parts))

    def _write(self, text: str) -> None:
        left = text.encode(sys.stdout.encoding or "utf-8", "replace")
        while left:
            # Another process on this terminal may have made it non-blocking.
            select.select([], [self._output], [])
            with _a_lost_terminal_hangs_up():
                left = left[os.write(self._output, left) :]

    # ---- waiting

    def wake(self) -> None:
        """End a `wait`, from any thread."""
        with contextlib.suppress(BlockingIOError):  # full: it is about to wake
            os.write(self._wake_write, b"\0")

    def wait(self, timeout_s: float) -> bytes:
        """Wait for keys, a `wake`, a signal or a timeout; return the keys."""
        inputs = [self._wake_read] if self._input is None else [self._wake_read, self._input]
        ready, _, _ = select.select(inputs, [], [], timeout_s)
        if self._wake_read in ready:
            os.read(self._wake_read, 1 << 16)
        if self._is_stop_wanted:
            self._stop()
        if self._was_stopped:  # also by SIGSTOP: the shell has used the terminal meanwhile
            self._was_stopped = False
            self._enter()
        if self._input not in ready or self._input is None:
            return b""
        with _a_lost_terminal_hangs_up():
            keys = os.read(self._input, _MOST_KEY_BYTES)
        if not keys:  # as a lost terminal reads, too
            raise Ended(signal.SIGHUP)
        return keys

    def _stop(self) -> None:
        """Handle Ctrl-Z: restore the terminal, stop, and take the terminal again on SIGCONT."""
        self._is_stop_wanted = False
        self._leave()
        self._is_leaving = False  # a SIGTERM while it is stopped ends it
        ours = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTSTP)  # stops here, until SIGCONT
        signal.signal(signal.SIGTSTP, ours)
        self._was_stopped = True

    # ---- signals

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        ends = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
        handlers = {
            **dict.fromkeys(ends, self._end),
            signal.SIGTSTP: self._want_stop,
            signal.SIGCONT: self._go_on,
            signal.SIGWINCH: self._repaint,
        }
        before: dict[Any, Any] = {n: signal.signal(n, handler) for n, handler in handlers.items()}
        woken_before = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken_before)
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, number: int, _frame: FrameType | None) -> None:
        if not self._is_leaving:
            raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

    def _want_stop(self, _number: int, _frame: FrameType | None) -> None:
        self._is_stop_wanted = True

    def _go_on(self, _number: int, _frame: FrameType | None) -> None:
        self._was_stopped = True

    def _repaint(self, _number: int, _frame: FrameType | None) -> None:
        self._shown = []


@contextlib.contextmanager
def _a_lost_terminal_hangs_up() -> Iterator[None]:
    """End as by SIGHUP where the terminal turns out to be gone: its signal may come later."""
    try:
        yield
    except (OSError, termios.error) as error:
        if error.args[0] == errno.EIO:
            raise Ended(signal.SIGHUP) from error
        raise


def _terminal_input() -> int | None:
    """Return standard input's descriptor, if keys can come from it."""
    try:
        number = sys.stdin.fileno()
    except (AttributeError, OSError, ValueError):  # closed, or replaced
        return None
    return number if os.isatty(number) else None
