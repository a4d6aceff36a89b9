"""Work in a child that may end at any moment -> its answer.

Unlike in `tracing.child`, the answer is handed over from wherever the script is, by a call that
does not return: no `except` and no `finally` of the script's can come between. The child and all
that it has started are one group of processes, and end together.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable
from typing import Any, NoReturn

from oomph.errors import UserCodeError
from oomph.tracing.child import outcome_of, stay_on_one_thread

Outcome = tuple[bool, Any]
HandOver = Callable[[Outcome], NoReturn]

_LENGTH = struct.Struct("<Q")
_PR_SET_DUMPABLE = 4  # include/uapi/linux/prctl.h
_PATIENCE_S = 0.2
_GRACE_S = 30  # beyond the child's own limit, if even its watchdog cannot run


def in_a_group(work: Callable[[HandOver], Any], limit_s: float) -> Any:
    """Do `work` in a forked child. Raises what it hands over as a failure."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _run(work, writing)
    os.close(writing)
    try:
        answer = _wait(child, reading, time.monotonic() + limit_s + _GRACE_S)
    finally:
        os.close(reading)
        status = _end(child)
    if answer is None:
        raise UserCodeError(
            "the rehearsal of the script ended without an answer",
            because=f"its process ended with {status}",
            attempt="running the script by itself",
        )
    # Written by our own child a moment ago.
    is_well, result = pickle.loads(answer)  # noqa: S301
    if is_well:
        return result
    raise result


def _wait(child: int, reading: int, until: float) -> bytes | None:
    """The answer, as soon as it is whole: processes of the script's may hold the pipe open."""
    received = b""
    is_over = False
    while not is_over and time.monotonic() < until:
        if not select.select([reading], [], [], _PATIENCE_S)[0]:
            is_over = _has_ended(child)
            continue
        part = os.read(reading, 1 << 20)
        received += part
        is_over = not part or _is_whole(received)
    return received[_LENGTH.size :] if _is_whole(received) else None


def _is_whole(received: bytes) -> bool:
    has_length = len(received) >= _LENGTH.size
    return has_length and len(received) >= _LENGTH.size + _LENGTH.unpack_from(received)[0]


def _has_ended(child: int) -> bool:
    """Without taking its status, which keeps its number from being given to another."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: int) -> int:
    """End the child and all of its group."""
    with contextlib.suppress(
        ProcessLookupError, PermissionError
    ):  # it may have ended, or not begun
        os.kill(child, signal.SIGKILL)
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _run(work: Callable[[HandOver], Any], writing: int) -> NoReturn:
    os.setpgid(0, 0)
    _be_like_any_other()
    own = os.getpid()

    def hand_over(outcome: Outcome) -> NoReturn:
        if os.getpid() != own:  # a process that the script has forked does not answer for it
            os._exit(1)
        code = 1
        try:
            answer = pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(_LENGTH.pack(len(answer)) + answer)
            code = 0
        finally:
            os._exit(code)

    os.dup2(2, 1)  # what the script prints is not the answer
    sys.stdout = sys.stderr
    _give_a_terminal()
    stay_on_one_thread()
    hand_over(outcome_of(lambda: work(hand_over)))


def _be_like_any_other() -> None:
    """A sandbox's own processes refuse to be looked into, and a fork of them does, too."""
    if sys.platform == "linux":
        import ctypes

        one, unused = ctypes.c_ulong(1), ctypes.c_ulong(0)
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, one, unused, unused, unused)


def _give_a_terminal() -> None:
    """Progress bars ask the terminal for its width; whoever asks the user hears nothing."""
    try:
        main, terminal = os.openpty()
    except OSError:  # no terminals here: nothing to read is what a batch job has, too
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        return
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    os.write(main, b"\x04" * 64)  # the end of input
    os.dup2(terminal, 0)
    sys.stdin = os.fdopen(0, closefd=False)
