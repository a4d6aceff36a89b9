"""pid -> whose process it is: this run's, mine, others', or unknown.

NVML reports the PIDs of the host. In a container with its own PID namespace, such a number belongs
to no process or to an unrelated one, so no owner can be found from it. If a process may not be
inspected (hidepid), the owner of its /proc directory or signal 0 shows whether it still exists.

Limits: /proc is Linux; elsewhere every owner is unknown.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from oomph.records.machine import Owner, Process
from oomph.sensing.backends import ProcessKind

# ---- /proc/PID -> what Linux reports about a process, with the standard library only ----
# Importing psutil costs three times as much as reading twenty processes. What cannot be read
# (the process has ended, or may not be inspected) is None or empty.

_MAX_ANCESTORS = 64  # judgement: parents cannot form a loop, but this would end one
_MAX_BYTES = 1 << 20  # per command line or environment
_MAX_STAT_BYTES = 4096  # 52 numbers and a short name
# proc(5), /proc/PID/stat: positions after the name in brackets, which may hold any character.
_STATE, _PARENT, _UTIME, _STIME, _STARTED, _RSS = 0, 1, 11, 12, 19, 21
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class Stat:
    name: str
    state: bytes
    parent_pid: int
    cpu_ticks: int
    started_ticks: int  # since boot; distinguishes it from a later process with the same PID
    rss_bytes: int

    @property
    def started_at(self) -> float:
        """Return the start in seconds since the epoch."""
        return _booted_at() + self.started_ticks / TICKS_PER_S


def stat_of(pid: int) -> Stat | None:
    before, _, after = _read(pid, "stat", _MAX_STAT_BYTES).rpartition(b")")
    fields = after.split()
    if len(fields) <= _RSS:
        return None
    return Stat(
        name=os.fsdecode(before.partition(b"(")[2]),
        state=fields[_STATE],
        parent_pid=int(fields[_PARENT]),
        cpu_ticks=int(fields[_UTIME]) + int(fields[_STIME]),
        started_ticks=int(fields[_STARTED]),
        rss_bytes=int(fields[_RSS]) * PAGE_BYTES,
    )


def real_uid_of(pid: int) -> int | None:
    for line in _read(pid, "status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def words_of(pid: int) -> list[str]:
    """Return its command line, word by word."""
    return _texts(_read(pid, "cmdline"))


def environment_of(pid: int) -> Mapping[str, str]:
    """Return its environment at program start; later changes are not visible from outside."""
    pairs = (text.partition("=") for text in _texts(_read(pid, "environ")))
    return {name: value for name, _, value in pairs}


def ancestors_of(pid: int) -> Iterator[int]:
    """Yield the parent first; leave out PID 1, the ancestor of every process."""
    for _ in range(_MAX_ANCESTORS):
        stat = stat_of(pid)
        if stat is None or stat.parent_pid <= 1:
            return
        pid = stat.parent_pid
        yield pid


@functools.cache
def _booted_at() -> float:
    with open("/proc/stat", "rb") as file:  # noqa: PTH123 - a Path costs more
        for line in file:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    return 0.0


def _texts(raw: bytes) -> list[str]:
    stripped = raw.rstrip(b"\0")
    return os.fsdecode(stripped).split("\0") if stripped else []


def _read(pid: int, name: str, max_bytes: int = _MAX_BYTES) -> bytes:
    """Read a file of /proc without a file object or Path: this runs every second per process."""
    try:
        file = os.open(f"/proc/{pid}/{name}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(file, max_bytes)
    except OSError:
        return b""
    finally:
        os.close(file)


# `oomph watch` sets both for its command: a secret of the run, and its directory.
RUN_TOKEN = "OOMPH_RUN_ID"  # noqa: S105 - the name of an environment variable
RUN_DIRECTORY = "OOMPH_RUN_DIR"
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h


def _only_owner(owner: Owner, note: str | None = None) -> Process:
    """Return a process of which nothing but the owner is known."""
    return Process(
        pid=0,
        owner=owner,
        user=None,
        command=None,
        used_bytes=None,
        started_at=None,
        kind="compute",
        note=note,
    )


_GONE = _only_owner("unknown", "the process has ended, or runs where this one cannot look")
_FOREIGN = _only_owner(
    "unknown", "a PID of the host: cannot tell whose; run the container with --pid=host"
)
_HIDDEN = _only_owner("others", "this machine hides the processes of other users")


def find_process(pid: int, used_bytes: int | None = None, kind: ProcessKind = "compute") -> Process:
    """Return a process on a GPU, with its owner. What /proc says is cached while it lives."""
    return replace(_found(pid), pid=pid, used_bytes=used_bytes, kind=kind)


def _found(pid: int) -> Process:
    if pids_are_the_hosts():
        return _FOREIGN
    identity = _identity(pid)
    if identity is None:
        return _invisible(pid)
    if pid not in _known or _known[pid][0] != identity:
        _known[pid] = (identity, _look(pid, uid=identity[1]))
    return _known[pid][1]


def forget() -> None:
    """Drop the cache, as a forked child must: it is another process."""
    _known.clear()


_known: dict[int, tuple[tuple[int, int], Process]] = {}
os.register_at_fork(after_in_child=forget)


def _identity(pid: int) -> tuple[int, int] | None:
    """Return inode and owner of its /proc directory; the inode changes when a PID is reused."""
    try:
        status = os.stat(f"/proc/{pid}")
    except OSError:
        return None
    return status.st_ino, status.st_uid


def _invisible(pid: int) -> Process:
    try:
        os.kill(pid, 0)
    except PermissionError:
        return _HIDDEN
    except OSError:
        return _GONE
    return _GONE


def _look(pid: int, uid: int) -> Process:
    stat = stat_of(pid)
    if stat is None:
        if _identity(pid) is None:
            return _GONE
        return _HIDDEN if uid != os.getuid() else _only_owner("mine")
    real_uid = real_uid_of(pid)
    uid = uid if real_uid is None else real_uid
    return replace(
        _only_owner(_owner(pid, uid)),
        user=user_name(uid) or str(uid),
        command=" ".join(words_of(pid)) or stat.name,
        started_at=stat.started_at,
    )


def _owner(pid: int, uid: int) -> Owner:
    token = os.environ.get(RUN_TOKEN)
    if pid == os.getpid() or os.getpid() in ancestors_of(pid) or (token and carries(pid, token)):
        return "this-run"
    return "mine" if uid == os.getuid() else "others"


def carries(pid: int, token: str) -> bool:
    """Return whether a process belongs to the run of that token, also if a launcher detached it."""
    return f"{RUN_TOKEN}={token}".encode() in _read(pid, "environ").split(b"\0")


def user_name(uid: int) -> str | None:
    """Return None for a user of another machine or of a container."""
    try:
        import pwd  # not on every system

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return None


def pids_are_the_hosts() -> bool:
    """Return whether this process has its own PID namespace, so that NVML's PIDs do not apply."""
    try:
        return os.readlink("/proc/self/ns/pid") != _INITIAL_PID_NAMESPACE
    except OSError:
        return False
