"""A running command, or this process -> its diary: what GPUs and processes do, by the second.

In a thread of its own, beside the one that asks NVML: neither a driver nor a disk that hangs can
keep a signal from the command. A fault here ends the watching, never the command.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oomph.records.probe import Probe
    from oomph.records.run import Event, EventKind, GpuSpan, HostSpan, WatchedGpu
    from oomph.running.diary import Diary
    from oomph.running.judging import Evidence
    from oomph.running.wrapping import Ended
    from oomph.sensing.sampling import Sampler

_PERIOD_S = 1.0
_LONGEST_PERIOD_S = 6.0  # of who waits for the sampler, which may hang or have nothing to sample
_MOST_RECENT = 1024
_LAST_WORDS_S = 5.0  # how long the end of the command waits for a disk or a driver that hangs
_SILENT_S = 60.0  # a script that tells its steps has told some by then, or is told of


class Recorder:
    """Watches the processes under `pid` (None: no processes) and the GPUs, until `finish`.

    It writes each second; with a sampler of the caller's, when that has taken a turn.
    """

    def __init__(
        self,
        pid: int | None,
        token: str | None,
        diary: Diary,
        clock: Callable[[], float],
        probe: Probe,
        sampler: Sampler | None = None,
        processes_s: float = _PERIOD_S,
        *,
        alerts: bool = True,
    ) -> None:
        from oomph.running.stopping import Stopping
        from oomph.sensing.host import ProcessTree
        from oomph.sensing.host_oom import read_oom_kills
        from oomph.sensing.sampling import Sampler
        from oomph.verbs.alerts import Alerts

        self._alerts = Alerts(diary.start, diary.directory)
        self._says_alerts = alerts
        self._clock = clock
        self._diary = diary
        self._probe = probe
        self._tree = None if pid is None else ProcessTree(pid, token, clock())
        self._processes_s, self._next_processes_s = processes_s, 0.0  # how often they are seen
        self._kills_before = read_oom_kills()
        self._follows_sampler = sampler is not None
        self.sampler = sampler or Sampler(clock=clock)
        self.stopping = Stopping(tuple if self._tree is None else self._tree.pids)
        self.recent: tuple[GpuSpan, ...] = ()  # replaced, never changed: any thread may read it
        self._warned: set[str] = set()
        self._noted: deque[Event] = deque()  # by another thread, and not written yet
        self._halts: list[Event] = []  # and what ended them
        self._ended: Ended | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="oomph-diary", daemon=True)

    def start(self) -> None:
        self.sampler.start()
        self._thread.start()

    def note(self, kind: EventKind, text: str) -> None:
        """Something has happened: it is written soon. From any thread."""
        self._noted.append(self._event(kind, text))

    def finish(self, ended: Ended) -> bool:
        """The command has ended: write how, and close the diary. False: the disk hangs."""
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
        except Exception as error:  # noqa: BLE001 - the command goes on, whatever is wrong here
            self._warn(f"the run is no longer watched ({type(error).__name__}: {error})")

    def _wait(self) -> bool:
        """Until there is something to write; True: it is the last."""
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
            self._warn(f"not everything can be kept of this run: {self._diary.problem}")
        self._probe_it(now_s)

    def _alert(self, now_s: float, gpus: tuple[WatchedGpu, ...]) -> None:
        """What goes wrong while there is still time, by the one that speaks for all ranks."""
        try:
            found = self._alerts.new(now_s, gpus)
        except Exception as error:  # noqa: BLE001 - what was seen is kept, whatever is wrong here
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
        from oomph.records.halts import halted_s, halts_of
        from oomph.records.probe import Progress
        from oomph.running.diary_reader import step_files
        from oomph.running.probing import read_progress

        worked_s = now_s - halted_s(halts_of(self._halts, now_s))
        progress = Progress()
        if self._probe.counts:
            progress = read_progress(step_files(self._diary.directory))
            if not progress.is_told and (worked_s > _SILENT_S or self._over.is_set()):
                self._warn(f"the script told no step, so nobody could count {self._wanted()}")
        if self._probe.is_seen(worked_s, progress) and not self._over.is_set():
            self._diary.add(self._event("stopped", f"after {self._wanted()}, as asked"))
            self.stopping.want()

    def _wanted(self) -> str:
        return self._probe.told()

    # ---- the end

    def _write_ending(self) -> None:
        from oomph.running.judging import judge
        from oomph.running.run_summaries import keep_summary

        ended = self._ended
        self.sampler.stop(frozenset(self._tree.ever if self._tree else {os.getpid()}))
        self._record()
        for peak in self.sampler.peaks():
            self._diary.add(peak)
        if ended is not None:
            ending, event = judge(ended, self._evidence())
            if event is not None:
                self._diary.add(event)
            self._diary.add(ending)
        self._diary.close()
        if ended is not None and not self._diary.unwritten():
            keep_summary(self._diary.directory, self._diary.start, ending)

    def _evidence(self) -> Evidence:
        from oomph.running.judging import RECENT_S, Evidence
        from oomph.sensing.host_oom import read_oom_kills

        now_s, kills = self._clock(), read_oom_kills()
        return Evidence(
            at_s=now_s,
            gpus=self.sampler.gpus(),
            recent=[span for span in self.recent if span.ended_s > now_s - RECENT_S],
            says_out_of_memory=self._says_out_of_memory(),
            killed_in_group=kills.grew_in_group(self._kills_before),
            killed_on_machine=kills.grew_on_machine(self._kills_before),
        )

    def _says_out_of_memory(self) -> bool:
        from oomph.records.run import Event
        from oomph.running.diary_reader import step_files
        from oomph.running.step_reader import told_steps

        return any(
            isinstance(record, Event) and record.kind == "out-of-memory"
            for path in step_files(self._diary.directory)
            for record in told_steps(path)
        )

    def _event(self, kind: EventKind, text: str) -> Event:
        from oomph.records.run import Event

        return Event(at_s=self._clock(), kind=kind, text=text)

    def _warn(self, text: str) -> None:
        """Once, on standard error; it is the command's, and gets no more than that."""
        kind = text.partition(":")[0].partition("(")[0]
        if kind in self._warned:
            return
        self._warned.add(kind)
        self._diary.add(self._event("warning", text))
        if self._tree is not None:  # the one of several ranks that speaks for all
            say(text)


def say(text: str) -> None:
    """A line on standard error, if there is one to write to."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError):  # closed by its reader, or full: nobody to tell
            print(f"oomph: {text}", file=sys.stderr, flush=True)
