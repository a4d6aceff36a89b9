"""A running command, or this process -> its diary: what GPUs and processes do, each second.

It runs in its own thread, separate from the one that asks NVML, so a hung driver or disk cannot
delay a signal to the command. A fault here ends the watching, never the command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from oomph.monitoring.diary import Diary, RunStart
from oomph.monitoring.diary_reader import StepTail
from oomph.monitoring.wrapping import RECENT_S, Ended, Evidence, Stopping, judge
from oomph.records.report import Finding, FindingKind
from oomph.records.run import (
    Event,
    EventKind,
    GpuSpan,
    HostSpan,
    Probe,
    Progress,
    Run,
    StepSpan,
    WatchedGpu,
    halted_s,
    halts_of,
)
from oomph.records.run_spans import merge_gpu_spans, merge_host_spans, merge_step_spans
from oomph.sensing.host import ProcessTree, read_oom_kills
from oomph.sensing.sampling import Sampler

_PERIOD_S = 1.0
_LONGEST_PERIOD_S = 6.0  # longest wait for the sampler, which may hang or have nothing to sample
_MOST_RECENT = 1024  # spans; judgement: two minutes of eight GPUs
_LAST_WORDS_S = 5.0  # how long the command's end may be delayed by a hung disk or driver
_SILENT_S = 60.0  # a script that records steps has recorded some by then; if not, a warning is due


class Recorder:
    """Record the processes under `pid` (None: no processes) and the GPUs, until `finish`.

    It writes every second or, with a sampler passed by the caller, after each of its turns.
    """

    def __init__(
        self,
        pid: int | None,
        token: str | None,
        diary: Diary,
        probe: Probe,
        sampler: Sampler | None = None,
        processes_s: float = _PERIOD_S,
        *,
        clock: Callable[[], float] | None = None,
        alerts: bool = True,
    ) -> None:
        self._alerts = Alerts(diary.start, diary.directory)
        self._says_alerts = alerts
        self._clock = clock = clock or diary.start.now_s
        self._diary = diary
        self._probe = probe
        self._tree = None if pid is None else ProcessTree(pid, token, clock())
        self._processes_s, self._next_processes_s = processes_s, 0.0  # how often processes are read
        self._kills_before = read_oom_kills()
        self._follows_sampler = sampler is not None
        self.sampler = sampler or Sampler(clock=clock)
        self.stopping = Stopping(tuple if self._tree is None else self._tree.pids)
        self.recent: tuple[GpuSpan, ...] = ()  # replaced, never modified: any thread may read it
        self._warned: set[str] = set()
        self._noted: deque[Event] = deque()  # added by other threads, not written yet
        self._halts: list[Event] = []  # and the events that ended them
        self._ended: Ended | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oomph-diary", daemon=True)

    def start(self) -> None:
        self.sampler.start()
        self._thread.start()

    def note(self, kind: EventKind, text: str) -> None:
        """Add an event, to be written soon. Call it from any thread."""
        self._noted.append(self._event(kind, text))

    def finish(self, ended: Ended) -> bool:
        """Write how the command ended, and close the diary. Return False if the disk hangs."""
        self._ended = ended
        self._over.set()
        self.sampler.turned.set()
        self._thread.join(_LAST_WORDS_S)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._wait():
                self._record()
            self._write_ending()
        except Exception as error:  # noqa: BLE001 - the command goes on, whatever fails here
            self._warn(f"the run is no longer watched ({type(error).__name__}: {error})")

    def _wait(self) -> bool:
        """Wait until there is something to write; return True for the last time."""
        if not self._follows_sampler:
            return self._over.wait(_PERIOD_S)
        self.sampler.turned.wait(_LONGEST_PERIOD_S)
        self.sampler.turned.clear()
        return self._over.is_set()

    def _record(self) -> None:
        now_s, taken = self._clock(), self.sampler.take()
        if self.sampler.problem:
            self._warn(f"watching without GPU figures: {self.sampler.problem}")
        self.recent = (*self.recent, *taken.spans)[-_MOST_RECENT:]
        gpus, host_spans = self.sampler.gpus(), self._host_spans(now_s)
        self._diary.add_gpus(gpus)
        self._diary.add_spans(taken.spans, host_spans)
        noted = [self._noted.popleft() for _ in range(len(self._noted))]
        self._halts += (event for event in noted if event.kind in ("halted", "resumed"))
        for event in (*taken.events, *noted):
            self._diary.add(event)
        self._alerts.add(taken.spans, host_spans, (*taken.events, *noted))
        if self._tree is not None and not self._over.is_set():
            self._alert(now_s, gpus)
        if not self._diary.flush():
            self._warn(f"not everything of this run can be recorded: {self._diary.problem}")
        self._probe_it(now_s)

    def _alert(self, now_s: float, gpus: tuple[WatchedGpu, ...]) -> None:
        """Report problems while the run goes on; one process reports for all ranks."""
        try:
            found = self._alerts.new(now_s, gpus)
        except Exception as error:  # noqa: BLE001 - recorded data is kept, whatever fails here
            self._warn(f"no alerts ({type(error).__name__}: {error})")
            return
        for text in found:
            self._diary.add(self._event("alert", text))
            if self._says_alerts:
                say(text)

    def _host_spans(self, now_s: float) -> list[HostSpan]:
        is_due = self._over.is_set() or now_s >= self._next_processes_s
        if self._tree is None or not is_due:
            return []
        self._next_processes_s = now_s + self._processes_s - _PERIOD_S / 2
        return [self._tree.look(now_s)]

    def _probe_it(self, now_s: float) -> None:
        if self.stopping.is_wanted or self._probe.is_of_all:
            return
        worked_s = now_s - halted_s(halts_of(self._halts, now_s))
        progress = Progress()
        if self._probe.counts:
            progress = self._alerts.read_steps().progress()
            if not progress.is_reported and (worked_s > _SILENT_S or self._over.is_set()):
                self._warn(
                    f"the script reported no steps: {self._probe.in_words()} cannot be counted"
                )
        if self._probe.is_seen(worked_s, progress) and not self._over.is_set():
            self._diary.add(self._event("stopped", f"after {self._probe.in_words()}, as requested"))
            self.stopping.want()

    # ---- the end

    def _write_ending(self) -> None:
        self.sampler.stop(frozenset(self._tree.ever if self._tree else {os.getpid()}))
        self._record()
        for peak in self.sampler.peaks():
            self._diary.add(peak)
        if self._ended is not None:
            ending, event = judge(self._ended, self._evidence())
            if event is not None:
                self._diary.add(event)
            self._diary.add(ending)
        self._diary.close()

    def _evidence(self) -> Evidence:
        now_s, kills = self._clock(), read_oom_kills()
        return Evidence(
            at_s=now_s,
            gpus=self.sampler.gpus(),
            recent=[span for span in self.recent if span.ended_s > now_s - RECENT_S],
            says_out_of_memory=self._alerts.read_steps().has_run_out_of_memory,
            killed_in_group=kills.grew_in_group(self._kills_before),
            killed_on_machine=kills.grew_on_machine(self._kills_before),
        )

    def _event(self, kind: EventKind, text: str) -> Event:
        return Event(at_s=self._clock(), kind=kind, text=text)

    def _warn(self, text: str) -> None:
        """Warn once per cause: standard error belongs to the command."""
        kind = text.partition(":")[0].partition("(")[0]
        if kind in self._warned:
            return
        self._warned.add(kind)
        self._diary.add(self._event("warning", text))
        if self._tree is not None:  # this is the rank that reports for all
            say(text)


def say(text: str) -> None:
    """Print a line on standard error, if that can be written."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # closed by its reader, or full: nowhere to report it
            print(f"oomph: {text}", file=sys.stderr, flush=True)


# ---- a run under way -> alerts: one line each, each cause once ----
# Applies the report's rules to the whole run so far, kept as a few hundred spans that are merged in
# pairs as the run gets older. So a run of weeks costs no more than one of an hour.

LOOKS_S = 30.0
# What is reported, and the age of the run from which it is. Judgement: a trend needs time.
ALERTING: dict[FindingKind, float] = {
    "unstable": 0.0,  # the script has judged it
    "hang": 120.0,
    "spill": 300.0,
    "swapping": 300.0,
    "cpu-limit": 600.0,
    "host-contention": 600.0,
    "leak": 600.0,
    "fragmentation": 600.0,
    "host-leak": 1800.0,  # data caches can fill for a long time
    "slowing-down": 1800.0,
}
# Judgement: enough for the rules, and cheap to keep.
_MOST_SPANS = 128  # for each GPU, the host, or a rank
_MOST_NEW = 300
_MOST_EVENTS = 500

Span = TypeVar("Span", GpuSpan, HostSpan, StepSpan)


class _Coarse(Generic[Span]):
    """Spans over the whole run, merged in pairs when there are too many."""

    def __init__(self, merge: Callable[[Sequence[Span]], Span]) -> None:
        self._merge: Callable[[Sequence[Span]], Span] = merge
        self._merged: list[Span] = []
        self._open: list[Span] = []
        self._per_span = 1

    def add(self, span: Span) -> None:
        self._open.append(span)
        if len(self._open) >= self._per_span:
            self._merged.append(self._merge(self._open))
            self._open = []
        if len(self._merged) >= _MOST_SPANS:
            merged = self._merged
            self._merged = [self._merge(merged[n : n + 2]) for n in range(0, len(merged), 2)]
            self._per_span *= 2

    def all(self) -> list[Span]:
        """Return all spans; the newest stay unmerged, so that older ones do not hide them."""
        older, newest = self._open[:-_MOST_NEW], self._open[-_MOST_NEW:]
        return self._merged + ([self._merge(older)] if older else []) + newest


class Alerts:
    """Alerts of one run, in the thread that writes its diary."""

    def __init__(self, start: RunStart, directory: Path) -> None:
        self._start = start
        self._tail = StepTail(start, directory)
        self._gpus: dict[int, _Coarse[GpuSpan]] = {}
        self._ranks: dict[int, _Coarse[StepSpan]] = {}
        self._host = _Coarse[HostSpan](merge_host_spans)
        self._events: list[Event] = []
        self._alerted_kinds: set[FindingKind] = set()
        self._next_s = LOOKS_S

    def add(
        self,
        gpu_spans: Iterable[GpuSpan],
        host_spans: Iterable[HostSpan],
        events: Iterable[Event],
    ) -> None:
        """Add what was recorded since the last call."""
        for gpu_span in gpu_spans:
            self._gpus.setdefault(gpu_span.gpu, _Coarse(merge_gpu_spans)).add(gpu_span)
        for host_span in host_spans:
            self._host.add(host_span)
        self._events += events

    def new(self, now_s: float, gpus: Sequence[WatchedGpu]) -> list[str]:
        """Return the new alerts: usually none, and none twice."""
        if now_s < self._next_s:
            return []
        from oomph.explaining.diagnose import diagnose

        self._next_s = now_s + LOOKS_S
        self.read_steps()
        fresh = [
            found
            for found in diagnose(self._run(now_s, gpus)).findings
            if now_s >= ALERTING.get(found.kind, now_s + 1)
            and found.kind not in self._alerted_kinds
        ]
        self._alerted_kinds |= {found.kind for found in fresh}
        return [_in_one_line(found) for found in fresh]

    def read_steps(self) -> StepTail:
        """Add what the script has recorded since the last call; return all that is known of it."""
        for record in self._tail.read():
            if isinstance(record, Event):
                self._events.append(record)
            else:
                self._ranks.setdefault(record.rank, _Coarse(merge_step_spans)).add(record)
        # Only the current phase matters, and a run of weeks has many.
        self._events = self._events[-_MOST_EVENTS:]
        return self._tail

    def _run(self, now_s: float, gpus: Sequence[WatchedGpu]) -> Run:
        return self._start.run(
            gpus=gpus,
            gpu_spans=[span for one in self._gpus.values() for span in one.all()],
            host_spans=self._host.all(),
            step_spans=[span for one in self._ranks.values() for span in one.all()],
            events=self._events,
            last_seen_s=now_s,
        )


def _in_one_line(found: Finding) -> str:
    """Return the finding's sentence with its main figure."""
    return f"{found.sentence} ({found.evidence[0]})" if found.evidence else found.sentence
