"""A run directory -> Run, while it is written, after it ended, and after a crash.

All files are joined: the watcher's spans and events, and what each process of the script told.
What cannot be read is left out and named in a warning. Nothing of it is ever executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from oomph.errors import Unreadable
from oomph.records.run import Ending, Event, GpuSpan, HostSpan, Peak, Run, StepSpan, WatchedGpu
from oomph.records.run_joined import join_ranks
from oomph.records.run_spans import most
from oomph.records.stored import from_json_file
from oomph.running.diary import RunStart
from oomph.running.line_files import Complaints, whole_lines
from oomph.running.run_lines import GPU_SPANS, HOST_SPANS, read_object
from oomph.running.run_places import META
from oomph.running.step_reader import read_step_file
from oomph.running.tier_reader import names_in, read_tiers

_STEPS = re.compile(r"steps-\d{1,9}-\d{1,9}\.jsonl")
_PART = re.compile(r"rank-\d{1,9}")
_MOST_STEP_FILES = 4096  # processes of one run that tell their steps
_MOST_EVENTS = 10_000
_MOST_GPUS = 1024


@dataclass(slots=True)
class Told:
    """What is not in tables."""

    gpus: dict[tuple[int, str | None], WatchedGpu] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    ending: Ending | None = None


def read_start(directory: Path) -> RunStart:
    """What was started. Raises Unreadable."""
    path = directory / META
    if not path.is_file():
        raise Unreadable(
            f"{directory} holds no run", because=f"it has no {META}", attempt="oomph runs"
        )
    return from_json_file(RunStart, path, what="run")


def read_run(
    directory: Path,
    start: RunStart | None = None,
    unwritten: Mapping[str, bytes] | None = None,
) -> Run:
    """All that is known of the run. Raises Unreadable where there is none.

    Its writer knows the `start`, and what it could not put into the files, by their names.
    """
    run = _read_one(directory, start, unwritten)
    parts = [_read_part(path) for path in _parts(directory)]
    if not parts:
        return run
    warnings = [
        Event(at_s=run.last_seen_s, kind="warning", text=part)
        for part in parts
        if isinstance(part, str)
    ]
    run = replace(run, events=(*run.events, *warnings))
    return join_ranks(run, [part for part in parts if isinstance(part, Run)])


def _read_part(path: Path) -> Run | str:
    """What one rank kept by itself, or why it is left out."""
    try:
        return _read_one(path)
    except Unreadable as error:
        return f"{path.name} left out: {error.in_one_line()}"


def _read_one(
    directory: Path,
    start: RunStart | None = None,
    unwritten: Mapping[str, bytes] | None = None,
) -> Run:
    start, unwritten, complaints = start or read_start(directory), unwritten or {}, Complaints()
    told = _read_told(directory, unwritten, complaints)
    gpu_spans = read_tiers(directory, "gpu", GPU_SPANS, unwritten, complaints)
    known = tuple(span for span in gpu_spans if span.gpu < len(told.gpus))
    if len(known) < len(gpu_spans):
        complaints.add("the samples", "nothing is known of their GPU")
    host_spans = read_tiers(directory, "host", HOST_SPANS, unwritten, complaints)
    _read_steps(directory, start, told, complaints)
    return _join(start, told, known, host_spans, complaints)


def _parts(directory: Path) -> list[Path]:
    """What other ranks kept by themselves, in directories of their own."""
    names = sorted(name for name in names_in(directory) if _PART.fullmatch(name))
    found = (directory / name for name in names[:_MOST_STEP_FILES])
    return [path for path in found if (path / META).is_file() and not path.is_symlink()]


def read_ending(directory: Path) -> Ending | None:
    """How it ended, without reading all of it."""
    return _read_told(directory, {}, Complaints()).ending


def read_gpus(directory: Path) -> tuple[WatchedGpu, ...]:
    """Those that are watched, in the order of their places."""
    return tuple(_read_told(directory, {}, Complaints()).gpus.values())


def _read_told(directory: Path, unwritten: Mapping[str, bytes], complaints: Complaints) -> Told:
    told, name = Told(), "events.jsonl"
    for line in whole_lines(directory / name, complaints, unwritten.get(name, b"")):
        try:
            record = read_object(line)
        except ValueError as error:
            complaints.add(name, str(error))
            continue
        if isinstance(record, WatchedGpu) and len(told.gpus) < _MOST_GPUS:
            told.gpus[record.index, record.uuid] = record
        elif isinstance(record, Event) and len(told.events) < _MOST_EVENTS:
            told.events.append(record)
        elif isinstance(record, Peak):
            told.peaks.append(record)
        elif isinstance(record, Ending):
            told.ending = record
    return told


def _read_steps(directory: Path, start: RunStart, told: Told, complaints: Complaints) -> None:
    for path in step_files(directory):
        read = read_step_file(path, start, tuple(told.gpus.values()), complaints)
        told.gpus |= {(gpu.index, f"cuda:{gpu.index}"): gpu for gpu in read.gpus}
        told.steps += read.steps
        told.peaks += read.peaks
        told.events += read.events[: max(0, _MOST_EVENTS - len(told.events))]


def step_files(directory: Path) -> list[Path]:
    """Those that processes of the script write."""
    names = sorted(name for name in names_in(directory) if _STEPS.fullmatch(name))
    return [directory / name for name in names[:_MOST_STEP_FILES]]


def _join(
    start: RunStart,
    told: Told,
    gpu_spans: tuple[GpuSpan, ...],
    host_spans: tuple[HostSpan, ...],
    complaints: Complaints,
) -> Run:
    gpus = tuple(told.gpus.values())
    ends = [
        *(span.ended_s for span in gpu_spans),
        *(span.ended_s for span in host_spans),
        *(span.ended_s for span in told.steps),
        *(event.at_s for event in told.events),
        told.ending.at_s if told.ending else 0.0,
    ]
    last_seen_s = max(ends)
    warnings = [Event(at_s=last_seen_s, kind="warning", text=text) for text in complaints.told()]
    return Run(
        id=start.id,
        command=start.command,
        directory=start.directory,
        host=start.host,
        user=start.user,
        started_at=start.started_at,
        oomph_version=start.oomph_version,
        num_cpus=start.num_cpus,
        gpus=gpus,
        gpu_spans=gpu_spans,
        host_spans=host_spans,
        step_spans=tuple(sorted(told.steps, key=lambda span: span.began_s)),
        peaks=(*told.peaks, *_polled_peaks(gpus, gpu_spans)),
        events=tuple(sorted((*told.events, *warnings), key=lambda event: event.at_s)),
        ending=told.ending,
        last_seen_s=last_seen_s,
    )


def _polled_peaks(gpus: tuple[WatchedGpu, ...], spans: tuple[GpuSpan, ...]) -> list[Peak]:
    """The most that was seen on each GPU that the run used, by everybody together."""
    found = []
    for place, gpu in enumerate(gpus):
        used_bytes = most(span.most_used_bytes for span in spans if span.gpu == place)
        if gpu.is_used and used_bytes is not None:
            found.append(Peak(source="polled", gpu=place, used_bytes=used_bytes))
    return found
