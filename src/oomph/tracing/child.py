"""Work that patches torch -> its result, from a child process that is thrown away.

The child is forked: it has the user's functions as they are, whatever they close over, and
torch if it was imported before. What it raises comes back as one error that names the user's
own line.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from oomph.errors import OomphError, UserCodeError

T = TypeVar("T")

_PR_SET_PDEATHSIG = 1  # include/uapi/linux/prctl.h


def in_a_child(work: Callable[[], T]) -> T:
    """Do `work` in a forked child. Raises what it raised, or UserCodeError."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reading)
        _answer(writing, work, parent)
    os.close(writing)
    try:
        with os.fdopen(reading, "rb") as pipe:
            answer = pipe.read()
    except BaseException:  # nobody waits for the answer any more, as after Ctrl-C
        os.kill(child, signal.SIGKILL)
        raise
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if not answer:
        raise UserCodeError(
            "the rehearsal ended without an answer",
            because=f"its process ended with {status}",
            attempt="running the workload's functions by themselves",
        )
    # Written by our own child a moment ago.
    outcome: tuple[bool, Any] = pickle.loads(answer)  # noqa: S301
    if outcome[0]:
        result: T = outcome[1]
        return result
    raise outcome[1]


def _answer(writing: int, work: Callable[[], Any], parent: int) -> None:
    """Write the outcome and end, without any of the parent's clean-up."""
    code = 1
    try:
        _end_with(parent)
        os.dup2(2, 1)  # what the user's code prints is not the answer
        sys.stdout = sys.stderr
        stay_on_one_thread()
        answer = pickle.dumps(outcome_of(work), protocol=pickle.HIGHEST_PROTOCOL)
        with os.fdopen(writing, "wb") as pipe:
            pipe.write(answer)
        code = 0
    finally:
        os._exit(code)


def _end_with(parent: int) -> None:
    """Be killed when the parent is: after its kill -9 nobody waits for the answer any more.

    The kernel goes by the thread that forked, and that one waits in `in_a_child`. Other systems
    than Linux have no such call, and there the child goes on until it has its answer.
    """
    if sys.platform != "linux":
        return
    import ctypes

    kill, unused = ctypes.c_ulong(signal.SIGKILL), ctypes.c_ulong(0)
    # Where the kernel refuses, it is as on other systems.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, kill, unused, unused, unused)
    if os.getppid() != parent:  # it was killed before the call
        os._exit(1)


def stay_on_one_thread() -> None:
    """A fork has none of its parent's threads: whoever waits for torch's pool waits forever."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def outcome_of(work: Callable[[], Any]) -> tuple[bool, Any]:
    """What `work` returns, or the error that it raises: whether it is well, and which."""
    try:
        return True, work()
    except OomphError as error:
        return False, error
    except SystemExit as error:
        return False, UserCodeError("the workload ended the program", because=f"exit({error.code})")
    except BaseException as error:  # noqa: BLE001 - whatever the user's code raises is the answer
        return False, explained(error)


def explained(error: BaseException) -> OomphError:
    """The user's own line in an error, and what it says; or the limit of oomph's that it is."""
    place = _users_line(error.__traceback__)
    told = " ".join(str(error).split())[:500]
    attempt = "running its functions by themselves, on the CPU"
    if isinstance(error, ModuleNotFoundError) and error.name == "torch":
        attempt = "pip install torch, in the build for your driver"
    elif "torch" in sys.modules:
        from oomph.tracing import limits

        limit = limits.refused(error, place or "a line that is not your own")
        if limit is not None:
            return limit
        if limits.is_in_doubt(error):
            found = limits.report(limits.pretended_op(error))
            attempt += f"; if they work there, the error is oomph's own: please report {found}"
    return UserCodeError(
        f"the workload failed at {place}" if place else "the rehearsal failed",
        because=f"{type(error).__name__}: {told}",
        attempt=attempt,
    )


def _users_line(trace: TracebackType | None) -> str | None:
    """The innermost line that is neither of a library nor of oomph."""
    ours = str(Path(__file__).parents[1])
    lines = [
        f"{frame.filename}:{frame.lineno}"
        for frame in traceback.extract_tb(trace)
        if not frame.filename.startswith((ours, sys.prefix, sys.base_prefix, "<frozen"))
        and "site-packages" not in frame.filename
    ]
    return lines[-1] if lines else None
