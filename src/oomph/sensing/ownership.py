"""pid -> whose process it is: this run's, mine, others', or nobody can tell.

NVML reports the PIDs of the host. In a container with its own PID namespace such a number
belongs to nothing, or to an innocent process of the same number: there nobody can be known by
number. A process that we may not look at (hidepid) is told from one that is gone by the owner
of its directory, or by signal 0.

Limits: /proc is Linux; elsewhere nobody is known.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

from oomph.records.machine import Owner
from oomph.sensing.process_files import (
    ancestors_of,
    environment_of,
    real_uid_of,
    stat_of,
    words_of,
)

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
    stat = stat_of(pid)
    if stat is None:
        if _identity(pid) is None:
            return _GONE
        return _HIDDEN if uid != os.getuid() else Facts("mine")
    real_uid = real_uid_of(pid)
    uid = uid if real_uid is None else real_uid
    return Facts(
        owner=_owner(pid, uid),
        user=_name_of(uid),
        command=" ".join(words_of(pid)) or stat.name,
        started_at=stat.started_at,
    )


def _owner(pid: int, uid: int) -> Owner:
    if pid == os.getpid() or os.getpid() in ancestors_of(pid) or _carries_my_token(pid):
        return "this-run"
    return "mine" if uid == os.getuid() else "others"


def _carries_my_token(pid: int) -> bool:
    """Catches the workers that a launcher has taken away from under this process."""
    token = os.environ.get(RUN_TOKEN)
    return bool(token) and environment_of(pid).get(RUN_TOKEN) == token


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # a user of another machine, or of a container
        return str(uid)


def pids_are_the_hosts() -> bool:
    """Does this process live in a PID namespace of its own, which NVML knows nothing of?"""
    try:
        return os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False
