"""A steady clock: NVML -> GpuSpan, Event, as long as somebody watches.

NVML is asked in a thread of its own: five looks at the memory make a turn, at whose end all else
is asked. A call that hangs, a GPU that is lost and a driver that is reloaded stop that thread at
most, never whoever takes what it has found: `take` returns at once. When it happened and when it
was over are events.

    sampler = Sampler()
    sampler.start()
    taken = sampler.take()          # once a second: spans and events since the last time
    sampler.machine()               # the GPUs as they are now
    sampler.stop()
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from oomph.errors import OomphError, Unreadable
from oomph.records.machine import Machine, Process
from oomph.records.run import LOOKS_APART_S, Event, EventKind, GpuSpan, Peak, WatchedGpu
from oomph.sensing import cutting
from oomph.sensing import nvml as session
from oomph.sensing.accounting import accounted_peaks
from oomph.sensing.gpm import dcgm_runs, open_gpm
from oomph.sensing.looks import Looks
from oomph.sensing.mapping import identify_gpus, open_shown, visible_gpus
from oomph.sensing.nvml import Nvml, Refusal, with_nvml
from oomph.sensing.sampled_gpus import SampledGpu, as_devices, drop, unwatched, watched
from oomph.sensing.visible import GpuIdentity, Shown
from oomph.sensing.watched import Identity, Watch
from oomph.units import format_bytes

LOOKS_PER_TURN = 5  # at the memory: usually a turn a second
_NUM_EARLY = 5  # turns: who takes longer ones has a figure after a second, all the same
RETRY_S = 5.0  # a lost GPU answers slowly, if at all: seldom enough not to matter
HANGS_S = 2.0  # no answer for so long is worth telling: a slow call takes milliseconds
_MOST_NEIGHBOURS = 100  # events of one run

Which = Literal["visible", "all"]


@dataclass(frozen=True, slots=True)
class Taken:
    """What was found since the last time."""

    spans: tuple[GpuSpan, ...]
    events: tuple[Event, ...]


class Sampler:
    """Watches the GPUs that CUDA shows to this process, or all of them.

    With `cuda_index` only that one, if there is one. `look_s` is from one look to the next.
    Of a GPU that is cut into slices those are watched; with `watches_cut_gpus` also the whole of
    it, without its processes, which its slices have: a sum over all would count them twice.
    """

    def __init__(
        self,
        which: Which = "visible",
        clock: Callable[[], float] | None = None,
        *,
        cuda_index: int | None = None,
        look_s: float = LOOKS_APART_S,
        watches_cut_gpus: bool = False,
    ) -> None:
        self._which = which
        self._watches_cut_gpus = watches_cut_gpus
        self._cuda_index = cuda_index
        self._look_s = look_s
        self.turned = threading.Event()  # there is something to take; whoever takes it clears this
        started = time.monotonic()
        self.clock = clock or (lambda: time.monotonic() - started)
        self.problem: str | None = None  # why nothing can be watched
        self.is_ready = threading.Event()  # the GPUs are known, or that there are none
        self._gpus: list[SampledGpu] = []
        self._driver_away: str | None = None
        self._reopen_s = 0.0
        self._lock = threading.Lock()
        self._spans: list[GpuSpan] = []
        self._events: list[Event] = []
        self._asking_since_s: float | None = None
        self._asked_before_s: float | None = None
        self._hangs_since_s: float | None = None
        self._num_neighbours = 0
        self._uses_gpm = False
        # Released to stop. A lock alone is waited for in C: an Event wakes a dozen objects more,
        # none of which is in the processor's caches beside a training.
        self._going_on = threading.Lock()
        self._going_on.acquire()
        self._run_pids: frozenset[int] = frozenset()
        self._peaks: tuple[Peak, ...] = ()
        self._thread = threading.Thread(target=self._run, name="oomph-nvml", daemon=True)

    # ---- for whoever watches: none of these waits for NVML

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Taken:
        """The spans that ended and the events that happened since the last time."""
        self._notice_a_hang()
        with self._lock:
            taken = Taken(tuple(self._spans), tuple(self._events))
            self._spans.clear()
            self._events.clear()
        return taken

    def gpus(self) -> tuple[WatchedGpu, ...]:
        """What is watched; the places of spans and events count in this order."""
        return tuple(watched(gpu) for gpu in self._gpus)

    def machine(self) -> Machine:
        """The GPUs as they were at the last look."""
        problem = self.problem or self._driver_away or self._hang()
        return Machine(
            gpus=as_devices(self._gpus),
            problem=problem,
            is_readable=self.problem is None,
        )

    def stop(self, run_pids: frozenset[int] = frozenset(), timeout_s: float = 2.0) -> None:
        """One last look, and accounting of these processes; NVML that hangs is left behind."""
        self._run_pids = run_pids
        if self._going_on.locked():
            self._going_on.release()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def peaks(self) -> tuple[Peak, ...]:
        """After `stop`: what the driver's accounting says of the run's processes."""
        return self._peaks

    def _notice_a_hang(self) -> None:
        """The same look under way at two takes, for long: NVML hangs, and not this process."""
        since_s, before_s = self._asking_since_s, self._asked_before_s
        self._asked_before_s = since_s
        if since_s is None or since_s != before_s or self._hangs_since_s is not None:
            return
        if self.clock() - since_s > HANGS_S:
            with self._lock:
                self._hangs_since_s = since_s
            self._tell("lost", "NVML does not answer", at_s=since_s)

    def _hang(self) -> str | None:
        since_s = self._hangs_since_s
        if since_s is None:
            return None
        return f"NVML has not answered for {self.clock() - since_s:.0f} s"

    # ---- in the thread

    def _run(self) -> None:
        try:
            self.open()
            self.is_ready.set()
            if not self.problem:
                self._watch()
        except Exception as error:  # noqa: BLE001 - the command goes on, and the report says so
            told = " ".join(f"{type(error).__name__}: {error}".split())
            self._tell("warning", f"the GPUs are no longer watched: {told:.500}")
        finally:
            self.is_ready.set()
            self.turned.set()

    def open(self) -> None:
        """Find out what there is to watch. The thread does it, as it does the next one."""
        try:
            shown = with_nvml(self._find)
        except OomphError as error:
            self.problem = error.in_one_line()
            return
        for index, device in self._wanted(shown):
            cuda_index = index if self._which == "visible" else None
            identity = Identity(len(self._gpus), device, cuda_index, self._look_s)
            self._gpus.append(unwatched(identity))
        if not self._gpus:
            self.problem = "CUDA_VISIBLE_DEVICES shows no GPU"
        self._uses_gpm = not dcgm_runs()
        if not self._uses_gpm:
            self._tell("warning", "SM activity is left to DCGM, whose host engine runs here")

    def _wanted(self, shown: Sequence[Shown]) -> list[tuple[int, Shown]]:
        """Where a launcher shows each process its own GPU alone, that is the one."""
        each = list(enumerate(shown))
        only = [] if self._cuda_index is None else [p for p in each if p[0] == self._cuda_index]
        return only or each

    def _find(self, nvml: Nvml) -> Sequence[Shown]:
        gpus = identify_gpus(nvml)
        if self._which == "all":
            return [shown for gpu in gpus for shown in _parts(gpu, with_cut=self._watches_cut_gpus)]
        visible = visible_gpus(gpus)
        if visible.problem:
            self._tell("warning", visible.problem)
        return visible.shown

    def _watch(self) -> None:
        next_s, turns = self.clock(), self._turns()
        while True:
            self._asking_since_s = self.clock()
            self.look(ends_turn=next(turns))
            self._asking_since_s = None
            self._note_the_end_of_a_hang()
            # After a hang it goes on from now: what was missed is not made up for.
            now_s = self.clock()
            next_s = max(next_s + self._look_s, now_s)
            if self._going_on.acquire(timeout=next_s - now_s):
                break
        self.look(ends_turn=True)
        with contextlib.suppress(Unreadable):  # a driver that is away at the end keeps no accounts
            self._peaks = with_nvml(self._account)

    def _turns(self) -> Iterator[bool]:
        """Of each look, whether a turn ends with it."""
        yield False
        per_second = max(round(cutting.PART_S / self._look_s), 1)
        for number in itertools.count():
            num_looks = per_second if number < _NUM_EARLY else LOOKS_PER_TURN
            yield from (look == num_looks for look in range(1, num_looks + 1))

    def look(self, *, ends_turn: bool) -> None:
        """Ask every GPU once."""
        now_s = self.clock()
        if self._driver_away and now_s < self._reopen_s:
            return
        try:
            with_nvml(lambda nvml: self._look_with(nvml, now_s, ends_turn))
        except Unreadable as error:
            self._lose_driver(error.in_one_line(), now_s)
        if ends_turn:
            self.turned.set()

    def _look_with(self, nvml: Nvml, now_s: float, ends_turn: bool) -> None:
        for gpu in self._gpus:
            watch = gpu.watch or self._try_again(nvml, gpu, now_s)
            if watch is None:
                continue
            refusal = watch.look()
            if refusal is not None:
                self._lose(gpu, refusal, now_s)
                if refusal.is_of_all:
                    return
            elif ends_turn:
                self._end_turn(gpu, watch)
        if self._driver_away and any(gpu.watch for gpu in self._gpus):
            self._driver_away = None
            self._tell("back", "the driver answers again", at_s=now_s)

    def _end_turn(self, gpu: SampledGpu, watch: Watch) -> None:
        spans = watch.spans(self.clock())
        with self._lock:
            self._spans += spans
        if watch.is_used:
            self._announce(gpu, watch)

    def _announce(self, gpu: SampledGpu, watch: Watch) -> None:
        for process in watch.occupants.newcomers():
            if self._num_neighbours < _MOST_NEIGHBOURS:
                self._num_neighbours += 1
                self._tell("neighbour", _told(process), gpu=gpu.identity.place)

    def _try_again(self, nvml: Nvml, gpu: SampledGpu, now_s: float) -> Watch | None:
        if now_s < gpu.retry_s:
            return None
        gpu.retry_s = now_s + RETRY_S
        try:
            handle = open_shown(nvml, gpu.identity.shown)
        except Unreadable as error:
            if gpu.why_lost is None:
                self._lose_one(gpu, error.because or error.what, now_s)
            return None
        gpm = open_gpm(nvml, handle) if self._uses_gpm else None
        gpu.watch = Watch(gpu.identity, Looks(nvml, handle), gpm, self.clock)
        gpu.watch.is_used = gpu.watched.is_used
        gpu.watched = gpu.watch.watched_gpu()
        if gpu.why_lost is not None:
            gpu.why_lost = None
            if not self._driver_away:
                self._tell("back", "it answers again", gpu=gpu.identity.place, at_s=now_s)
        return gpu.watch

    def _lose(self, gpu: SampledGpu, refusal: Refusal, now_s: float) -> None:
        if refusal.is_of_all:
            self._lose_driver(refusal.text, now_s)
        else:
            self._lose_one(gpu, refusal.text, now_s)

    def _lose_one(self, gpu: SampledGpu, why: str, now_s: float) -> None:
        drop(gpu, why, now_s + RETRY_S)
        self._tell("lost", why, gpu=gpu.identity.place, at_s=now_s)

    def _lose_driver(self, why: str, now_s: float) -> None:
        """A driver that comes back wants to be opened anew."""
        for gpu in self._gpus:
            drop(gpu, why, 0.0)
        session.close()
        self._reopen_s = now_s + RETRY_S
        if self._driver_away is None:
            self._driver_away = why
            self._tell("lost", why, at_s=now_s)

    def _note_the_end_of_a_hang(self) -> None:
        if self._hangs_since_s is None:
            return
        with self._lock:
            since_s, self._hangs_since_s = self._hangs_since_s, None
        if since_s is not None:
            now_s = self.clock()
            self._tell("back", f"NVML answers again, after {now_s - since_s:.1f} s", at_s=now_s)

    def _account(self, nvml: Nvml) -> tuple[Peak, ...]:
        watches = [gpu.watch for gpu in self._gpus if gpu.watch is not None]
        return accounted_peaks(nvml, watches, self._run_pids)

    def _tell(
        self, kind: EventKind, text: str, *, gpu: int | None = None, at_s: float | None = None
    ) -> None:
        at_s = self.clock() if at_s is None else at_s
        with self._lock:
            self._events.append(Event(at_s=at_s, kind=kind, text=text, gpu=gpu))


def _parts(gpu: GpuIdentity, *, with_cut: bool) -> list[Shown]:
    """The GPU, or the slices that it is cut into; with itself, if that is wanted."""
    slices = [Shown(gpu, part) for part in gpu.slices]
    return [Shown(gpu), *slices] if with_cut or not slices else slices


def _told(process: Process) -> str:
    """Without its command line, which may hold what is not for a report."""
    held = "" if process.used_bytes is None else f" with {format_bytes(process.used_bytes)}"
    return f"process {process.pid} of {process.user or 'another user'}{held}"
