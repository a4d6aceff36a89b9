"""In the training script: its steps, peaks and events -> a file of its own in the run directory.

`oomph watch` names the directory in OOMPH_RUN_DIR; each process writes `steps-RANK-PID.jsonl`
there, and `diary_reader` joins them all. Steps are gathered into spans: of a second in the first
ten minutes, then of ten seconds, after six hours of a minute. Nothing here raises, or waits, or
needs torch: a disk that is full costs the lines, not the training.

    log = StepLog.of_environment()      # None outside of `oomph watch`
    log.step(began, ended, num_samples=32, data_wait_s=0.01)      # times of time.monotonic()
    log.epoch_ended(1)
    log.peak(Peak(source="torch", gpu=None, allocated_bytes=..., used_bytes=...), gpu_uuid=...)
    log.close()

The format, one JSON object a line; times are seconds of CLOCK_MONOTONIC of the host:

    {"process": {"schema": 1, "rank": 0, "pid": 7, "host": "a", "clock_s": 5.0, "at": 1.7e9}}
    {"steps": {...}}  {"event": {...}}
    {"peak": {...}, "gpu_uuid": "GPU-...", "gpu": {"cuda_index": 0, "name": "A", "total_bytes": 9}}

`gpu` may be missing: it is for a GPU that no driver knows, as an emulated one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from oomph.records.run import Event, EventKind, Peak, StepSpan, TorchGpu
from oomph.records.stored import SCHEMA, to_jsonable
from oomph.running.appending import Appender
from oomph.running.run_lines import object_line
from oomph.running.step_clock import Step, Tally

RUN_DIRECTORY = "OOMPH_RUN_DIR"
EPOCH_ENDED = "epoch {} ended"  # the text of a phase event; `oomph watch --for 1-epoch` reads it

# How long a span is by the age of the log: a week stays below a megabyte.
_LENGTHS_S = ((600.0, 1.0), (6 * 3600.0, 10.0))
_LONGEST_S = 60.0
_IS_FULL = 0.95  # who tells steps once a second is at times a moment early


class StepLog:
    """The file of one process."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self.rank = rank
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._file = Appender(directory / f"steps-{rank}-{self._pid}.jsonl", self._header())
        self._gather_anew()

    @classmethod
    def of_environment(cls) -> StepLog | None:
        """Where `oomph watch` started this process; the rank is that of the launcher."""
        directory = os.environ.get(RUN_DIRECTORY)
        rank = os.environ.get("RANK", "0")
        if not directory:
            return None
        return cls(Path(directory), int(rank) if rank.isdecimal() else 0)

    def _gather_anew(self) -> None:
        self._tally, self._longest_s = Tally(), 0.0
        self._first_began = self._last_ended = self._due = 0.0

    def _header(self) -> str:
        process = {
            "schema": SCHEMA,
            "rank": self.rank,
            "pid": self._pid,
            "host": socket.gethostname(),
            "clock_s": time.monotonic(),
            "at": time.time(),
        }
        return json.dumps({"process": process}) + "\n"

    def step(
        self,
        began: float,
        ended: float,
        *,
        num_samples: int | None = None,
        data_wait_s: float | None = None,
    ) -> None:
        """One optimizer step, from the wait for its data to its end."""
        self.steps([(ended, ended - began, data_wait_s, num_samples)])

    def steps(self, steps: Sequence[Step]) -> None:
        """Several, in their order."""
        lines = [self._line() for step in steps if self._fills(step)]
        if lines:
            self._write("".join(lines))

    def _fills(self, step: Step) -> bool:
        """Gather a step; is the span full with it?"""
        ended, duration_s = step[:2]
        if not self._tally.num_steps:
            self._first_began = ended - duration_s
            self._due = self._first_began + self._length_s(ended) * _IS_FULL
        self._tally.add((step,))
        self._longest_s = max(self._longest_s, duration_s)
        self._last_ended = ended
        return ended >= self._due

    def _length_s(self, now: float) -> float:
        age_s = now - self._began
        return next((length for until, length in _LENGTHS_S if age_s < until), _LONGEST_S)

    def event(self, kind: EventKind, text: str) -> None:
        self._write(object_line(Event(at_s=time.monotonic(), kind=kind, text=text, rank=self.rank)))

    def epoch_ended(self, number: int) -> None:
        self.event("phase", EPOCH_ENDED.format(number))

    def peak(self, peak: Peak, *, gpu_uuid: str | None = None, gpu: TorchGpu | None = None) -> None:
        """The most memory so far; the last line counts."""
        told = {"peak": to_jsonable(replace(peak, rank=self.rank, pid=self._pid))}
        told |= {"gpu_uuid": gpu_uuid} | ({"gpu": to_jsonable(gpu)} if gpu else {})
        self._write(json.dumps(told, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Write what was gathered."""
        if self._tally.num_steps:
            self._write(self._line())

    def _line(self) -> str:
        """Of what was gathered; then it is gathered anew."""
        line = object_line(self._span())
        self._gather_anew()
        return line

    def _span(self) -> StepSpan:
        tally = self._tally
        return StepSpan(
            rank=self.rank,
            began_s=self._first_began,
            ended_s=self._last_ended,
            num_steps=tally.num_steps,
            num_samples=tally.num_samples,
            step_s=tally.duration_s / tally.num_steps,
            longest_step_s=self._longest_s,
            data_wait_s=tally.data_wait_s,
        )

    def _write(self, line: str) -> None:
        if os.getpid() == self._pid:  # a fork, as of a loader's worker, has no steps of its own
            self._file.add(line)
            self._file.flush()

    def close(self) -> None:
        if os.getpid() == self._pid:
            self.flush()
            self._file.close()
