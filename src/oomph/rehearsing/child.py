"""Work that patches torch -> its result, from a child process that is thrown away.

On Linux the child is a fork. It has the user's functions as they are, including what they close
over, and torch if it is already imported. Elsewhere a fork may crash, or there is none: a new
Python gets the work by pickle, which cannot hold what a notebook, a function or a lambda defines.
Whatever the child raises comes back as one error that names the user's own line.
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
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, BinaryIO, NoReturn, TypeVar, cast

from oomph import progress
from oomph.errors import NotOnThisSystem, OomphError, UserCodeError
from oomph.rehearsing import fault
from oomph.sandbox.conversation import LENGTH, read_frame, write_frame

T = TypeVar("T")
Outcome = tuple[bool, Any]  # whether it succeeded; what it returned, or the error it raised
HandOver = Callable[[Outcome], NoReturn]

_POLL_S = 0.2  # judgement: how often to check whether a silent child has ended
_GRACE_S = 30  # judgement: added to the child's own limit, in case even its watchdog cannot run


def forks() -> bool:
    """Return whether a child can be a fork of this process."""
    return sys.platform == "linux" and hasattr(os, "fork")


def in_a_child(work: Callable[[], T]) -> T:
    """Run `work` in a child. Raises what it raised, or UserCodeError."""
    if not forks():
        found: T = _in_a_new_python(work)
        return found
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
        raise _without_an_answer(status, attempt)
    found: T = _unpacked(pickle.loads(answer))  # noqa: S301 - our own child wrote it a moment ago
    return found


def _without_an_answer(status: int, attempt: str) -> UserCodeError:
    return UserCodeError(
        "the rehearsal ended without an answer",
        because=f"its process ended with {status}",
        attempt=attempt,
    )


def _unpacked(outcome: Outcome) -> Any:
    succeeded, result = outcome
    if not succeeded:
        raise result
    return result


def _forked(begin: Callable[[], None], work: Callable[[HandOver], Any]) -> tuple[int, int]:
    """Fork a child that runs `work` and hands over the outcome -> its pid, the pipe to read."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        # Python 3.12 warns about a fork in a process with threads. The child needs none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
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


# ---- a new Python in place of a fork -------------------------------------------------------------

_answering: list[bool] = []  # not empty in such a Python
_NEW_PYTHON = "from oomph.rehearsing.child import _answer_once; _answer_once()"


def _in_a_new_python(work: Callable[[], Any]) -> Any:
    """Send `work` to a new Python, and return its result. Raises what it raised, or an OomphError.

    multiprocessing would run the user's main program once more in the new process.
    """
    import subprocess

    if _answering:
        raise UserCodeError(
            "importing the workload's file asks oomph again",
            because="a child imports the file to have its functions, and would do so without end",
            attempt='what asks below `if __name__ == "__main__":`',
        )
    try:
        packed = pickle.dumps(work, protocol=pickle.HIGHEST_PROTOCOL)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise _cannot_be_sent(str(error)) from None
    started = [sys.executable, "-c", _NEW_PYTHON]
    with subprocess.Popen(started, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        requests, answers = cast(BinaryIO, child.stdin), cast(BinaryIO, child.stdout)
        try:
            with contextlib.suppress(BrokenPipeError):
                write_frame(requests, pickle.dumps(sys.path))
                write_frame(requests, packed)
            while (frame := read_frame(answers)) is not None:
                kind, *said = pickle.loads(frame)  # noqa: S301 - our own child wrote it
                if kind == "ends":
                    return _unpacked((said[0], said[1]))
                if kind == "says":
                    progress.tell(said[0])
                else:
                    progress.tell_detail(said[0])
        finally:
            child.kill()
    status = child.wait()
    raise _without_an_answer(status, "running the workload's functions by themselves")


def _answer_once() -> None:
    """Run the work that comes from standard input, and write its outcome to standard output."""
    _answering.append(True)
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keep the user's prints out of the answer
    sys.stdout = sys.stderr
    path, packed = read_frame(requests), read_frame(requests)
    if path is None or packed is None:
        return  # the parent has ended
    sys.path[:] = pickle.loads(path)  # noqa: S301 - our own parent wrote it
    progress.Relay(lambda kind, text: write_frame(answers, pickle.dumps((kind, text))))
    try:
        work = pickle.loads(packed)  # noqa: S301 - our own parent wrote it
    except OomphError as error:
        outcome: Outcome = False, error
    except (AttributeError, ImportError) as error:  # defined in the parent's main program
        outcome = False, _cannot_be_sent(str(error))
    else:
        outcome = _outcome_of(work)
    write_frame(answers, pickle.dumps(("ends", *outcome)))


def _cannot_be_sent(why: str) -> NotOnThisSystem:
    return NotOnThisSystem(
        "a workload that is not in a file",
        because=f"its functions cannot be sent to a new process, and only Linux can fork ({why})",
        attempt="a workload in a file, by its name: oomph.plan('train.py:workload', ...)",
    )


# ---- how a child starts ------------------------------------------------------------------------


def _die_with(parent: int) -> None:
    """Die when the parent is killed: after its kill -9 no one waits for the answer.

    The kernel watches the thread that forked, which is the one waiting in `in_a_child`. Other
    systems than Linux have no such call; there the child runs until it has its answer.
    """
    from oomph.sandbox import linux  # imports what Linux alone has

    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # if the kernel refuses, behave as on other systems
            linux.die_with_parent()
        if os.getppid() != parent:  # the parent died before the call
            os._exit(1)


def _lead_a_group() -> None:
    from oomph.sandbox import linux
    from oomph.sandbox.inside import make_terminal

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
        return False, UserCodeError(
            "the workload's file ended the program",
            because=f"exit({error.code}), while it was imported or rehearsed",
            attempt='what only a program does below `if __name__ == "__main__":`',
        )
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        return False, explained(error)


def explained(error: BaseException) -> OomphError:
    """Return an error in the workload with the user's own line, or one that names oomph's limit."""
    attempt = "running its functions by themselves, on the CPU"
    if isinstance(error, SyntaxError):
        attempt = f"mending line {error.lineno}: Python cannot read the file"
    elif isinstance(error, ModuleNotFoundError) and error.name == "torch":
        attempt = "pip install torch, in the build for your driver"
    elif isinstance(error, ModuleNotFoundError):
        package = (error.name or "").partition(".")[0]
        attempt = f"pip install {package}, beside oomph; or its directory in PYTHONPATH"
    return fault.explained(error, "workload", attempt)
