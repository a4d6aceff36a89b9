"""A run directory -> Run, while it is written, after it ended, or after a crash.

Joins all files: the watcher's spans and events, and what each process of the script wrote. What
cannot be read is left out and named in a warning. Nothing in the files is ever executed. Also reads
only the end of a run, for its one-line summary, and only what is new in a run under way.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from oomph.errors import Unreadable
from oomph.monitoring.diary import EVENTS, META, RunStart, this_host
from oomph.monitoring.run_lines import (
    GPU_SPANS,
    HOST_SPANS,
    Complaints,
    Table,
    last_lines,
    load,
    names_in,
    read_object,
    whole_lines,
)
from oomph.monitoring.step_log import EPOCH_ENDED
from oomph.records.run import (
    Ending,
    Event,
    GpuSpan,
    HostSpan,
    Peak,
    Progress,
    Run,
    RunState,
    RunSummary,
    StepSpan,
    TorchGpu,
    WatchedGpu,
)
from oomph.records.run_spans import join_ranks, most
from oomph.records.stored import SCHEMA, from_json_file, from_jsonable
from oomph.sensing.mapping import bare_uuid

# ---- files of spans that get coarser with age -> the shortest spans left for each moment ----

Span = TypeVar("Span", GpuSpan, HostSpan)

_MOST_FILES = 10_000  # judgement: a year of spans leaves about 200
# Judgement: eight GPUs leave 200 000 spans of 1 s, 140 000 of 10 s, and 12 000 a day of 60 s.
_MOST_SPANS = 600_000
_TOUCH_S = 0.01  # times are written to the millisecond: spans this close together are adjacent


def read_tiers(
    directory: Path,
    name: str,
    table: Table[Span],
    unwritten: Mapping[str, bytes],
    complaints: Complaints,
) -> tuple[Span, ...]:
    """Read all spans of that name, in order of time."""
    found: list[Span] = []
    begun: dict[object, float] = {}  # by GPU: the time from which shorter spans exist
    for length_s in sorted({length for length, _, _ in _files(directory, name, unwritten)}):
        covered = dict(begun)
        for of_length, _, file in _files(directory, name, unwritten):
            if of_length != length_s:
                continue
            extra = unwritten.get(file, b"")
            for span in _read_file(directory / file, table, extra, complaints):
                gpu = getattr(span, "gpu", None)
                if span.ended_s > covered.get(gpu, float("inf")) + _TOUCH_S:
                    continue
                if len(found) >= _MOST_SPANS:
                    complaints.add(file, f"the run has more than {_MOST_SPANS} spans")
                    break
                begun[gpu] = min(begun.get(gpu, float("inf")), span.began_s)
                found.append(span)
    return tuple(sorted(found, key=lambda span: span.began_s))


def _files(
    directory: Path, name: str, unwritten: Mapping[str, bytes]
) -> list[tuple[int, int, str]]:
    """Return length, number and name of each file, sorted, including files not yet on disk."""
    pattern = re.compile(rf"{name}-(\d{{1,6}})s-(\d{{1,9}})\.jsonl")
    matches = (pattern.fullmatch(each) for each in names_in(directory) | unwritten.keys())
    return sorted((int(m[1]), int(m[2]), m[0]) for m in matches if m)[:_MOST_FILES]


def _read_file(
    path: Path, table: Table[Span], unwritten: bytes, complaints: Complaints
) -> list[Span]:
    lines = whole_lines(path, complaints, unwritten)
    try:
        columns = table.columns(next(lines, b""))
    except ValueError as error:
        complaints.add(path.name, str(error))
        return []

    def span_of(line: bytes) -> Span | None:
        try:
            return table.span(columns, line)
        except ValueError as error:
            complaints.add(path.name, str(error))
            return None

    return [span for span in map(span_of, lines) if span is not None]


# ---- steps-RANK-PID.jsonl, as step_log.py writes them -> records in the run's time ----

_STEPS = re.compile(r"steps-\d{1,9}-\d{1,9}\.jsonl")
_MOST_STEP_FILES = 4096  # processes of one run that record steps
_MOST_EVENTS = 10_000  # judgement: a report shows the first 200


@dataclass(slots=True)
class _Found:
    """The records of a run that are not in tables of spans."""

    gpus: dict[tuple[int, str | None], WatchedGpu] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    steps: list[StepSpan] = field(default_factory=list)
    ending: Ending | None = None

    def add_event(self, event: Event) -> None:
        if len(self.events) < _MOST_EVENTS:
            self.events.append(event)


def _step_files(directory: Path) -> list[Path]:
    """Return the files written by processes of the script."""
    names = sorted(name for name in names_in(directory) if _STEPS.fullmatch(name))
    return [directory / name for name in names[:_MOST_STEP_FILES]]


def _read_step_file(path: Path, start: RunStart, found: _Found, complaints: Complaints) -> None:
    """Add the valid records of a file to `found`, which has the GPUs that the watcher knows."""
    peaks: list[tuple[Peak, KnownAs]] = []
    lines = whole_lines(path, complaints)
    try:
        offset_s = _offset_s(next(lines, b""), start)
    except ValueError as error:
        complaints.add(path.name, str(error))
        return
    for line in lines:
        try:
            record, known_as = _record(line, offset_s)
        except ValueError as error:
            complaints.add(path.name, str(error))
            continue
        if isinstance(record, StepSpan):
            found.steps.append(record)
        elif isinstance(record, Event):
            found.add_event(record)
        else:
            peaks.append((record, known_as))
    found.peaks += _last_peaks(peaks, found)


def _last_peaks(written: Sequence[tuple[Peak, KnownAs]], found: _Found) -> Iterable[Peak]:
    """Return the last peak of each GPU. Its UUID may be known only from a later line."""
    uuids = {gpu.cuda_index: uuid for _, (uuid, gpu) in written if uuid and gpu}
    last: dict[int | None, Peak] = {}
    for peak, (uuid, gpu) in written:
        place = _place(uuid or (uuids.get(gpu.cuda_index) if gpu else None), gpu, found)
        last[place] = replace(peak, gpu=place)
    return last.values()


def _offset_s(line: bytes, start: RunStart) -> float:
    """Return the offset from the process's clock to the run's time."""
    content = load(line)
    process = content.get("process") if isinstance(content, dict) else None
    if not isinstance(process, dict) or process.get("schema") != SCHEMA:
        raise ValueError(f"it does not begin as one of schema {SCHEMA}")
    if process.get("host") == start.host:
        return -start.clock_s  # all processes of a machine share one clock
    clock_s, at = _time(process.get("clock_s")), _time(process.get("at"))
    return at - start.started_at - clock_s


def _time(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < 1e12:
        raise ValueError("it does not say when it began")
    return float(value)


KnownAs = tuple[str | None, TorchGpu | None]  # a GPU's UUID, and what torch knows about it
_NOWHERE: KnownAs = (None, None)
_MOST_INDEX = 1 << 16


def _record(line: bytes, offset_s: float) -> tuple[StepSpan | Event | Peak, KnownAs]:
    content = load(line)
    if isinstance(content, dict) and "peak" in content:
        uuid, gpu = content.get("gpu_uuid"), content.get("gpu")
        peak = from_jsonable(Peak, content["peak"])
        known = None if gpu is None else from_jsonable(TorchGpu, gpu)
        if peak.used_bytes < 0 or (known and not _makes_sense(known)):
            raise ValueError("not a valid peak, or not a valid GPU")
        return peak, (uuid if isinstance(uuid, str) else None, known)
    record = read_object(line)
    if isinstance(record, Event):
        return replace(record, at_s=_moved(record.at_s, offset_s)), _NOWHERE
    if not isinstance(record, StepSpan) or record.num_steps < 1 or record.step_s < 0:
        raise ValueError("it is neither steps, nor a peak, nor an event")
    began_s, ended_s = _moved(record.began_s, offset_s), _moved(record.ended_s, offset_s)
    if ended_s < began_s:
        raise ValueError("a step ends before it begins")
    return replace(record, began_s=began_s, ended_s=ended_s), _NOWHERE


def _makes_sense(gpu: TorchGpu) -> bool:
    return 0 <= gpu.cuda_index < _MOST_INDEX and 0 <= (gpu.total_bytes or 0) < 2**63


def _moved(time_s: float, offset_s: float) -> float:
    moved_s = time_s + offset_s
    # Clocks of two machines may differ slightly, but no step precedes the run.
    if moved_s < -60:
        raise ValueError("its time lies before the run")
    return max(moved_s, 0.0)


def _place(uuid: str | None, torch_gpu: TorchGpu | None, found: _Found) -> int | None:
    """Find the position among the run's GPUs; a GPU that was not watched is added to them.

    torch gives a UUID without NVML's prefix.
    """
    gpus = list(found.gpus.values())
    for place, gpu in enumerate(gpus):
        if gpu.uuid and bare_uuid(gpu.uuid) == bare_uuid(uuid):
            return place
    if torch_gpu is None:
        return None
    for place, gpu in enumerate(gpus):
        if gpu.busy_source is None and gpu.uuid is None and gpu.cuda_index == torch_gpu.cuda_index:
            return place
    index = torch_gpu.cuda_index  # the only index there is
    found.gpus[index, f"cuda:{index}"] = WatchedGpu(
        index=index,
        uuid=None,
        name=torch_gpu.name and torch_gpu.name[:200],
        total_bytes=torch_gpu.total_bytes,
        power_limit_w=None,
        busy_source=None,
        is_used=True,
        cuda_index=index,
    )
    return len(gpus)


# ---- a run directory -> Run ----

_PART = re.compile(r"rank-\d{1,9}")
_MOST_GPUS = 1024  # judgement: more than one machine has


def read_start(directory: Path) -> RunStart:
    """Read the run's start. Raises Unreadable."""
    path = directory / META
    if not path.is_file():
        raise Unreadable(
            f"there is no run in {directory}", because=f"it has no {META}", attempt="oomph runs"
        )
    return from_json_file(RunStart, path, what="run")


def read_run(
    directory: Path,
    start: RunStart | None = None,
    unwritten: Mapping[str, bytes] | None = None,
) -> Run:
    """Read everything known about the run. Raises Unreadable if there is none.

    The writer passes `start`, and what it could not write to the files, by file name.
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
    """Return what one rank recorded by itself, or the reason to leave it out."""
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
    found = _read_events(directory, unwritten, complaints)
    read = read_tiers(directory, "gpu", GPU_SPANS, unwritten, complaints)
    gpu_spans = tuple(span for span in read if span.gpu < len(found.gpus))
    if len(gpu_spans) < len(read):
        complaints.add("the samples", "their GPU is unknown")
    host_spans = read_tiers(directory, "host", HOST_SPANS, unwritten, complaints)
    for path in _step_files(directory):
        _read_step_file(path, start, found, complaints)
    gpus = tuple(found.gpus.values())
    spans: Iterable[GpuSpan | HostSpan | StepSpan] = (*gpu_spans, *host_spans, *found.steps)
    last_seen_s = max(
        *(span.ended_s for span in spans),
        *(event.at_s for event in found.events),
        found.ending.at_s if found.ending else 0.0,
        0.0,
    )
    warnings = [Event(at_s=last_seen_s, kind="warning", text=text) for text in complaints.texts()]
    return start.run(
        gpus=gpus,
        gpu_spans=gpu_spans,
        host_spans=host_spans,
        step_spans=sorted(found.steps, key=lambda span: span.began_s),
        peaks=(*found.peaks, *_polled_peaks(gpus, gpu_spans)),
        events=sorted((*found.events, *warnings), key=lambda event: event.at_s),
        ending=found.ending,
        last_seen_s=last_seen_s,
    )


def _parts(directory: Path) -> list[Path]:
    """Return the directories in which other ranks recorded their parts."""
    names = sorted(name for name in names_in(directory) if _PART.fullmatch(name))
    found = (directory / name for name in names[:_MOST_STEP_FILES])
    return [path for path in found if (path / META).is_file() and not path.is_symlink()]


def read_gpus(directory: Path) -> tuple[WatchedGpu, ...]:
    """Read the watched GPUs, in order of position."""
    return tuple(_read_events(directory, {}, Complaints()).gpus.values())


def _read_events(directory: Path, unwritten: Mapping[str, bytes], complaints: Complaints) -> _Found:
    found = _Found()
    for line in whole_lines(directory / EVENTS, complaints, unwritten.get(EVENTS, b"")):
        try:
            record = read_object(line)
        except ValueError as error:
            complaints.add(EVENTS, str(error))
            continue
        if isinstance(record, WatchedGpu) and len(found.gpus) < _MOST_GPUS:
            found.gpus[record.index, record.uuid] = record
        elif isinstance(record, Event):
            found.add_event(record)
        elif isinstance(record, Peak):
            found.peaks.append(record)
        elif isinstance(record, Ending):
            found.ending = record
    return found


def _polled_peaks(gpus: tuple[WatchedGpu, ...], spans: tuple[GpuSpan, ...]) -> list[Peak]:
    """Return the highest reading of each GPU that the run used, over all processes."""
    found = []
    for place, gpu in enumerate(gpus):
        used_bytes = most(span.most_used_bytes for span in spans if span.gpu == place)
        if gpu.is_used and used_bytes is not None:
            found.append(Peak(source="polled", gpu=place, used_bytes=used_bytes))
    return found


# ---- the end of a file, without reading all of it ----

_TAIL_BYTES = 1 << 16  # a minute of eight GPUs


def read_last_spans(directory: Path) -> tuple[GpuSpan, ...]:
    """Read the spans of about the last minute; () if nothing is known or readable yet."""
    files = _files(directory, "gpu", {})
    shortest = [directory / name for length_s, _, name in files if length_s == files[0][0]]
    if not shortest:
        return ()
    header = next(whole_lines(shortest[-1], Complaints()), b"")
    found: list[GpuSpan] = []
    with contextlib.suppress(ValueError):  # the file is being created
        columns = GPU_SPANS.columns(header)
        for line in last_lines(shortest[-1], _TAIL_BYTES):
            with contextlib.suppress(ValueError):  # the header, or a line the report warns about
                found.append(GPU_SPANS.span(columns, line))
    return tuple(found)


def read_ending(directory: Path) -> Ending | None:
    """Read how the run ended: nothing is written to its events after that."""
    for line in last_lines(directory / EVENTS, _TAIL_BYTES)[-1:]:
        with contextlib.suppress(ValueError):  # the report warns about it
            record = read_object(line)
            return record if isinstance(record, Ending) else None
    return None


_SILENT_S = 15.0  # a diary is written every second; a busy disk may delay that


def summarise(directory: Path, now: float | None = None) -> RunSummary | None:
    """Return the one-line summary of a run; None if it cannot be read."""
    try:
        start = read_start(directory)
    except Unreadable:
        return None
    ending = read_ending(directory)
    written_at = 0.0 if ending else _written_at(directory)
    return RunSummary(
        id=start.id,
        path=str(directory),
        command=start.command,
        host=start.host,
        user=start.user,
        started_at=start.started_at,
        duration_s=max(0.0, ending.at_s if ending else written_at - start.started_at),
        state="ended" if ending else _state(start, written_at, now or time.time()),
        exit_code=ending.exit_code if ending else None,
        signal=ending.signal if ending else None,
        out_of_memory=ending.out_of_memory if ending else None,
    )


def _written_at(directory: Path) -> float:
    """Return when the run's own files were last written."""
    with os.scandir(directory) as entries:
        # An older oomph's `oomph runs` left a summary beside them, at any later time.
        own = (entry for entry in entries if "summary.json" not in entry.name)
        return max((entry.stat(follow_symlinks=False).st_mtime for entry in own), default=0.0)


def _state(start: RunStart, written_at: float, now: float) -> RunState:
    if now - written_at < _SILENT_S:
        return "running"
    is_here = start.host == this_host() and _still_lives(start)
    return "running" if is_here else "unknown"


def _still_lives(start: RunStart) -> bool:
    """Return whether the recording process still exists, perhaps stopped by Ctrl-Z.

    Its PID may have been reused, but hardly by another oomph or by the same script.
    """
    try:
        words = Path(f"/proc/{start.pid}/cmdline").read_bytes().rstrip(b"\0")
    except OSError:
        return False
    is_script = words.split(b"\0") == [os.fsencode(word) for word in start.command]
    return is_script or b"oomph" in words


# ---- step files that are still growing -> new steps and events, and the progress so far ----

_MOST_NEW_BYTES = 1 << 20  # at once; judgement: a minute of steps is a few kilobytes
_EPOCH_ENDED = re.compile(EPOCH_ENDED.format(r"\d{1,9}"))


class StepTail:
    """Read the step files of a run under way: each call reads only what is new."""

    def __init__(self, start: RunStart, directory: Path) -> None:
        self._start, self._directory = start, directory
        self._read_bytes: dict[Path, int] = {}
        self._offsets_s: dict[Path, float] = {}
        self._num_steps: dict[Path, int] = {}
        self._epochs: dict[Path, set[str]] = {}  # the texts of their events
        self.has_run_out_of_memory = False

    def read(self) -> Iterator[StepSpan | Event]:
        """Yield steps and events since the last call, in the run's time."""
        for path in _step_files(self._directory):
            while lines := self._new_lines(path):
                yield from self._records(path, lines)

    def _records(self, path: Path, lines: Iterable[bytes]) -> Iterator[StepSpan | Event]:
        for line in lines:
            try:
                if path not in self._offsets_s:
                    self._offsets_s[path] = _offset_s(line, self._start)
                    continue
                record, _ = _record(line, self._offsets_s[path])
            except ValueError:  # the report will warn about it
                continue
            if isinstance(record, StepSpan):
                self._num_steps[path] = self._num_steps.get(path, 0) + record.num_steps
                yield record
            elif isinstance(record, Event):
                self.has_run_out_of_memory |= record.kind == "out-of-memory"
                if record.kind == "phase" and _EPOCH_ENDED.fullmatch(record.text):
                    self._epochs.setdefault(path, set()).add(record.text)
                yield record

    def _new_lines(self, path: Path) -> list[bytes]:
        try:
            with path.open("rb") as file:
                file.seek(self._read_bytes.get(path, 0))
                content = file.read(_MOST_NEW_BYTES)
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read_bytes[path] = self._read_bytes.get(path, 0) + len(whole)
        return whole.splitlines(keepends=True)

    def progress(self) -> Progress:
        """Return how far the rank is that has reported the most."""
        return Progress(
            max(self._num_steps.values(), default=0),
            max(map(len, self._epochs.values()), default=0),
            bool(self._num_steps or self._epochs),
        )
