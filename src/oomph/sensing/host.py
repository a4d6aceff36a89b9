"""/proc -> HostSpan: CPU time and memory of a run's processes, and the load from others.

A process belongs to the run if its parent does, or if its environment carries the run's token; the
token finds workers that a launcher has detached. Only PIDs that are new since the last look (a
second ago) are examined.

For the machine, it also reads: what others do on the CPUs the run may use, CPU time stolen by the
hypervisor, how often the cgroup's CPU limit throttles the run, and pages read back from swap. Four
small files a look.

Limits: Linux. In a container /proc/stat is usually the host's, so "others" includes everything
outside the container. A process that lives for less than the time between two looks is not counted.
Resident memory counts shared pages once per process.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from oomph.records.machine import HostLook
from oomph.records.run import HostSpan
from oomph.sensing.ownership import (
    MAX_STAT_BYTES,
    PAGE_BYTES,
    TICKS_PER_S,
    Stat,
    carries,
    cpu_ticks_in,
    stat_of,
)

_MAX_PIDS = 100_000  # in total; judgement: processes beyond this are not followed
_TICK_S = 1 / TICKS_PER_S
_MOST_OPEN = 256  # files; judgement: more processes than are on the GPUs of a machine


@dataclass(frozen=True, slots=True)
class MachineCounters:
    """Counters of the machine, which only grow; None where the kernel does not report them."""

    busy_s: float | None = None  # CPU seconds of all processes, on the CPUs that we may use
    stolen_s: float | None = None
    num_periods: int | None = None  # scheduler periods of a control group with a CPU limit
    num_throttled: int | None = None  # periods in which the limit was hit
    swapped_in_bytes: int | None = None


def read_counters(cpus: frozenset[int], root: Path = Path("/")) -> MachineCounters:
    """Read the current counters."""
    pages = _number(_content(root / "proc/vmstat"), "pswpin")
    return MachineCounters(
        *_cpu_times(_content(root / "proc/stat"), cpus),
        *_throttling(root),
        None if pages is None else pages * PAGE_BYTES,
    )


def _cpu_times(content: str, cpus: frozenset[int]) -> tuple[float | None, float | None]:
    """Return busy and stolen CPU seconds of these CPUs.

    proc(5), /proc/stat: user nice system idle iowait irq softirq steal guest, for each CPU.
    """
    busy = stolen = found = 0
    for line in content.split("\n"):
        if not line.startswith("cpu"):  # these come first; the rest can be long
            break
        name, *ticks = line.split()
        number = name.removeprefix("cpu")
        if number.isdecimal() and int(number) in cpus:
            user, nice, system, _, _, irq, softirq, steal = map(int, (*ticks, *("0",) * 8)[:8])
            busy, stolen, found = busy + user + nice + system + irq + softirq, stolen + steal, 1
    return (busy * _TICK_S, stolen * _TICK_S) if found else (None, None)


def _throttling(root: Path) -> tuple[int | None, int | None]:
    """Return periods and throttled periods of our cgroup or its nearest limited ancestor.

    cgroups(7): both are in cpu.stat.
    """
    for base, group in _groups(root, "cpu"):
        for one in (group, *group.parents):
            if not one.is_relative_to(base):
                break
            content = _content(one / "cpu.stat")
            num_periods = _number(content, "nr_periods")
            if num_periods:  # without a limit there are no periods
                return num_periods, _number(content, "nr_throttled")
    return None, None


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield each tree's root and our control group in it, if it may have the controller.

    cgroups(7): a line is `number:controllers:path`; an empty controller list is version 2.
    """
    for line in _content(root / "proc/self/cgroup").splitlines():
        _, controllers, path = (*line.split(":", 2), "", "")[:3]
        if not controllers or controller in controllers.split(","):
            base = root / "sys/fs/cgroup" / (controller if controllers else "")
            yield base, base / path.lstrip("/")


def _number(content: str, name: str) -> int | None:
    """Return the number after a name; the content has one pair per line."""
    _, found, rest = f"\n{content}".partition(f"\n{name} ")
    number = rest.partition("\n")[0].removesuffix(" kB").strip()
    return int(number) if found and number.isdecimal() else None


def _content(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


class ProcessTree:
    """The processes under `root`, and those that carry `token`."""

    def __init__(self, root: int, token: str | None, now_s: float) -> None:
        self._token = token
        self._cpus = frozenset(os.sched_getaffinity(0))
        self._machine = read_counters(self._cpus)
        self._members: dict[int, Stat] = {}
        self._known: set[str] = set()  # all names in /proc at the last look
        self._began_s = now_s
        self.ever: set[int] = {root}
        self._root_started = 0
        first = _living(root)
        if first is not None:
            self._root_started = first.started_ticks
            self._members[root] = self._as_new(first)

    def pids(self) -> tuple[int, ...]:
        """Return the processes alive at the last look."""
        return tuple(self._members)

    def look(self, now_s: float) -> HostSpan:
        """Return CPU time and memory since the last look."""
        self._find_new()
        ticks, memory_bytes = [], 0
        for pid, before in list(self._members.items()):
            stat = _living(pid)
            if stat is None or stat.started_ticks != before.started_ticks:
                del self._members[pid]
                continue
            ticks.append(stat.cpu_ticks - before.cpu_ticks)
            memory_bytes += stat.rss_bytes
            self._members[pid] = stat
        duration_s = max(now_s - self._began_s, 1e-6)
        cores = [number * _TICK_S / duration_s for number in ticks]
        machine, self._machine = self._machine, read_counters(self._cpus)
        busy_s = growth(machine.busy_s, self._machine.busy_s)
        stolen_s = growth(machine.stolen_s, self._machine.stolen_s)
        throttled = growth(machine.num_throttled, self._machine.num_throttled)
        periods = growth(machine.num_periods, self._machine.num_periods)
        span = HostSpan(
            began_s=self._began_s,
            ended_s=now_s,
            cpu_cores=sum(cores),
            busiest_cpu_cores=max(cores, default=None),
            memory_bytes=memory_bytes if ticks else None,
            num_processes=len(ticks),
            others_cpu_cores=None if busy_s is None else max(busy_s / duration_s - sum(cores), 0.0),
            stolen_cpu_cores=None if stolen_s is None else stolen_s / duration_s,
            # Without a CPU limit there are no periods.
            throttled_ratio=min(throttled / periods, 1.0)
            if throttled is not None and periods
            else None,
            swapped_in_bytes=growth(machine.swapped_in_bytes, self._machine.swapped_in_bytes),
        )
        self._began_s = now_s
        return span

    def _find_new(self) -> None:
        """Find new processes in PID order: until PIDs wrap, parents come before children."""
        there = set(os.listdir("/proc"))  # noqa: PTH208 - a Path costs more
        for pid in sorted(int(name) for name in there - self._known if name.isdecimal()):
            stat = _living(pid) if pid not in self._members else None
            if stat is not None and self._is_ours(pid, stat):
                self._members[pid] = self._as_new(stat)
                if len(self.ever) < _MAX_PIDS:
                    self.ever.add(pid)
        self._known = there

    def _as_new(self, stat: Stat) -> Stat:
        """Count all CPU time of a new process as recent, unless it is older than the run."""
        return replace(stat, cpu_ticks=0) if stat.started_ticks >= self._root_started else stat

    def _is_ours(self, pid: int, stat: Stat) -> bool:
        is_child = stat.parent_pid in self._members
        return is_child or (self._token is not None and carries(pid, self._token))


# ---- the machine as a whole, and the CPU time of single processes: for the live view -------------


class HostMeter:
    """Look at the CPUs and the memory of the machine: three small files a look."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._num_cpus = os.cpu_count() or 1
        self._before = self._ticks()

    def look(self) -> HostLook:
        before, self._before = self._before, self._ticks()
        now, cpu_ratio = self._before, None
        if before is not None and now is not None and now[1] > before[1]:
            cpu_ratio = min(max((now[0] - before[0]) / (now[1] - before[1]), 0.0), 1.0)
        sizes = _content(self._root / "proc/meminfo").replace(":", "")
        total, available = _number(sizes, "MemTotal"), _number(sizes, "MemAvailable")
        is_known = total is not None and available is not None
        load = _content(self._root / "proc/loadavg").split(" ", 1)[0]
        return HostLook(
            num_cpus=self._num_cpus,
            cpu_ratio=cpu_ratio,
            total_bytes=None if total is None else total * _KIB,
            used_bytes=(total - available) * _KIB if is_known else None,  # type: ignore[operator]
            load=float(load) if load.replace(".", "", 1).isdecimal() else None,
        )

    def _ticks(self) -> tuple[int, int] | None:
        """Return busy ticks and all ticks, of all CPUs together; see `_cpu_times`."""
        try:
            with open(self._root / "proc/stat", "rb") as file:  # noqa: PTH123 - it is long
                name, *words = file.readline().split()
            ticks = [int(word) for word in words[:8]]  # guests are in the first two
        except (OSError, ValueError):
            return None
        idle = sum(ticks[3:5])
        return (sum(ticks) - idle, sum(ticks)) if name == b"cpu" else None


class ProcessCpu:
    """The CPU cores that single processes keep busy, between two looks.

    Their files stay open: that is most of the cost of a look, and an open file of a process that
    has ended is never that of a later process with the same PID.
    """

    def __init__(self) -> None:
        self._open: dict[int, int] = {}  # by PID
        self._before: dict[int, tuple[int, float]] = {}  # ticks, and when

    def cores(self, pids: Iterable[int], now_s: float) -> dict[int, float]:
        """Return CPU seconds per second since the last look; a new process has none yet."""
        wanted = set(pids)
        for pid in self._open.keys() - wanted:
            self._close(pid)
        found = {}
        for pid in wanted:
            ticks = self._ticks(pid)
            before, then_s = self._before.get(pid, (None, now_s))
            if ticks is None:
                continue
            if before is not None and now_s > then_s:
                found[pid] = (ticks - before) * _TICK_S / (now_s - then_s)
            self._before[pid] = ticks, now_s
        return found

    def _ticks(self, pid: int) -> int | None:
        try:
            if pid not in self._open and len(self._open) < _MOST_OPEN:
                self._open[pid] = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
            stat = os.pread(self._open[pid], MAX_STAT_BYTES, 0)
        except KeyError:
            return None
        except OSError:  # it has ended
            self._close(pid)
            return None
        return cpu_ticks_in(stat)

    def close(self) -> None:
        for pid in list(self._open):
            self._close(pid)

    def _close(self, pid: int) -> None:
        self._before.pop(pid, None)
        if pid in self._open:
            os.close(self._open.pop(pid))


Number = TypeVar("Number", int, float)


def growth(before: Number | None, now: Number | None) -> Number | None:
    """Return how much a counter grew; None if unknown or if the counter was reset."""
    return now - before if before is not None and now is not None and now >= before else None


def _living(pid: int) -> Stat | None:
    """Return its figures; None if it has ended or is a zombie."""
    stat = stat_of(pid)
    return None if stat is None or stat.state in (b"Z", b"X") else stat


def num_cpus() -> int | None:
    """Return how many CPUs this process and its children may use."""
    return len(os.sched_getaffinity(0))


# ---- how much memory a new process could take ----


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return the memory that is free for a new process; None if the kernel does not say.

    proc(5): MemAvailable. A control group around this process, or around that one, may allow less.
    """
    available = _number(_content(root / "proc/meminfo").replace(":", ""), "MemAvailable")
    if available is None:
        return None
    return min([available * _KIB, *_left_in_groups(root)])


_KIB = 1024  # of a "kB" in /proc/meminfo
# Files of limit and use in a control group, version 2 and 1: cgroups(7), memory.rst of the kernel.
_OF_MEMORY = (
    ("memory.max", "memory.current"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes"),
)


def _left_in_groups(root: Path) -> Iterator[int]:
    """Yield what is left in each of our control groups that has a limit of memory."""
    for base, group in _groups(root, "memory"):
        for one in (group, *group.parents):
            if not one.is_relative_to(base):
                break
            for names in _OF_MEMORY:
                limit, used = (_content(one / name).strip() for name in names)
                if limit.isdecimal() and used.isdecimal():  # "max": there is no limit
                    yield max(int(limit) - int(used), 0)


# ---- has the kernel killed processes of this run because host memory ran out? ----
# The counter of this process's control group counts kills inside it, whichever limit was hit. The
# machine-wide counter counts all kills; it is evidence only together with a death by SIGKILL.
# Limits: a command that moves itself to another group (a container, systemd-run) is not seen.


@dataclass(frozen=True, slots=True)
class OomKills:
    """Number of OOM kills so far; None where the kernel does not report it."""

    in_group: int | None
    on_machine: int | None

    def grew_in_group(self, before: OomKills) -> bool:
        return bool(growth(before.in_group, self.in_group))

    def grew_on_machine(self, before: OomKills) -> bool:
        return bool(growth(before.on_machine, self.on_machine))


def read_oom_kills(root: Path = Path("/")) -> OomKills:
    """Read the current counters."""
    # Version 1 of control groups has a separate tree for memory.
    files = (
        group / ("memory.oom_control" if base.name == "memory" else "memory.events")
        for base, group in _groups(root, "memory")
    )
    counts = (_number(_content(file), "oom_kill") for file in files)
    return OomKills(
        next((count for count in counts if count is not None), None),
        _number(_content(root / "proc/vmstat"), "oom_kill"),
    )
