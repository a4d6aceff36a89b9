"""/proc -> HostSpan: the processes of a run, their CPU time and memory, and who else is there.

A process belongs to the run if its parent does, or if it carries the run's token in its
environment: that finds the workers which a launcher has taken away from under it. Only a number
that was not there a second ago is looked at more closely.

Beside them, of the machine: what others do on the CPUs that the run may use, what a hypervisor
takes of them, how often the CPU limit of the control group holds it back, and what comes back from
swap. Four small files a look.

Limits: Linux. In a container /proc/stat is usually the host's: "others" are all outside of it. A
process that lives for less than the time between two looks is not counted. Resident memory counts
pages that processes share once for each of them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

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


@dataclass(frozen=True, slots=True)
class MachineCounters:
    """What only grows; None where the kernel does not tell."""

    busy_s: float | None = None  # CPU seconds of everybody, on the CPUs that we may use
    stolen_s: float | None = None
    num_periods: int | None = None  # of the scheduler, for a control group that has a limit
    num_held: int | None = None  # of them, those in which the limit was hit
    swapped_in_bytes: int | None = None


def read_machine(cpus: frozenset[int], root: Path = Path("/")) -> MachineCounters:
    """The counters as they are now."""
    busy_s, stolen_s = _cpu_times(_content(root / "proc/stat"), cpus)
    num_periods, num_held = _held_back(root)
    pages = _number(_content(root / "proc/vmstat"), "pswpin")
    swapped_in_bytes = None if pages is None else pages * _PAGE_BYTES
    return MachineCounters(busy_s, stolen_s, num_periods, num_held, swapped_in_bytes)


def _cpu_times(content: str, cpus: frozenset[int]) -> tuple[float | None, float | None]:
    """proc(5), /proc/stat: user nice system idle iowait irq softirq steal guest, of each CPU."""
    busy = stolen = found = 0
    for line in content.split("\n"):
        if not line.startswith("cpu"):  # they come first; what follows can be long
            break
        name, *ticks = line.split()
        number = name.removeprefix("cpu")
        if number.isdecimal() and int(number) in cpus:
            user, nice, system, _, _, irq, softirq, steal = map(int, (*ticks, *("0",) * 8)[:8])
            busy, stolen, found = busy + user + nice + system + irq + softirq, stolen + steal, 1
    return (busy * _TICK_S, stolen * _TICK_S) if found else (None, None)


def _held_back(root: Path) -> tuple[int | None, int | None]:
    """cgroups(7): cpu.stat of our own group, or of the nearest above it that has a limit."""
    for line in _content(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        group = base / path.lstrip("/")
        for one in (group, *group.parents):
            if not one.is_relative_to(base):
                break
            told = _content(one / "cpu.stat")
            num_periods = _number(told, "nr_periods")
            if num_periods:  # a group without a limit has none
                return num_periods, _number(told, "nr_throttled")
    return None, None


def _number(content: str, name: str) -> int | None:
    """That stands behind a name, a line each."""
    _, found, rest = f"\n{content}".partition(f"\n{name} ")
    number = rest.partition("\n")[0].strip()
    return int(number) if found and number.isdecimal() else None


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class ProcessTree:
    """The processes under `root`, and those that carry `token`."""

    def __init__(self, root: int, token: str | None, now_s: float) -> None:
        self._token = f"{RUN_TOKEN}={token}".encode() if token else None
        self._cpus = frozenset(os.sched_getaffinity(0))
        self._machine = read_machine(self._cpus)
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
        cores = [number * _TICK_S / duration_s for number in ticks]
        machine, self._machine = self._machine, read_machine(self._cpus)
        busy_s = _growth(machine.busy_s, self._machine.busy_s)
        stolen_s = _growth(machine.stolen_s, self._machine.stolen_s)
        span = HostSpan(
            began_s=self._began_s,
            ended_s=now_s,
            cpu_cores=sum(cores),
            busiest_cpu_cores=max(cores, default=None),
            memory_bytes=memory_bytes if ticks else None,
            num_processes=len(ticks),
            others_cpu_cores=None if busy_s is None else max(busy_s / duration_s - sum(cores), 0.0),
            stolen_cpu_cores=None if stolen_s is None else stolen_s / duration_s,
            throttled_ratio=_share(
                _growth(machine.num_held, self._machine.num_held),
                _growth(machine.num_periods, self._machine.num_periods),
            ),
            swapped_in_bytes=_growth(machine.swapped_in_bytes, self._machine.swapped_in_bytes),
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


Number = TypeVar("Number", int, float)


def _growth(before: Number | None, now: Number | None) -> Number | None:
    """Of a counter; None where it is not known, or has started anew."""
    return now - before if before is not None and now is not None and now >= before else None


def _share(part: int | None, whole: int | None) -> float | None:
    """None where nothing was counted: a group without a limit has no periods."""
    return min(part / whole, 1.0) if part is not None and whole else None


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
