"""The run directory: written as it happens, readable while it is written and after a crash.

    meta.json                 what was started, where and when
    gpu-1s-0.jsonl ...        spans of the GPUs (tiers.py)
    host-1s-0.jsonl ...       spans of the run's processes
    events.jsonl              GPUs, events, peaks, and the ending
    steps-RANK-PID.jsonl      what the script itself tells (step_log.py)

Everything reaches the kernel once a second, so a kill -9 loses one second at most. A disk that is
full costs what does not fit, and one warning.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from oomph.records.run import Ending, Event, GpuSpan, HostSpan, Peak, WatchedGpu
from oomph.records.run_spans import merge_gpu_spans, merge_host_spans
from oomph.records.stored import as_json
from oomph.running.appending import Appender
from oomph.running.run_lines import GPU_SPANS, HOST_SPANS, object_line
from oomph.running.run_places import META
from oomph.running.tiers import TieredFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """What is known of a run when it starts; meta.json."""

    id: str
    command: tuple[str, ...]
    directory: str | None
    host: str
    user: str | None
    started_at: float  # seconds since the epoch
    clock_s: float  # what CLOCK_MONOTONIC said then, for other processes of this machine
    pid: int  # of the process that watches
    oomph_version: str
    num_cpus: int | None


def this_host() -> str:
    return socket.gethostname()


def this_user() -> str | None:
    """None where the list of users does not know this one, as in some containers."""
    import pwd

    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return None


class Diary:
    """Writes one run directory. No method raises because of the disk."""

    def __init__(self, directory: Path, start: RunStart) -> None:
        self.directory = directory
        self.start = start
        self.problem: str | None = None  # why not everything could be written
        self._has_meta = False
        self._gpus: dict[int, WatchedGpu] = {}
        self._gpu_files = TieredFiles(directory, "gpu", GPU_SPANS, merge_gpu_spans)
        self._host_files = TieredFiles(directory, "host", HOST_SPANS, merge_host_spans)
        self._others = Appender(directory / "events.jsonl")
        self._write_meta()

    def add_gpus(self, gpus: Sequence[WatchedGpu]) -> None:
        """The GPUs in the order of their places; only what has changed is written."""
        for place, gpu in enumerate(gpus):
            if self._gpus.get(place) != gpu:
                self._gpus[place] = gpu
                self._others.add(object_line(gpu))

    def add_spans(self, gpu_spans: Iterable[GpuSpan], host_spans: Iterable[HostSpan]) -> None:
        for gpu_span in gpu_spans:
            self._gpu_files.add(gpu_span)
        for host_span in host_spans:
            self._host_files.add(host_span)

    def add(self, record: Event | Peak | Ending) -> None:
        self._others.add(object_line(record))

    def flush(self) -> bool:
        """Hand everything to the kernel; False if that failed, and `problem` says why."""
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
        self._gpu_files.close()
        self._host_files.close()
        self._others.close()

    def unwritten(self) -> dict[str, bytes]:
        """By the name of its file, what the disk did not take."""
        return {file.path.name: file.pending() for file in self._appenders() if file.pending()}

    def _appenders(self) -> list[Appender]:
        return [*self._gpu_files.appenders(), *self._host_files.appenders(), self._others]

    def _write_meta(self) -> None:
        """Whole or not at all."""
        scratch = self.directory / f".{META}"
        try:
            file = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            with os.fdopen(file, "w", encoding="utf-8") as opened:
                opened.write(as_json(self.start) + "\n")
            scratch.replace(self.directory / META)
            self._has_meta = True
        except OSError as error:
            self.problem = error.strerror or str(error)
