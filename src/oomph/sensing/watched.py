"""One GPU -> a GpuSpan for each second, in at most ten NVML calls a turn.

A turn is five looks at the memory: it is the one figure that the driver keeps no buffer of, so a
shorter peak can be missed. Samples of kernel-active time, counters and the list of computing
processes are fetched each turn; the rest takes turns and stands for those between. A driver
without the buffer is polled instead, at five more calls a turn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oomph.records.machine import Device
from oomph.records.run import BusySource, GpuSpan, WatchedGpu
from oomph.sensing.cutting import Part, Seen, cut, share, whole
from oomph.sensing.gpm import Gpm
from oomph.sensing.gpus import read_power_w, read_temperature_c
from oomph.sensing.looks import Counters, Looks
from oomph.sensing.nvml import Refusal
from oomph.sensing.occupancy import settle_memory, sum_bytes
from oomph.sensing.occupants import Occupants
from oomph.sensing.problems import Problems
from oomph.sensing.processes import Listed, list_kind
from oomph.sensing.visible import Shown
from oomph.units import MIB

# Where nobody can tell whose a process is, memory that grew by more than this since the start is
# taken for this run's: an idle driver's figure moves by less.
_GREW_BYTES = 64 * MIB
_MOST_LAG_S = 0.5  # three of the driver's sample periods
_LONG_TURN_S = 3.0  # after so long, what takes turns is asked for twice


@dataclass(frozen=True, slots=True)
class Identity:
    """A GPU as the run counts it."""

    place: int  # in Run.gpus
    shown: Shown
    cuda_index: int | None
    looks_apart_s: float

    @property
    def index(self) -> int:
        return self.shown.gpu.index

    @property
    def own_index(self) -> int:
        """Of a slice, its number among those of its GPU, as a Device has it."""
        return self.index if self.shown.slice is None else self.shown.slice.slot


class Watch:
    """One GPU that answers. A GPU that comes back gets a new one."""

    def __init__(
        self, identity: Identity, looks: Looks, gpm: Gpm | None, clock: Callable[[], float]
    ) -> None:
        self.identity = identity
        self._clock = clock
        self._looks = looks
        self._gpm = gpm
        self.handle = looks.handle
        self.is_slice = identity.shown.slice is not None
        self._is_cut = bool(identity.shown.gpu.slices) and not self.is_slice
        self.occupants = Occupants()
        self._graphics: tuple[Listed, ...] = ()
        self._problem: str | None = None
        self._turn = 0
        self._held_by: tuple[str, ...] | None = None
        self._temperature_c: int | None = None
        self._power_w: float | None = None
        self._sm_ratio: float | None = None
        self._dram_ratio: float | None = None
        self._first_used_bytes: int | None = None
        self.name = self._name()
        self._settled = settle_memory(looks.first_memory, (), Problems(), name=self.name)
        self.total_bytes = self._settled.total_bytes
        self.power_limit_w = self._limit_w()
        self.link_bytes_per_s = looks.link_bytes_per_s()
        self._counters, self._counted_s = looks.counters(), clock()
        self._counts_energy = self._counters.energy_mj is not None
        self._begin(clock())
        self.is_used = False
        self.last: GpuSpan | None = None

    def _limit_w(self) -> float | None:
        limit = self._looks.nvml.ask_gpu(self._looks.handle, "nvmlDeviceGetEnforcedPowerLimit")
        return None if isinstance(limit, Refusal) else limit / 1000

    def _name(self) -> str | None:
        name = self._looks.nvml.ask_gpu(self._looks.handle, "nvmlDeviceGetName")
        return None if isinstance(name, Refusal) else name

    def _begin(self, now_s: float) -> None:
        self._began_s = now_s
        self._seen: list[Seen] = []  # bytes
        self._percents: list[Seen] = []

    # ---- five times a turn

    def look(self) -> Refusal | None:
        """How full it is. A Refusal that is not for good means that the GPU is lost."""
        used = self._looks.used_bytes()
        if isinstance(used, Refusal):
            return None if used.is_for_good else used
        if used is not None:
            if self._first_used_bytes is None:
                self._first_used_bytes = used
            self._seen.append((self._clock(), used))
        if not self._looks.has_samples and not self.is_slice:
            percent = self._looks.busy_percent_now()
            if percent is not None:
                self._percents.append((self._clock(), percent))
        return None

    # ---- each turn

    def spans(self, now_s: float) -> list[GpuSpan]:
        """What was seen since the last turn, by the second."""
        self._ask_in_turn()
        if now_s - self._began_s > _LONG_TURN_S:
            self._ask_in_turn()
        self._list_processes()
        counted = self._count()
        # The driver's samples may have ended a little ahead of our clock: so did the last span.
        parts = self._parts(max(now_s, self._began_s))
        spans = [self._span(part, counted, place, len(parts)) for place, part in enumerate(parts)]
        self.last = spans[-1]
        self._note_use(self.last)
        self._begin(self.last.ended_s)
        return spans

    def _parts(self, now_s: float) -> list[Part]:
        began_s = self._began_s
        if not self._looks.has_samples or self.is_slice:
            return cut(began_s, now_s, self._seen, self._percents)
        busy = self._looks.busy_percents()
        ended_s = self._end(busy.covered_s, now_s)
        if ended_s is None:
            return [whole(began_s, now_s, self._seen, busy.values)]
        percents = [(began_s + after_s, percent) for after_s, percent in busy.values]
        return cut(began_s, ended_s, self._seen, percents)

    def _span(self, part: Part, counted: Counters, place: int, number: int) -> GpuSpan:
        """The part at that place of so many."""
        shares, percents, used = self.occupants.shares, part.percents, part.used_bytes
        return GpuSpan(
            gpu=self.identity.place,
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
            throttled_ratio=None if self._held_by is None else float(bool(self._held_by)),
            throttled_by=self._held_by or (),
            sm_active_ratio=self._sm_ratio,
            memory_active_ratio=self._dram_ratio,
            received_bytes=share(counted.received_bytes, place, number),
            sent_bytes=share(counted.sent_bytes, place, number),
        )

    def _end(self, covered_s: float | None, now_s: float) -> float | None:
        """Where the driver's samples end: a turn is as long as they cover, so none counts twice.

        The driver's newest sample is up to a period old; further away its clock is not trusted.
        """
        ended_s = self._began_s + (covered_s or 0.0)
        return ended_s if covered_s and abs(now_s - ended_s) <= _MOST_LAG_S else None

    def _ask_in_turn(self) -> None:
        """Two more questions: what changes slowly is asked every second or fourth turn."""
        turn = self._turn
        self._turn = (turn + 1) % 4
        if turn % 2 and self._gpm is not None:
            self._sm_ratio, self._dram_ratio = self._gpm.ratios()
            return
        nvml, handle = self._looks.nvml, self._looks.handle
        self._held_by = self._looks.held_down_by()
        if (turn // 2 if self._gpm is not None else turn) % 2:
            self._list_graphics()
        else:
            problems = Problems()
            self._temperature_c = read_temperature_c(nvml, handle, problems)
            if self._counters.power_w is None and not self._counts_energy:
                self._power_w = read_power_w(nvml, handle, problems)
            self._problem = problems.told()

    def _list_graphics(self) -> None:
        listed = list_kind(self._looks.nvml, self._looks.handle, "graphics", self.total_bytes)
        self._graphics = () if isinstance(listed, Refusal) else listed

    def _list_processes(self) -> None:
        if self._is_cut:
            return
        compute = list_kind(self._looks.nvml, self._looks.handle, "compute", self.total_bytes)
        if isinstance(compute, Refusal):
            self.occupants.update(compute)
            return
        computing = {process.pid for process in compute}
        drawing = (process for process in self._graphics if process.pid not in computing)
        self.occupants.update((*compute, *drawing))

    def _count(self) -> Counters:
        """Since the last turn: bytes over PCIe, and mean power by the energy counter.

        A counter that stands still tells nothing: no GPU draws 0 W. Then it is the power of this
        moment, if the driver tells that.
        """
        began, began_s = self._counters, self._counted_s
        self._counters, self._counted_s = ended, ended_s = self._looks.counters(), self._clock()
        energy_mj = _growth(began.energy_mj, ended.energy_mj)
        self._counts_energy = bool(energy_mj)
        if energy_mj and ended_s > began_s:
            power_w: float | None = energy_mj / 1000 / (ended_s - began_s)
        else:
            power_w = ended.power_w or self._power_w or None
        return Counters(
            power_w=power_w,
            received_bytes=_growth(began.received_bytes, ended.received_bytes),
            sent_bytes=_growth(began.sent_bytes, ended.sent_bytes),
        )

    def _unified(self) -> int | None:
        """A GPU without memory of its own: what its processes hold."""
        is_unified = self._settled.source == "unified"
        return sum_bytes(self.occupants.processes) if is_unified else None

    def _note_use(self, span: GpuSpan) -> None:
        if self.occupants.run_pids:
            self.is_used = True
        elif span.run_bytes is None and span.used_bytes is not None:
            first_bytes = self._first_used_bytes or 0
            self.is_used |= span.used_bytes - first_bytes > _GREW_BYTES

    # ---- what it is, and how it is now

    @property
    def busy_source(self) -> BusySource | None:
        if self.is_slice:
            return None  # the driver does not measure it under MIG
        return "buffered" if self._looks.has_samples else "polled"

    def watched_gpu(self) -> WatchedGpu:
        return WatchedGpu(
            index=self.identity.index,
            uuid=self.identity.shown.uuid,
            name=self.name,
            total_bytes=self.total_bytes,
            power_limit_w=self.power_limit_w,
            busy_source=self.busy_source,
            is_used=self.is_used,
            cuda_index=self.identity.cuda_index,
            looks_apart_s=self.identity.looks_apart_s,
            link_bytes_per_s=self.link_bytes_per_s,
        )

    def device(self) -> Device:
        """The same as `oomph gpus` shows it, of the last span."""
        span, settled = self.last, self._settled
        return Device(
            index=self.identity.own_index,
            uuid=self.identity.shown.uuid,
            name=self.name,
            total_bytes=self.total_bytes,
            used_bytes=span.used_bytes if span else settled.used_bytes,
            memory_source=settled.source,
            busy_ratio=span.busy_ratio if span else None,
            temperature_c=self._temperature_c,
            power_w=span.power_w if span else None,
            processes=self.occupants.processes,
            problem=self._problem,
            cuda_index=self.identity.cuda_index,
            is_slice=self.is_slice,
        )


def _growth(before: int | None, now: int | None) -> int | None:
    """Of a counter; None where it is not known, or has started anew."""
    return now - before if before is not None and now is not None and now >= before else None
