"""pid -> whose process it is: this run's, mine, others', or nobody can tell.

NVML reports the PIDs of the host. In a container with its own PID namespace such a number
belongs to nothing, or to an innocent process of the same number: there nobody can be known by
number. A process that we may not look at (hidepid) is told from one that is gone by the owner
of its directory, or by signal 0.

Limits: /proc is Linux; elsewhere psutil answers what it can.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from oomph.records.machine import Owner

RUN_TOKEN = "OOMPH_RUN_ID"  # noqa: S105 - the name of an environment variable
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h


@dataclass(frozen=True, slots=True)
class Facts:
    """What could be found out about a process."""

    owner: Owner
    user: str | None = None
    command: str | None = None
    started_at: float | None = None
    note: str | None = None


_GONE = Facts("unknown", note="the process has ended, or runs where this one cannot look")
_FOREIGN = Facts(
    "unknown", note="a PID of the host: cannot tell whose; run the container with --pid=host"
)
_HIDDEN = Facts("others", note="this machine hides the processes of other users")


def facts_about(pid: int) -> Facts:
    """Whose process `pid` is. The answer is kept for as long as the process lives."""
    if pids_are_the_hosts():
        return _FOREIGN
    identity = _identity(pid)
    if identity is None:
        return _invisible(pid)
    if pid not in _known or _known[pid][0] != identity:
        _known[pid] = (identity, _look(pid, uid=identity[1]))
    return _known[pid][1]


def forget() -> None:
    """Drop what was learnt, as a forked child must: it is another process now."""
    _known.clear()


_known: dict[int, tuple[tuple[int, int], Facts]] = {}
os.register_at_fork(after_in_child=forget)


def _identity(pid: int) -> tuple[int, int] | None:
    """Inode and owner of its directory: the first changes when the number is given anew."""
    try:
        status = os.stat(f"/proc/{pid}")
    except OSError:
        return None
    return status.st_ino, status.st_uid


def _invisible(pid: int) -> Facts:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return _HIDDEN
    except OSError:
        return _GONE
    return _GONE


def _look(pid: int, uid: int) -> Facts:
    import psutil

    try:
        process = psutil.Process(pid)
        with process.oneshot():
            return Facts(
                owner=_owner(process, uid),
                user=_readable(process.username),
                command=_command(process),
                started_at=_readable(process.create_time),
            )
    except psutil.NoSuchProcess:
        return _GONE
    except psutil.AccessDenied:
        return _HIDDEN if uid != os.getuid() else Facts("mine")


def _owner(process: Any, uid: int) -> Owner:
    if process.pid == os.getpid() or _is_my_child(process) or _carries_my_token(process):
        return "this-run"
    uids = _readable(process.uids)
    return "mine" if (uids.real if uids else uid) == os.getuid() else "others"


def _is_my_child(process: Any) -> bool:
    parents = _readable(process.parents) or []
    return any(parent.pid == os.getpid() for parent in parents)


def _carries_my_token(process: Any) -> bool:
    """Catches the workers that a launcher has taken away from under this process."""
    token = os.environ.get(RUN_TOKEN)
    if not token:
        return False
    return (_readable(process.environ) or {}).get(RUN_TOKEN) == token


def _command(process: Any) -> str | None:
    words = _readable(process.cmdline)
    return " ".join(words) if words else _readable(process.name)


def _readable(question: Callable[[], Any]) -> Any:
    """The answer, or None where we may not look, or there is nothing left to see."""
    import psutil

    try:
        return question()
    except (psutil.AccessDenied, psutil.ZombieProcess):
        return None


def pids_are_the_hosts() -> bool:
    """Does this process live in a PID namespace of its own, which NVML knows nothing of?"""
    try:
        return os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False
