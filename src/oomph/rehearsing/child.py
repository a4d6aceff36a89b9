"""Work that patches torch -> its result, from a forked child process that is thrown away.

A fork has the user's functions as they are, including what they close over, and torch if it is
already imported. Whatever the child raises comes back as one error that names the user's own line.
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar

from oomph.errors import OomphError, UserCodeError
from oomph.rehearsing import fault
from oomph.sandbox import linux
from oomph.sandbox.conversation import LENGTH, write_frame
from oomph.sandbox.inside import make_terminal

T = TypeVar("T")
Outcome = tuple[bool, Any]  # whether it succeeded; what it returned, or the error it raised
HandOver = Callable[[Outcome], NoReturn]

_POLL_S = 0.2  # judgement: how often to check whether a silent child has ended
_GRACE_S = 30  # judgement: added to the child's own limit, in case even its watchdog cannot run


def in_a_child(work: Callable[[], T]) -> T:
    """Run `work` in a forked child. Raises what it raised, or UserCodeError."""
    begin = partial(_die_with, os.getpid())
    attempt = "running the workload's functions by themselves"
    return _result_of(begin, lambda _: work(), math.inf, attempt)


def in_a_group(work: Callable[[HandOver], T], limit_s: float) -> T:
    """Run `work` in a forked child that may answer, and so end, at any moment.

    The script's process hands over the answer by a call that does not return, so no `except` or
    `finally` of the script can interfere. The child and everything it starts form one process group
    and end together.
    """
    return _result_of(_lead_a_group, work, limit_s + _GRACE_S, "running the script by itself")


def _result_of(
    begin: Callable[[], None], work: Callable[[HandOver], T], limit_s: float, attempt: str
) -> T:
    child, reading = _forked(begin, work)
    try:
        answer = _wait(child, reading, time.monotonic() + limit_s)
    finally:  # also after Ctrl-C, when no one waits for the answer any more
        os.close(reading)
        status = _end(child)
    if answer is None:
        raise UserCodeError(
            "the rehearsal ended without an answer",
            because=f"its process ended with {status}",
            attempt=attempt,
        )
    succeeded, result = pickle.loads(answer)  # noqa: S301 - our own child wrote it a moment ago
    if not succeeded:
        raise result
    found: T = result
    return found


def _forked(begin: Callable[[], None], work: Callable[[HandOver], Any]) -> tuple[int, int]:
    """Fork a child that runs `work` and hands over the outcome -> its pid, the pipe to read."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            begin()
            os.dup2(2, 1)  # keep the user's prints out of the answer
            sys.stdout = sys.stderr
            stay_on_one_thread()
            hand_over = partial(_hand_over, writing, os.getpid())
            hand_over(_outcome_of(lambda: work(hand_over)))
        finally:
            os._exit(1)
    os.close(writing)
    return child, reading


def _hand_over(writing: int, own_pid: int, outcome: Outcome) -> NoReturn:
    """Write the outcome and end, skipping all of the parent's clean-up."""
    code = 1
    try:
        if os.getpid() == own_pid:  # a process forked by the user's code must not answer
            answer = pickle.dumps(outcome, protocol=pickle.HIGHEST_PROTOCOL)
            with os.fdopen(writing, "wb") as pipe:
                write_frame(pipe, answer)
            code = 0
    finally:
        os._exit(code)


# ---- how a child starts ------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """Die when the parent is killed: after its kill -9 no one waits for the answer.

    The kernel watches the thread that forked, which is the one waiting in `in_a_child`. Other
    systems than Linux have no such call; there the child runs until it has its answer.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # if the kernel refuses, behave as on other systems
            linux.die_with_parent()
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)


def _lead_a_group() -> None:
    os.setpgid(0, 0)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            linux.allow_tracing()  # the sandbox's processes refuse tracing, and forks inherit that
    os.dup2(make_terminal(), 0)
    sys.stdin = os.fdopen(0, closefd=False)


def stay_on_one_thread() -> None:
    """Use one thread: a fork has none of its parent's threads, so torch's pool would hang."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


# ---- waiting for the answer ----------------------------------------------------------------------


def _wait(child: int, reading: int, until: float) -> bytes | None:
    """Return the answer once it is complete; the script's processes may keep the pipe open."""
    ready = select.poll()  # not `select`, which knows no descriptor from 1024 on
    ready.register(reading, select.POLLIN)
    received = bytearray()  # a pipe gives 64 KiB at a time, and a trace has megabytes
    is_over = False
    while not is_over and time.monotonic() < until:
        if not ready.poll(_POLL_S * 1000):
            is_over = hasattr(os, "waitid") and _has_ended(child)  # macOS has it from Python 3.13
            continue
        part = os.read(reading, 1 << 20)
        received += part
        is_over = not part or _is_whole(received)
    return bytes(received[LENGTH.size :]) if _is_whole(received) else None


def _is_whole(received: bytearray) -> bool:
    has_length = len(received) >= LENGTH.size
    return has_length and len(received) >= LENGTH.size + LENGTH.unpack_from(received)[0]


def _has_ended(child: int) -> bool:
    """Check without reaping the child, so that its pid is not given to another process."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _end(child: int) -> int:
    """End a child and the group that it leads, if any -> how it ended, by itself or not."""
    # It may have ended already, or may not have become a group yet.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# ---- the answer --------------------------------------------------------------------------------


def _outcome_of(work: Callable[[], Any]) -> Outcome:
    try:
        return True, work()
    except OomphError as error:
        return False, error
    except SystemExit as error:
        return False, UserCodeError("the workload ended the program", because=f"exit({error.code})")
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        return False, explained(error)


def explained(error: BaseException) -> OomphError:
    """Return an error in the workload with the user's own line, or one that names oomph's limit."""
    attempt = "running its functions by themselves, on the CPU"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        attempt = "pip install torch, in the build for your driver"
    return fault.explained(error, "workload", attempt)
