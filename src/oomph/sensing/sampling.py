"""Sample the GPU library at a steady pace in a background thread -> GpuSpan, Event.

A turn is five memory readings; everything else is asked at the end of the turn. If a call hangs,
a GPU is lost or the driver is reloaded, only that thread stops: `take` always returns at once.
Events record when such a problem began and when it was over.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from oomph.errors import OomphError, Unreadable
from oomph.records.machine import Device, Machine, Process
from oomph.records.run import LOOKS_APART_S, Event, EventKind, GpuSpan, Peak, WatchedGpu
from oomph.sensing.backends import Backend, session
from oomph.sensing.backends.session import with_backend
from oomph.sensing.devices import NOTHING_READ, on_all
from oomph.sensing.mapping import Shown, identify_gpus, open_shown, slices_of, visible_gpus
from oomph.sensing.watched import PART_S, Watch
from oomph.units import format_bytes


@dataclass(slots=True, eq=False)
class SampledGpu:
    """A watched GPU, whether or not it answers at the moment."""

    place: int  # in Run.gpus
    shown: Shown
    known: WatchedGpu  # as of its last answer
    watch: Watch | None = None
    why_lost: str | None = None
    retry_s: float = 0.0

    def watched(self) -> WatchedGpu:
        return self.known if self.watch is None else self.watch.watched_gpu

    def lose(self, why: str, retry_s: float) -> None:
        self.known = self.watched()
        self.watch, self.why_lost, self.retry_s = None, why, retry_s

    def device(self) -> Device:
        """Return the GPU in the form that `oomph gpus` shows."""
        watch, known = self.watch, self.watched()
        figures = {"problem": self.why_lost} if watch is None else watch.figures()
        return replace(
            NOTHING_READ,
            index=self.shown.device.index,
            uuid=known.uuid,
            name=known.name,
            total_bytes=known.total_bytes,
            cuda_index=known.cuda_index,
            is_slice=self.shown.device.is_slice,
            **figures,
        )


def as_devices(gpus: Sequence[SampledGpu]) -> tuple[Device, ...]:
    """Nest slices under their GPU, as `oomph gpus` shows them."""
    found: dict[int, Device] = {}
    for gpu in gpus:
        device, index = gpu.device(), gpu.shown.gpu.index
        if not device.is_slice:
            found[index] = device
            continue
        whole = found.get(index) or replace(
            NOTHING_READ,
            index=index,
            uuid=gpu.shown.gpu.uuid,
            name=gpu.shown.gpu.name,
        )
        found[index] = replace(whole, mig_enabled=True, slices=(*whole.slices, device))
    return tuple(
        replace(one, processes=on_all(one.slices)) if one.slices else one for one in found.values()
    )


LOOKS_PER_TURN = 5  # memory readings; a turn usually takes a second
_NUM_EARLY = 5  # short first turns: gives a figure after one second even if later turns are long
RETRY_S = 5.0  # a lost GPU answers slowly, if at all; retrying this seldom costs little
HANGS_S = 2.0  # without an answer for this long, report a hang: a slow call takes milliseconds
_MOST_NEIGHBOURS = 100  # events per run

Which = Literal["visible", "all"]


@dataclass(frozen=True, slots=True)
class Taken:
    """The spans and events since the last `take`."""

    spans: tuple[GpuSpan, ...]
    events: tuple[Event, ...]


class Sampler:
    """Sample the GPUs that CUDA shows to this process, or all GPUs.

    With `cuda_index`, sample only that GPU, if it exists. `look_s` is the time between two memory
    readings, of which `looks_per_turn` make a turn. If a GPU is divided into MIG slices, the slices
    are sampled. `watches_cut_gpus` adds the GPU as a whole, without processes: its slices list
    them, and a sum would count them twice. `watches_processes` asks for each process's share,
    instead of what throttles the clocks.
    """

    def __init__(
        self,
        which: Which = "visible",
        clock: Callable[[], float] | None = None,
        *,
        cuda_index: int | None = None,
        look_s: float = LOOKS_APART_S,
        looks_per_turn: int = LOOKS_PER_TURN,
        watches_cut_gpus: bool = False,
        watches_processes: bool = False,
    ) -> None:
        self._which = which
        self._watches_cut_gpus = watches_cut_gpus
        self._watches_processes = watches_processes
        self._cuda_index = cuda_index
        self._look_s = look_s
        self._looks_per_turn = looks_per_turn
        self.turned = threading.Event()  # there is something to take; callers of `take` clear it
        started = time.monotonic()
        self.clock = clock or (lambda: time.monotonic() - started)
        self.problem: str | None = None  # why nothing can be watched
        self.is_ready = threading.Event()  # set once the GPUs are known, or known to be absent
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
        self._with_activity = False
        # Released to stop. Waiting for a bare lock happens in C. An Event would touch a dozen more
        # objects, and next to a training run none of them is in the CPU caches.
        self._going_on = threading.Lock()
        self._going_on.acquire()
        self._run_pids: frozenset[int] = frozenset()
        self._peaks: tuple[Peak, ...] = ()
        self._thread = threading.Thread(target=self._run, name="oomph-gpus", daemon=True)

    # ---- for callers: none of these waits for the driver

    def start(self) -> None:
        self._thread.start()

    def take(self) -> Taken:
        """Return the spans that ended and the events that happened since the last call."""
        self._notice_a_hang()
        with self._lock:
            taken = Taken(tuple(self._spans), tuple(self._events))
            self._spans.clear()
            self._events.clear()
        return taken

    def gpus(self) -> tuple[WatchedGpu, ...]:
        """Return the watched GPUs. Spans and events refer to them by their position here."""
        return tuple(gpu.watched() for gpu in self._gpus)

    def machine(self) -> Machine:
        """Return the GPUs as of the last reading."""
        problem = self.problem or self._driver_away or self._hang()
        return Machine(
            gpus=as_devices(self._gpus),
            problem=problem,
            is_readable=self.problem is None,
        )

    def process_shares(self) -> Mapping[str, Mapping[int, float]]:
        """Return each process's share, by UUID of its GPU and by PID, where that is known."""
        watches = (gpu.watch for gpu in self._gpus if gpu.watch is not None)
        return {
            watch.watched_gpu.uuid or "": watch.process_shares
            for watch in watches
            if watch.process_shares is not None
        }

    def stop(self, run_pids: frozenset[int] = frozenset(), timeout_s: float = 2.0) -> None:
        """Take a last reading and the accounting of these processes. Do not wait if it hangs."""
        self._run_pids = run_pids
        if self._going_on.locked():
            self._going_on.release()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def peaks(self) -> tuple[Peak, ...]:
        """Return the peaks of the run's processes by the driver's accounting. Call after `stop`."""
        return self._peaks

    def _notice_a_hang(self) -> None:
        """Report a hang of the driver: the same reading is under way at two takes, and too long."""
        since_s, before_s = self._asking_since_s, self._asked_before_s
        self._asked_before_s = since_s
        if since_s is None or since_s != before_s or self._hangs_since_s is not None:
            return
        if self.clock() - since_s > HANGS_S:
            with self._lock:
                self._hangs_since_s = since_s
            self._note("lost", "the driver does not answer", at_s=since_s)

    def _hang(self) -> str | None:
        since_s = self._hangs_since_s
        if since_s is None:
            return None
        return f"the driver has not answered for {self.clock() - since_s:.0f} s"

    # ---- in the thread

    def _run(self) -> None:
        try:
            self.open()
            self.is_ready.set()
            if not self.problem:
                self._watch()
        except Exception as error:  # noqa: BLE001 - the command goes on, and the report says so
            why = " ".join(f"{type(error).__name__}: {error}".split())
            self._note("warning", f"the GPUs are no longer watched: {why:.500}")
        finally:
            self.is_ready.set()
            self.turned.set()

    def open(self) -> None:
        """Find the GPUs to watch. Runs in the thread, like `look`."""
        try:
            shown = with_backend(self._find)
        except OomphError as error:
            self.problem = error.in_one_line()
            return
        for index, device in self._wanted(shown):
            known = WatchedGpu(
                index=device.gpu.index,
                uuid=device.uuid,
                name=device.gpu.name,
                total_bytes=None,
                power_limit_w=None,
                busy_source=None,
                is_used=False,
                cuda_index=index if self._which == "visible" else None,
                looks_apart_s=self._look_s,
            )
            self._gpus.append(SampledGpu(len(self._gpus), device, known))
        if not self._gpus:
            self.problem = "CUDA_VISIBLE_DEVICES shows no GPU"

    def _wanted(self, shown: Sequence[Shown]) -> list[tuple[int, Shown]]:
        """Return the GPU `cuda_index`; all if it is not shown, as if a launcher shows only one."""
        each = list(enumerate(shown))
        only = [] if self._cuda_index is None else [p for p in each if p[0] == self._cuda_index]
        return only or each

    def _find(self, backend: Backend) -> Sequence[Shown]:
        gpus = identify_gpus(backend)
        why_no_activity = backend.why_no_activity()
        self._with_activity = why_no_activity is None
        if why_no_activity:
            self._note("warning", why_no_activity)
        if self._which == "all":
            return [shown for gpu in gpus for shown in _parts(gpu, with_cut=self._watches_cut_gpus)]
        visible = visible_gpus(gpus)
        if visible.problem:
            self._note("warning", visible.problem)
        return visible.shown

    def _watch(self) -> None:
        next_s, turns = self.clock(), self._turns()
        while True:
            self._asking_since_s = self.clock()
            self.look(ends_turn=next(turns))
            self._asking_since_s = None
            self._note_the_end_of_a_hang()
            # After a hang, continue from now; missed readings are not made up for.
            now_s = self.clock()
            next_s = max(next_s + self._look_s, now_s)
            if self._going_on.acquire(timeout=next_s - now_s):
                break
        self.look(ends_turn=True)
        with contextlib.suppress(Unreadable):  # a driver that is gone by then has no accounting
            self._peaks = with_backend(self._account)

    def _turns(self) -> Iterator[bool]:
        """Yield, for each reading, whether it ends a turn."""
        yield False
        per_second = max(round(PART_S / self._look_s), 1)
        for number in itertools.count():
            num_looks = per_second if number < _NUM_EARLY else self._looks_per_turn
            yield from (look == num_looks for look in range(1, num_looks + 1))

    def look(self, *, ends_turn: bool) -> None:
        """Ask every GPU once."""
        now_s = self.clock()
        if self._driver_away and now_s < self._reopen_s:
            return
        try:
            with_backend(lambda backend: self._look_with(backend, now_s, ends_turn))
        except Unreadable as error:
            self._lose_driver(error.in_one_line(), now_s)
        if ends_turn:
            self.turned.set()

    def _look_with(self, backend: Backend, now_s: float, ends_turn: bool) -> None:
        for gpu in self._gpus:
            watch = gpu.watch or self._try_again(backend, gpu, now_s)
            if watch is None:
                continue
            refusal = watch.look()
            if refusal is not None:
                if refusal.is_driver_gone:
                    self._lose_driver(refusal.text, now_s)
                    return
                self._lose_one(gpu, refusal.text, now_s)
            elif ends_turn:
                self._end_turn(gpu, watch)
        if self._driver_away and any(gpu.watch for gpu in self._gpus):
            self._driver_away = None
            self._note("back", "the driver answers again", at_s=now_s)

    def _end_turn(self, gpu: SampledGpu, watch: Watch) -> None:
        spans = watch.spans(self.clock())
        with self._lock:
            self._spans += spans
        for process in watch.occupants.newcomers() if watch.watched_gpu.is_used else ():
            if self._num_neighbours < _MOST_NEIGHBOURS:
                self._num_neighbours += 1
                self._note("neighbour", _in_words(process), gpu=gpu.place)

    def _try_again(self, backend: Backend, gpu: SampledGpu, now_s: float) -> Watch | None:
        if now_s < gpu.retry_s:
            return None
        gpu.retry_s = now_s + RETRY_S
        try:
            opened = open_shown(backend, gpu.shown)
        except Unreadable as error:
            if gpu.why_lost is None:
                self._lose_one(gpu, error.because or error.what, now_s)
            return None
        gpu.watch = Watch(
            gpu.place,
            gpu.known,
            gpu.shown,
            opened,
            self.clock,
            with_activity=self._with_activity,
            with_shares=self._watches_processes,
        )
        if gpu.why_lost is not None:
            gpu.why_lost = None
            if not self._driver_away:
                self._note("back", "it answers again", gpu=gpu.place, at_s=now_s)
        return gpu.watch

    def _lose_one(self, gpu: SampledGpu, why: str, now_s: float) -> None:
        gpu.lose(why, now_s + RETRY_S)
        self._note("lost", why, gpu=gpu.place, at_s=now_s)

    def _lose_driver(self, why: str, now_s: float) -> None:
        """Mark the driver as gone; when it comes back, it must be opened again."""
        for gpu in self._gpus:
            gpu.lose(why, 0.0)
        session.close()
        self._reopen_s = now_s + RETRY_S
        if self._driver_away is None:
            self._driver_away = why
            self._note("lost", why, at_s=now_s)

    def _note_the_end_of_a_hang(self) -> None:
        if self._hangs_since_s is None:
            return
        with self._lock:
            since_s, self._hangs_since_s = self._hangs_since_s, None
        if since_s is not None:
            now_s = self.clock()
            self._note(
                "back", f"the driver answers again, after {now_s - since_s:.1f} s", at_s=now_s
            )

    def _account(self, _: Backend) -> tuple[Peak, ...]:
        """Return the exact peak of each process of the run, if the driver's accounting is on."""
        return tuple(
            Peak(source="accounting", gpu=gpu.place, pid=pid, used_bytes=used_bytes)
            for gpu in self._gpus
            if gpu.watch is not None
            for pid, used_bytes in gpu.watch.gpu.accounted_peaks(
                self._run_pids | gpu.watch.occupants.run_pids
            ).items()
        )

    def _note(
        self, kind: EventKind, text: str, *, gpu: int | None = None, at_s: float | None = None
    ) -> None:
        at_s = self.clock() if at_s is None else at_s
        with self._lock:
            self._events.append(Event(at_s=at_s, kind=kind, text=text, gpu=gpu))


def _parts(gpu: Device, *, with_cut: bool) -> list[Shown]:
    """Return the GPU or, if it is divided, its slices; `with_cut` adds the divided GPU itself."""
    slices = slices_of(gpu)
    return [Shown(gpu), *slices] if with_cut or not slices else slices


def _in_words(process: Process) -> str:
    """Describe a process without its command line, which may hold secrets."""
    held = "" if process.used_bytes is None else f" with {format_bytes(process.used_bytes)}"
    return f"process {process.pid} of {process.user or 'another user'}{held}"
