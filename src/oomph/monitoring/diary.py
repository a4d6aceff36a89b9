"""Write the run directory as things happen; it is readable meanwhile and after a crash.

    meta.json                 what was started, where and when
    gpu-1s-0.jsonl ...        spans of the GPUs (TIERS below)
    host-1s-0.jsonl ...       spans of the run's processes
    events.jsonl              GPUs, events, peaks, and the ending
    steps-RANK-PID.jsonl      what the script itself records (step_log.py)

Everything reaches the kernel once a second, so a kill -9 loses at most one second. A full disk
loses what does not fit, and gives one warning.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from oomph.errors import UsageError
from oomph.monitoring.run_lines import GPU_SPANS, HOST_SPANS, Table, object_line
from oomph.records.run import (
    Ending,
    Event,
    GpuSpan,
    HostSpan,
    Peak,
    Run,
    StepSpan,
    WatchedGpu,
)
from oomph.records.run_spans import merge_gpu_spans, merge_host_spans
from oomph.records.stored import as_json
from oomph.sensing.ownership import user_name
from oomph.store import replace_file

# ---- lines -> files that only grow ----
# What cannot be written (a full disk, a limit, a missing directory) is kept for the next try, up to
# a limit. A line that was cut off continues where it stopped.

MAX_PENDING_BYTES = 4 << 20  # per file; judgement: hours of data. Later lines are lost


@dataclass(slots=True, eq=False)
class Appender:
    """A file to which lines are appended."""

    path: Path
    header: str = ""  # the first line
    problem: str | None = None  # why the last try failed
    num_lost: int = 0
    _pending: bytearray = field(default_factory=bytearray)
    _file: int | None = None
    _has_begun: bool = False

    def add(self, line: str) -> None:
        """Keep a line until the next `flush`."""
        if len(self._pending) > MAX_PENDING_BYTES:
            self.num_lost += 1
            return
        if not self._has_begun:
            self._has_begun = True
            self._pending += self.header.encode()
        self._pending += line.encode()

    def flush(self) -> bool:
        """Write the pending lines; return False if some remain."""
        try:
            if self._pending and self._file is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                self._file = os.open(self.path, flags, 0o600)
            while self._pending and self._file is not None:
                written = os.write(self._file, self._pending)
                del self._pending[:written]
        except OSError as error:
            self.problem = error.strerror or str(error)
            return False
        return True

    def pending(self) -> bytes:
        """Return the bytes that are not on disk yet."""
        return bytes(self._pending)

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            os.close(self._file)
            self._file = None


# ---- spans -> files that get coarser with age, so that a run of weeks stays small ----
# Every span is written at once, and again merged into longer spans; each length has its own files.
# Old files of short spans are deleted. Nothing is ever rewritten, so a reader finds whole lines,
# and for every moment of the run, the shortest spans left.
# gpu-1s-0.jsonl gpu-1s-1.jsonl ...   an hour each; six are kept
# gpu-10s-0.jsonl ...                 two days
# gpu-60s-0.jsonl ...                 for good: about 1.6 MB a day for eight GPUs

Span = TypeVar("Span", GpuSpan, HostSpan)

HOUR_S = 3600


@dataclass(frozen=True, slots=True)
class Tier:
    """Spans of about one length."""

    length_s: int
    file_s: int  # seconds of the run in one file
    num_files: int | None  # how many are kept; None: all


TIERS = (
    Tier(1, HOUR_S, 7),  # six hours, and the one being written
    Tier(10, 6 * HOUR_S, 9),
    Tier(60, 48 * HOUR_S, None),
)


class TierFiles(Generic[Span]):
    """Write the spans of one kind at one length, for one or more GPUs. The newest file is open."""

    def __init__(
        self,
        directory: Path,
        name: str,
        table: Table[Span],
        merge: Callable[[Sequence[Span]], Span],
        tier: Tier,
    ) -> None:
        self._directory, self._name = directory, f"{name}-{tier.length_s}s"
        self._table: Table[Span] = table
        self._merge: Callable[[Sequence[Span]], Span] = merge
        self._tier, self._number = tier, -1
        self._gathered: dict[object, list[Span]] = {}  # by GPU
        self.appender: Appender | None = None

    def add(self, span: Span) -> None:
        """Write a span at once, or merged with others of its time.

        At the end, spans that are not merged yet are still in the files of shorter spans.
        """
        length_s = self._tier.length_s
        if length_s == TIERS[0].length_s:
            self._write(span)
            return
        gathered = self._gathered.setdefault(getattr(span, "gpu", None), [])
        if gathered and span.began_s // length_s != gathered[0].began_s // length_s:
            self._write(self._merge(gathered))
            gathered.clear()
        gathered.append(span)

    def _write(self, span: Span) -> None:
        number = int(span.began_s // self._tier.file_s)
        if self.appender is None or number > self._number:
            if self.appender is not None:
                self.appender.close()
            path = self._directory / f"{self._name}-{number}.jsonl"
            self.appender, self._number = Appender(path, self._table.header()), number
            if self._tier.num_files is not None:
                self._delete_up_to(number - self._tier.num_files)
        self.appender.add(self._table.row(span))

    def _delete_up_to(self, last: int) -> None:
        # The directory is gone or the disk fails: try again in the next hour.
        with contextlib.suppress(OSError):
            for path in self._directory.glob(f"{self._name}-*.jsonl"):
                number = path.stem.rpartition("-")[2]
                if number.isdecimal() and int(number) <= last:
                    path.unlink()


# ---- where runs are on disk, and how a run is named ----

RUNS = "OOMPH_RUNS"  # the environment variable for another directory
META = "meta.json"
EVENTS = "events.jsonl"


def runs_directory() -> Path:
    """Return OOMPH_RUNS, or a directory in the user's XDG state directory."""
    if os.environ.get(RUNS):
        return Path(os.environ[RUNS])
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "oomph" / "runs"


def new_id(now: float, end: str | None = None) -> str:
    """Name a run by its time, so that names sort; a suffix separates runs of the same second."""
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(now)) + f"-{end or os.urandom(2).hex()}"


def make_directory(run_id: str) -> Path:
    """Make a directory that only this user may read: command lines may hold secrets.

    If that fails, the diary reports it on its first write.
    """
    directory = (runs_directory() / run_id).absolute()
    with contextlib.suppress(OSError):
        directory.parent.mkdir(parents=True, exist_ok=True)
        directory.mkdir(mode=0o700)
    return directory


def newest_first() -> Iterator[Path]:
    """Yield the directories of all runs lazily: only those consumed are looked at."""
    return _named(lambda _: True)


def directory_of(run_id: str) -> Path | None:
    """Return the directory of a run. The id is not accepted as a path."""
    return next(_named(lambda known: known == run_id), None)


def find_directory(name: str) -> Path:
    """Find a run by its id, the beginning or end of an id, "last", or a path."""
    given = Path(name)
    if (given / META).is_file():
        return given
    if name == "last" and (newest := next(newest_first(), None)):
        return newest
    found = list(_named(lambda known: known.startswith(name) or known.endswith(name)))
    exact = [path for path in found if path.name == name]
    if name and len(exact or found) == 1:
        return (exact or found)[0]
    if next(newest_first(), None) is None:
        raise UsageError(
            "no run is recorded yet",
            because=f"there is none in {runs_directory()}",
            attempt="oomph watch -- python train.py",
        )
    raise UsageError(
        f"{len(found)} runs are called {name!r:.80}" if found else f"there is no run {name!r:.80}",
        because=f"the runs are in {runs_directory()}",
        attempt="oomph runs, or oomph report last",
    )


def _named(is_wanted: Callable[[str], bool]) -> Iterator[Path]:
    """Yield the matching runs, newest first. Reads only names, for runs in the ten thousands."""
    runs = runs_directory()
    try:
        names = os.listdir(runs)  # noqa: PTH208 - no object for each
    except (FileNotFoundError, NotADirectoryError):
        return
    wanted = (runs / name for name in sorted(filter(is_wanted, names), reverse=True))
    yield from (path for path in wanted if (path / META).is_file())


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known about a run when it starts; meta.json."""

    id: str
    command: tuple[str, ...]
    directory: str | None
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    clock_s: float  # CLOCK_MONOTONIC at that time, for other processes of this machine
    pid: int  # of the watching process
    oomph_version: str
    num_cpus: int | None

    def now_s(self) -> float:
        """Return the run's time now, on the machine where it started."""
        return time.monotonic() - self.clock_s

    def run(
        self,
        *,
        gpus: Sequence[WatchedGpu],
        gpu_spans: Sequence[GpuSpan],
        host_spans: Sequence[HostSpan],
        step_spans: Sequence[StepSpan],
        events: Sequence[Event],
        last_seen_s: float,
        peaks: Sequence[Peak] = (),
        ending: Ending | None = None,
    ) -> Run:
        """Return the Run with this start and the given records."""
        return Run(
            id=self.id,
            command=self.command,
            directory=self.directory,
            host=self.host,
            user=self.user,
            started_at=self.started_at,
            oomph_version=self.oomph_version,
            num_cpus=self.num_cpus,
            gpus=tuple(gpus),
            gpu_spans=tuple(gpu_spans),
            host_spans=tuple(host_spans),
            step_spans=tuple(step_spans),
            peaks=tuple(peaks),
            events=tuple(events),
            ending=ending,
            last_seen_s=last_seen_s,
        )


def this_host() -> str:
    return socket.gethostname()


def this_user() -> str | None:
    """Return the user's name; None if the system does not know it, as in some containers."""
    return user_name(os.getuid())


class Diary:
    """Write one run directory. No method raises because of the disk."""

    def __init__(self, directory: Path, start: RunStart) -> None:
        self.directory = directory
        self.start = start
        self.problem: str | None = None  # why not everything could be written
        self._has_meta = False
        self._gpus: dict[int, WatchedGpu] = {}
        self._gpu_files = [
            TierFiles(directory, "gpu", GPU_SPANS, merge_gpu_spans, tier) for tier in TIERS
        ]
        self._host_files = [
            TierFiles(directory, "host", HOST_SPANS, merge_host_spans, tier) for tier in TIERS
        ]
        self._others = Appender(directory / EVENTS)
        self._write_meta()

    def add_gpus(self, gpus: Sequence[WatchedGpu]) -> None:
        """Write the GPUs that have changed, in order of position."""
        for place, gpu in enumerate(gpus):
            if self._gpus.get(place) != gpu:
                self._gpus[place] = gpu
                self._others.add(object_line(gpu))

    def add_spans(self, gpu_spans: Iterable[GpuSpan], host_spans: Iterable[HostSpan]) -> None:
        for gpu_span in gpu_spans:
            for gpu_files in self._gpu_files:
                gpu_files.add(gpu_span)
        for host_span in host_spans:
            for host_files in self._host_files:
                host_files.add(host_span)

    def add(self, record: Event | Peak | Ending) -> None:
        self._others.add(object_line(record))

    def flush(self) -> bool:
        """Hand everything to the kernel; return False if that failed (`problem` says why)."""
        if not self._has_meta:
            self._write_meta()
        files = self._appenders()
        done = [file.flush() for file in files]
        failed = [file.problem for file, is_done in zip(files, done, strict=True) if not is_done]
        if failed:
            self.problem = failed[0]
        return not failed and self._has_meta

    def close(self) -> None:
        self.flush()
        for file in self._appenders():
            file.close()

    def unwritten(self) -> dict[str, bytes]:
        """Return what could not be written to disk, by file name."""
        return {file.path.name: file.pending() for file in self._appenders() if file.pending()}

    def _appenders(self) -> list[Appender]:
        of_gpus = [files.appender for files in self._gpu_files]
        of_host = [files.appender for files in self._host_files]
        return [file for file in (*of_gpus, *of_host, self._others) if file is not None]

    def _write_meta(self) -> None:
        """Write meta.json completely or not at all."""
        try:
            replace_file(self.directory / META, as_json(self.start) + "\n", permissions=0o600)
            self._has_meta = True
        except OSError as error:
            self.problem = error.strerror or str(error)
