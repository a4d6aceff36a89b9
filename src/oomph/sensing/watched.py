"""One GPU -> a GpuSpan for each second, in at most ten library calls a turn.

A turn is five memory readings. The driver keeps no history of memory use, so a peak between two
readings can be missed. Samples of kernel-active time, counters and the list of computing
processes are fetched every turn; slower figures are asked in rotation, and their last value is
used in between. If the driver has no sample buffer, it is polled: five more calls a turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from oomph.records.machine import Process
from oomph.records.run import BusySource, GpuSpan, WatchedGpu
from oomph.sensing.backends import Counters, Gpu, ListedProcess, Refusal
from oomph.sensing.devices import (
    Problems,
    read_power_w,
    read_temperature_c,
    settle_memory,
    sum_bytes,
    with_owners,
)
from oomph.sensing.host import growth
from oomph.sensing.mapping import Shown, slices_of
from oomph.units import MIB

# ---- process lists over time -> who is on a GPU, and who is new ---------------------------------


@dataclass(frozen=True, slots=True)
class Shares:
    """How much memory each party holds; None if the owner of some process is unknown."""

    run_bytes: int | None = None
    others_bytes: int | None = None
    num_others: int | None = None


@dataclass(slots=True, eq=False)
class Occupants:
    """The processes on one GPU."""

    processes: tuple[Process, ...] | None = None  # None: the list could not be read
    shares: Shares = field(default_factory=Shares)
    run_pids: set[int] = field(default_factory=set)  # of this run, now or earlier
    _listed: tuple[object, ...] = ()
    _announced: set[int] = field(default_factory=set)

    def update(
        self,
        compute: tuple[ListedProcess, ...] | Refusal,
        graphics: tuple[ListedProcess, ...],
    ) -> None:
        """Take over the driver's current lists."""
        if (compute, graphics) == self._listed:
            return
        self._listed = (compute, graphics)
        known = {p.pid: p for p in self.processes or ()}
        self.processes = None
        if not isinstance(compute, Refusal):
            # The driver may list a process that has ended, and its owner can no longer be found.
            self.processes = tuple(
                replace(known[p.pid], used_bytes=p.used_bytes)
                if p.owner == "unknown" and p.pid in known
                else p
                for p in with_owners(compute, graphics)
            )
        ours = tuple(p for p in self.processes or () if p.owner == "this-run")
        self.run_pids.update(p.pid for p in ours)
        self.shares = Shares()
        if self.processes is not None and all(p.owner != "unknown" for p in self.processes):
            others = tuple(p for p in self.processes if p.owner != "this-run")
            # A display server takes memory, but it is not a job you share the GPU with.
            num_others = sum(p.kind == "compute" for p in others)
            self.shares = Shares(sum_bytes(ours), sum_bytes(others), num_others)

    def newcomers(self) -> list[Process]:
        """Return the processes of other jobs that were not returned before."""
        found = [
            p
            for p in self.processes or ()
            if p.kind == "compute"
            and p.owner in ("mine", "others")
            and p.pid not in self._announced
        ]
        self._announced.update(p.pid for p in found)
        return found


# ---- readings of a turn of several seconds -> readings of each second ----
# The driver is asked less often than the run records figures. Its samples carry their own times,
# so they can be assigned to seconds. Seconds without a memory reading have unknown memory.

PART_S = 1.0
_MOST_PARTS = 60  # after a halt of hours there is nothing to split

Seen = tuple[float, int]  # time, value


@dataclass(frozen=True, slots=True)
class Part:
    """About one second of a turn."""

    began_s: float
    ended_s: float
    used_bytes: list[int] = field(default_factory=list)  # one per reading
    percents: list[int] = field(default_factory=list)


def cut(
    began_s: float, ended_s: float, looks: Sequence[Seen], percents: Sequence[Seen]
) -> list[Part]:
    """Split a turn into equal parts of about a second; return at least one.

    >>> [part.used_bytes for part in cut(0.0, 2.0, [(1.01, 5), (2.02, 7)], [])]
    [[5], [7]]
    """
    number = min(round((ended_s - began_s) / PART_S), _MOST_PARTS)
    if number <= 1:
        return [whole(began_s, ended_s, looks, percents)]
    part_s = (ended_s - began_s) / number
    edges = [began_s + place * part_s for place in range(number)] + [ended_s]
    parts = [Part(edges[place], edges[place + 1]) for place in range(number)]
    for at_s, used_bytes in looks:
        # A reading stands for the second before it, even if it comes slightly early or late.
        parts[_place((at_s - began_s) / part_s - 0.5, number)].used_bytes.append(used_bytes)
    for at_s, percent in percents:  # each covers the time before it
        parts[_place((at_s - began_s) / part_s, number)].percents.append(percent)
    return parts


def whole(began_s: float, ended_s: float, looks: Sequence[Seen], percents: Sequence[Seen]) -> Part:
    """Return everything as one part, regardless of its time."""
    return Part(began_s, ended_s, [used for _, used in looks], [value for _, value in percents])


def _place(end: float, number: int) -> int:
    return min(max(math.ceil(end) - 1, 0), number - 1)


def share(whole: int | None, place: int, number: int) -> int | None:
    """Return one part's share of a total count; the shares add up to the total."""
    if whole is None:
        return None
    return whole * (place + 1) // number - whole * place // number


# If process owners are unknown, memory that grew by more than this since the start is counted as
# this run's. An idle driver's figure moves by less.
_GREW_BYTES = 64 * MIB
_MOST_LAG_S = 0.5  # three of the driver's sample periods
_LONG_TURN_S = 3.0  # in longer turns, ask two rotating questions more


class Watch:
    """Watch one GPU while it answers. A GPU that comes back gets a new Watch."""

    def __init__(
        self,
        place: int,
        known: WatchedGpu,
        shown: Shown,
        gpu: Gpu,
        clock: Callable[[], float],
        *,
        with_activity: bool,
        with_shares: bool = False,
    ) -> None:
        self._place, self.gpu, self._clock = place, gpu, clock
        self._meter = gpu.meter(with_activity=with_activity)
        self._with_shares = with_shares
        self.process_shares: Mapping[int, float] | None = None  # by PID
        self._is_slice = shown.device.is_slice
        self._is_cut = not self._is_slice and bool(slices_of(shown.gpu))
        self.occupants = Occupants()
        self._graphics: tuple[ListedProcess, ...] = ()
        self._problem: str | None = None
        self._turn = 0
        self._throttled_by: tuple[str, ...] | None = None
        self._temperature_c: int | None = None
        self._power_w: float | None = None
        self._sm_ratio: float | None = None
        self._dram_ratio: float | None = None
        self._first_used_bytes: int | None = None
        answer = gpu.name()
        name = None if isinstance(answer, Refusal) else answer
        self._settled = settle_memory(gpu.memory(), (), Problems(), name=name)
        polled: BusySource = "buffered" if self._meter.has_samples else "polled"
        self.watched_gpu = replace(
            known,
            name=name,
            total_bytes=self._settled.total_bytes,
            power_limit_w=gpu.power_limit_w(),
            busy_source=None if self._is_slice else polled,  # not measured under MIG
            link_bytes_per_s=gpu.link_bytes_per_s(),
        )
        self._counters, self._counted_s = self._meter.counters(), clock()
        self._counts_energy = self._counters.energy_mj is not None
        self._begin(clock())
        self._last: GpuSpan | None = None

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._seen: list[Seen] = []  # bytes
        self._percents: list[Seen] = []

    # ---- five times a turn

    def look(self) -> Refusal | None:
        """Read the memory in use. A Refusal that is not final means the GPU is lost."""
        used = self._meter.used_bytes()
        if isinstance(used, Refusal):
            return None if used.is_final else used
        if used is not None:
            if self._first_used_bytes is None:
                self._first_used_bytes = used
            self._seen.append((self._clock(), used))
        if not self._meter.has_samples and not self._is_slice:
            percent = self.gpu.busy_percent()
            if not isinstance(percent, Refusal) and 0 <= percent <= 100:
                self._percents.append((self._clock(), percent))
        return None

    # ---- each turn

    def spans(self, now_s: float) -> list[GpuSpan]:
        """Return the readings since the last turn, one span per second."""
        self._ask_in_turn()
        if now_s - self._began_s > _LONG_TURN_S:
            self._ask_in_turn()
        if not self._is_cut:
            compute = self.gpu.processes("compute", self._settled.total_bytes)
            self.occupants.update(compute, self._graphics)
        counted = self._count()
        # The driver's samples, and so the last span, may have ended slightly ahead of our clock.
        parts = self._parts(max(now_s, self._began_s))
        spans = [self._span(part, counted, place, len(parts)) for place, part in enumerate(parts)]
        self._last = spans[-1]
        if not self.watched_gpu.is_used and self._is_use(self._last):
            self.watched_gpu = replace(self.watched_gpu, is_used=True)
        self._begin(self._last.ended_s)
        return spans

    def _parts(self, now_s: float) -> list[Part]:
        began_s = self._began_s
        if not self._meter.has_samples or self._is_slice:
            return cut(began_s, now_s, self._seen, self._percents)
        busy = self._meter.busy_samples()
        ended_s = self._end(busy.covered_s, now_s)
        if ended_s is None:
            return [whole(began_s, now_s, self._seen, busy.values)]
        percents = [(began_s + after_s, percent) for after_s, percent in busy.values]
        return cut(began_s, ended_s, self._seen, percents)

    def _span(self, part: Part, counted: Counters, place: int, number: int) -> GpuSpan:
        """Return the span of part `place` out of `number`."""
        shares, percents, used = self.occupants.shares, part.percents, part.used_bytes
        return GpuSpan(
            gpu=self._place,
            began_s=part.began_s,
            ended_s=part.ended_s,
            used_bytes=sum(used) // len(used) if used else self._unified(),
            most_used_bytes=max(used) if used else self._unified(),
            run_bytes=shares.run_bytes,
            others_bytes=shares.others_bytes,
            num_others=shares.num_others,
            busy_ratio=sum(percents) / len(percents) / 100 if percents else None,
            least_busy_ratio=min(percents) / 100 if percents else None,
            most_busy_ratio=max(percents) / 100 if percents else None,
            power_w=counted.power_w,
            temperature_c=self._temperature_c,
            throttled_ratio=None if self._throttled_by is None else float(bool(self._throttled_by)),
            throttled_by=self._throttled_by or (),
            sm_active_ratio=self._sm_ratio,
            memory_active_ratio=self._dram_ratio,
            received_bytes=share(counted.received_bytes, place, number),
            sent_bytes=share(counted.sent_bytes, place, number),
        )

    def _end(self, covered_s: float | None, now_s: float) -> float | None:
        """Return where the driver's samples end. A turn ends there, so no sample counts twice.

        The newest sample is up to one period old; if the driver's clock is further off, ignore it.
        """
        ended_s = self._began_s + (covered_s or 0.0)
        return ended_s if covered_s and abs(now_s - ended_s) <= _MOST_LAG_S else None

    def _ask_in_turn(self) -> None:
        """Ask two more questions: slowly changing figures are asked every second or fourth turn."""
        turn = self._turn
        self._turn = (turn + 1) % 4
        if turn % 2 and self._meter.has_activity:
            self._sm_ratio, self._dram_ratio = self._meter.activity()
            return
        if self._with_shares:  # instead: as many calls as without
            self.process_shares = self._meter.process_shares()
        else:
            self._throttled_by = self._meter.throttled_by()
        if (turn // 2 if self._meter.has_activity else turn) % 2:
            listed = self.gpu.processes("graphics", self._settled.total_bytes)
            self._graphics = () if isinstance(listed, Refusal) else listed
        else:
            problems = Problems()
            self._temperature_c = read_temperature_c(self.gpu, problems)
            if self._counters.power_w is None and not self._counts_energy:
                self._power_w = read_power_w(self.gpu, problems)
            self._problem = problems.in_words()

    def _count(self) -> Counters:
        """Return the bytes over PCIe and the mean power (energy counter) since the last turn.

        An energy counter that does not move is ignored, since no GPU draws 0 W. Then the current
        power is used, if the driver reports it.
        """
        began, began_s = self._counters, self._counted_s
        self._counters, self._counted_s = ended, ended_s = self._meter.counters(), self._clock()
        energy_mj = growth(began.energy_mj, ended.energy_mj)
        self._counts_energy = bool(energy_mj)
        if energy_mj and ended_s > began_s:
            power_w: float | None = energy_mj / 1000 / (ended_s - began_s)
        else:
            power_w = ended.power_w or self._power_w or None
        return Counters(
            power_w=power_w,
            received_bytes=growth(began.received_bytes, ended.received_bytes),
            sent_bytes=growth(began.sent_bytes, ended.sent_bytes),
        )

    def _unified(self) -> int | None:
        """Return the memory its processes hold, for a GPU without memory of its own."""
        is_unified = self._settled.source == "unified"
        return sum_bytes(self.occupants.processes) if is_unified else None

    def _is_use(self, span: GpuSpan) -> bool:
        """Return whether this run uses the GPU; if owners are unknown, judge by its growth."""
        if self.occupants.run_pids:
            return True
        if span.run_bytes is not None or span.used_bytes is None:
            return False
        return span.used_bytes - (self._first_used_bytes or 0) > _GREW_BYTES

    def figures(self) -> dict[str, Any]:
        """Return the fields of a Device that change, as of the last span."""
        span, settled = self._last, self._settled
        return {
            "used_bytes": span.used_bytes if span else settled.used_bytes,
            "memory_source": settled.source,
            "busy_ratio": span.busy_ratio if span else None,
            "temperature_c": self._temperature_c,
            "power_w": span.power_w if span else None,
            "power_limit_w": self.watched_gpu.power_limit_w,
            "processes": self.occupants.processes,
            "problem": self._problem,
        }
