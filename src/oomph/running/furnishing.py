"""A bare process -> what a script expects to find: a terminal, its streams, Python's Ctrl-C."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import struct
import sys
import termios

ROWS_AND_COLUMNS = (24, 80)
# Each lets one read of the terminal end: what asks for input is told that there is none.
NUM_ENDS_OF_INPUT = 1000


def furnish(terminal: int) -> None:
    """What the user's code finds: a terminal that says nothing, streams, no core files."""
    os.dup2(terminal, 0)
    os.close(terminal)
    sys.stdin = os.fdopen(0, "r", closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, errors="replace", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # 1, not 0: the kernel then does not start a core handler outside either (fs/coredump.c).
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    if hard != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


def make_terminal() -> int:
    """A terminal of 80 columns at which nobody types. Its other end stays open in this process."""
    try:
        ours, theirs = os.openpty()
    except OSError:  # no pseudo-terminals here
        return os.open(os.devnull, os.O_RDONLY)
    modes = termios.tcgetattr(theirs)
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(theirs, termios.TCSANOW, modes)
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", *ROWS_AND_COLUMNS, 0, 0))
    end_of_input = bytes(modes[6][termios.VEOF])
    os.write(ours, end_of_input * NUM_ENDS_OF_INPUT)
    return theirs
