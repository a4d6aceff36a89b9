"""/proc/PID -> what Linux tells of a process, with nothing but the standard library.

To import psutil costs three times as much as to read twenty processes. What cannot be read
(it has ended, or is not ours to look at) is None or empty.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MOST_ANCESTORS = 64
_MOST_BYTES = 1 << 20  # of a command line or an environment
# proc(5), /proc/PID/stat: counted after the name, which may hold anything
_PARENT, _STARTED_TICKS = 1, 19


@dataclass(frozen=True, slots=True)
class Stat:
    name: str
    parent_pid: int
    started_at: float  # seconds since the epoch


def stat_of(pid: int) -> Stat | None:
    before, _, after = _read(pid, "stat").rpartition(b")")
    fields = after.split()
    if len(fields) <= _STARTED_TICKS:
        return None
    ticks_s = int(fields[_STARTED_TICKS]) / os.sysconf("SC_CLK_TCK")
    return Stat(
        name=os.fsdecode(before.partition(b"(")[2]),
        parent_pid=int(fields[_PARENT]),
        started_at=_booted_at() + ticks_s,
    )


def real_uid_of(pid: int) -> int | None:
    for line in _read(pid, "status").splitlines():
        if line.startswith(b"Uid:"):
            return int(line.split()[1])
    return None


def words_of(pid: int) -> list[str]:
    """Its command line."""
    return _texts(_read(pid, "cmdline"))


def environment_of(pid: int) -> Mapping[str, str]:
    """As it was when the program started: what it set later cannot be seen from outside."""
    pairs = (text.partition("=") for text in _texts(_read(pid, "environ")))
    return {name: value for name, _, value in pairs}


def ancestors_of(pid: int) -> Iterator[int]:
    """The parent first; not the first process, which is everybody's."""
    for _ in range(_MOST_ANCESTORS):
        stat = stat_of(pid)
        if stat is None or stat.parent_pid <= 1:
            return
        pid = stat.parent_pid
        yield pid


@functools.cache
def _booted_at() -> float:
    with open("/proc/stat", "rb") as file:  # noqa: PTH123 - see below
        for line in file:
            if line.startswith(b"btime "):
                return float(line.split()[1])
    return 0.0


def _texts(raw: bytes) -> list[str]:
    stripped = raw.rstrip(b"\0")
    return os.fsdecode(stripped).split("\0") if stripped else []


def _read(pid: int, name: str) -> bytes:
    try:
        # A Path costs more than the call.
        with open(f"/proc/{pid}/{name}", "rb") as file:  # noqa: PTH123
            return file.read(_MOST_BYTES)
    except OSError:
        return b""
