"""/proc -> HostSpan: the processes of a run, their CPU time and their memory.

A process belongs to the run if its parent does, or if it carries the run's token in its
environment: that finds the workers which a launcher has taken away from under it. Only a number
that was not there a second ago is looked at more closely.

Limits: Linux. A process that lives for less than the time between two looks is not counted.
Resident memory counts pages that processes share once for each of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from oomph.records.run import HostSpan
from oomph.sensing.ownership import RUN_TOKEN

_MOST_STAT_BYTES = 4096  # 52 numbers and a short name
_MOST_PIDS = 100_000  # ever; a run that starts more is not followed beyond

# proc(5), /proc/PID/stat, counted after the name in brackets, which may hold blanks.
_STATE, _PARENT, _UTIME, _STIME, _STARTED, _RSS = 0, 1, 11, 12, 19, 21


@dataclass(frozen=True, slots=True)
class _Stat:
    parent: int
    cpu_ticks: int
    started: int  # tells a process from a later one of the same number
    rss_bytes: int


class ProcessTree:
    """The processes under `root`, and those that carry `token`."""

    def __init__(self, root: int, token: str | None, now_s: float) -> None:
        self._token = f"{RUN_TOKEN}={token}".encode() if token else None
        self._tick_s = 1 / os.sysconf("SC_CLK_TCK")
        self._members: dict[int, _Stat] = {}
        self._known: set[str] = set()  # every name under /proc at the last look
        self._began_s = now_s
        self.ever: set[int] = {root}
        self._root_started = 0
        first = _stat_of(root)
        if first is not None:
            self._root_started = first.started
            self._members[root] = self._as_new(first)

    def pids(self) -> tuple[int, ...]:
        """Those that lived at the last look."""
        return tuple(self._members)

    def look(self, now_s: float) -> HostSpan:
        """What they did since the last look."""
        self._find_new()
        ticks, memory_bytes = [], 0
        for pid, before in list(self._members.items()):
            stat = _stat_of(pid)
            if stat is None or stat.started != before.started:
                del self._members[pid]
                continue
            ticks.append(stat.cpu_ticks - before.cpu_ticks)
            memory_bytes += stat.rss_bytes
            self._members[pid] = stat
        duration_s = max(now_s - self._began_s, 1e-6)
        cores = [number * self._tick_s / duration_s for number in ticks]
        span = HostSpan(
            began_s=self._began_s,
            ended_s=now_s,
            cpu_cores=sum(cores),
            busiest_cpu_cores=max(cores, default=None),
            memory_bytes=memory_bytes if ticks else None,
            num_processes=len(ticks),
        )
        self._began_s = now_s
        return span

    def _find_new(self) -> None:
        """Parents are found before their children: the kernel counts upwards, until it wraps."""
        there = set(os.listdir("/proc"))  # noqa: PTH208 - as below
        for pid in sorted(int(name) for name in there - self._known if name.isdecimal()):
            stat = _stat_of(pid) if pid not in self._members else None
            if stat is not None and self._is_ours(pid, stat):
                self._members[pid] = self._as_new(stat)
                if len(self.ever) < _MOST_PIDS:
                    self.ever.add(pid)
        self._known = there

    def _as_new(self, stat: _Stat) -> _Stat:
        """All that a process has done, it has done since the last look, unless it is older."""
        return replace(stat, cpu_ticks=0) if stat.started >= self._root_started else stat

    def _is_ours(self, pid: int, stat: _Stat) -> bool:
        if stat.parent in self._members:
            return True
        return self._token is not None and _carries(pid, self._token)


def _stat_of(pid: int) -> _Stat | None:
    """None: it has ended, or waits for its parent to notice."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        try:
            content = os.read(
                file, _MOST_STAT_BYTES
            )  # each second, of each process: no file object
        finally:
            os.close(file)
    except OSError:
        return None
    fields = content[content.rindex(b")") + 2 :].split()
    if fields[_STATE] in (b"Z", b"X"):
        return None
    return _Stat(
        parent=int(fields[_PARENT]),
        cpu_ticks=int(fields[_UTIME]) + int(fields[_STIME]),
        started=int(fields[_STARTED]),
        rss_bytes=int(fields[_RSS]) * _PAGE_BYTES,
    )


_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


def _carries(pid: int, entry: bytes) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:  # noqa: PTH123 - a Path costs more
            return entry in file.read().split(b"\0")
    except OSError:  # another user's, or gone
        return False


def num_cpus() -> int | None:
    """Those that this process, and what it starts, may run on."""
    return len(os.sched_getaffinity(0))
