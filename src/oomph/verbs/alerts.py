"""A run while it goes on -> what to say at once: a line, and each cause once.

By the rules of the report, over the whole run so far, of which a few hundred spans are kept: as it
gets older, they are merged in pairs. So a look at a run of weeks costs what one of an hour does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from oomph.records.report import Finding, FindingKind
from oomph.records.run import Event, GpuSpan, HostSpan, Run, StepSpan, WatchedGpu
from oomph.records.run_spans import merge_gpu_spans, merge_host_spans, merge_step_spans
from oomph.running.diary import RunStart
from oomph.running.diary_reader import step_files
from oomph.running.step_reader import StepTail

LOOKS_S = 30.0
# What is told, and from which age of the run on: a trend needs time to be one.
ALERTING: dict[FindingKind, float] = {
    "hang": 120.0,
    "spill": 300.0,
    "swapping": 300.0,
    "cpu-limit": 600.0,
    "host-contention": 600.0,
    "leak": 600.0,
    "fragmentation": 600.0,
    "host-leak": 1800.0,  # caches of data fill for long
    "slowing-down": 1800.0,
}
_MOST_SPANS = 128  # of a GPU, the host, or a rank
_MOST_NEW = 300
_MOST_EVENTS = 500

Span = TypeVar("Span", GpuSpan, HostSpan, StepSpan)


class _Coarse(Generic[Span]):
    """Spans of one thing over the whole time, merged in pairs once they are too many."""

    def __init__(self, merge: Callable[[Sequence[Span]], Span]) -> None:
        self._merge: Callable[[Sequence[Span]], Span] = merge
        self._held: list[Span] = []
        self._open: list[Span] = []
        self._per_span = 1

    def add(self, span: Span) -> None:
        self._open.append(span)
        if len(self._open) >= self._per_span:
            self._held.append(self._merge(self._open))
            self._open = []
        if len(self._held) >= _MOST_SPANS:
            held = self._held
            self._held = [self._merge(held[n : n + 2]) for n in range(0, len(held), 2)]
            self._per_span *= 2

    def all(self) -> list[Span]:
        """The newest as they came: what happens now is not to be hidden in what happened before."""
        older, newest = self._open[:-_MOST_NEW], self._open[-_MOST_NEW:]
        return self._held + ([self._merge(older)] if older else []) + newest


class Alerts:
    """Of one run, in the thread that writes its diary."""

    def __init__(self, start: RunStart, directory: Path) -> None:
        self._start, self._directory = start, directory
        self._tail = StepTail(start)
        self._gpus: dict[int, _Coarse[GpuSpan]] = {}
        self._ranks: dict[int, _Coarse[StepSpan]] = {}
        self._host = _Coarse[HostSpan](merge_host_spans)
        self._events: list[Event] = []
        self._said: set[FindingKind] = set()
        self._next_s = LOOKS_S

    def add(
        self,
        gpu_spans: Iterable[GpuSpan],
        host_spans: Iterable[HostSpan],
        events: Iterable[Event],
    ) -> None:
        """What was seen since the last time."""
        for gpu_span in gpu_spans:
            self._gpus.setdefault(gpu_span.gpu, _Coarse(merge_gpu_spans)).add(gpu_span)
        for host_span in host_spans:
            self._host.add(host_span)
        self._events += events

    def new(self, now_s: float, gpus: Sequence[WatchedGpu]) -> list[str]:
        """What is to be said now: nearly always nothing, and nothing twice."""
        if now_s < self._next_s:
            return []
        from oomph.explaining.diagnose import diagnose

        self._next_s = now_s + LOOKS_S
        self._read_steps()
        found = diagnose(self._run(now_s, gpus)).findings
        fresh = [one for one in found if now_s >= ALERTING.get(one.kind, now_s + 1)]
        fresh = [one for one in fresh if one.kind not in self._said]
        self._said |= {one.kind for one in fresh}
        return [_told(one) for one in fresh]

    def _read_steps(self) -> None:
        for record in self._tail.read(step_files(self._directory)):
            if isinstance(record, Event):
                self._events.append(record)
            else:
                self._ranks.setdefault(record.rank, _Coarse(merge_step_spans)).add(record)
        # What is under way is what counts, and a run of weeks has many phases.
        self._events = self._events[-_MOST_EVENTS:]

    def _run(self, now_s: float, gpus: Sequence[WatchedGpu]) -> Run:
        start = self._start
        return Run(
            id=start.id,
            command=start.command,
            directory=start.directory,
            host=start.host,
            user=start.user,
            started_at=start.started_at,
            oomph_version=start.oomph_version,
            num_cpus=start.num_cpus,
            gpus=tuple(gpus),
            gpu_spans=tuple(span for one in self._gpus.values() for span in one.all()),
            host_spans=tuple(self._host.all()),
            step_spans=tuple(span for one in self._ranks.values() for span in one.all()),
            peaks=(),
            events=tuple(self._events),
            ending=None,
            last_seen_s=now_s,
        )


def _told(found: Finding) -> str:
    """In one line, with the figure that it rests on."""
    return f"{found.sentence} ({found.evidence[0]})" if found.evidence else found.sentence
