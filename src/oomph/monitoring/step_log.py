"""Record a training script's steps, peaks and events in its own file in the run directory.

`oomph watch` names the directory in OOMPH_RUN_DIR; each process writes `steps-RANK-PID.jsonl`
there, and `diary_reader` joins the files. Steps are gathered into spans of one second in the first
ten minutes, then ten seconds, and one minute after six hours. Nothing here raises, waits or needs
torch: a full disk loses lines, but never stops training.

    log = StepLog(directory, rank)
    log.steps([(ended, duration_s, data_wait_s, num_samples)])      # times of time.monotonic()
    log.epoch_ended(1)
    log.peak(Peak(source="torch", gpu=None, allocated_bytes=..., used_bytes=...), gpu_uuid=...)
    log.close()

The format is one JSON object per line; times are seconds of the host's CLOCK_MONOTONIC:

    {"process": {"schema": 1, "rank": 0, "pid": 7, "host": "a", "clock_s": 5.0, "at": 1.7e9}}
    {"steps": {...}}  {"event": {...}}
    {"peak": {...}, "gpu_uuid": "GPU-...", "gpu": {"cuda_index": 0, "name": "A", "total_bytes": 9}}

`gpu` is optional: it describes a GPU that no driver knows, such as an emulated one.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from oomph.monitoring.diary import Appender
from oomph.monitoring.run_lines import object_line
from oomph.records.run import Event, EventKind, Peak, StepSpan, TorchGpu
from oomph.records.stored import SCHEMA, to_jsonable

# ---- moments of a training loop -> steps: how long each took, and how long it waited for data ----
# A step lasts from its first wait for data to its end. Everything in between belongs to the step,
# unless the clock is paused, as for an evaluation. Times are of time.monotonic().

# When a step ended, how long it took, how much of that it waited for data (None: not measured), and
# its number of samples. A plain tuple, to save objects and calls in every step.
Step = tuple[float, float, float | None, int | None]


class StepClock:
    """Track the current step."""

    __slots__ = ("_data_wait_s", "_elapsed_s", "_num_samples", "_open_at")

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard what was measured: it was not a step."""
        self._open_at: float | None = None
        self._elapsed_s = 0.0
        self._data_wait_s: float | None = None
        self._num_samples: int | None = None

    @property
    def is_open(self) -> bool:
        return self._open_at is not None

    def resume(self, now: float) -> None:
        """Begin the step, or continue it."""
        if self._open_at is None:
            self._open_at = now

    def pause(self, now: float) -> None:
        """Pause: what follows does not belong to the step."""
        if self._open_at is not None:
            self._elapsed_s += now - self._open_at
            self._open_at = None

    def waited(self, began: float, ended: float, num_samples: int | None = None) -> None:
        """Add a wait for data to this step, with its number of samples if known."""
        if self._open_at is None:
            self._open_at = began
        self._data_wait_s = (self._data_wait_s or 0.0) + ended - began
        self.count(num_samples)

    def count(self, num_samples: int | None) -> None:
        """Add samples to this step whose wait was recorded without them."""
        if num_samples is not None:
            self._num_samples = (self._num_samples or 0) + num_samples

    def all_waits_noted(self) -> None:
        """Count a missing wait as 0: every wait is noted, so the batches came earlier."""
        if self._data_wait_s is None:
            self._data_wait_s = 0.0
            self._num_samples = self._num_samples or 0

    def end(self, now: float, num_samples: int | None = None) -> Step | None:
        """End the step and return it; None if its beginning was not seen."""
        if self._open_at is not None:
            self._elapsed_s += now - self._open_at
        elif not self._elapsed_s:
            return None
        counted = self._num_samples if num_samples is None else num_samples
        step = (now, self._elapsed_s, self._data_wait_s, counted)
        self._open_at = self._data_wait_s = self._num_samples = None
        self._elapsed_s = 0.0
        return step


@dataclass(slots=True, eq=False)
class Tally:
    """Sums over steps."""

    num_steps: int = 0
    duration_s: float = 0.0
    num_measured: int = 0  # steps with a known wait
    waited_s: float = 0.0
    num_counted: int = 0  # steps with a known number of samples
    samples: int = 0

    def add(self, steps: Sequence[Step]) -> None:
        for _, duration_s, data_wait_s, num_samples in steps:
            self.num_steps += 1
            self.duration_s += duration_s
            if data_wait_s is not None:
                self.num_measured += 1
                self.waited_s += data_wait_s
            if num_samples is not None:
                self.num_counted += 1
                self.samples += num_samples

    def copy(self) -> Tally:
        return replace(self)

    def since(self, before: Tally) -> Tally:
        """Return the sums since `before`, an earlier copy."""
        return Tally(*(getattr(self, f.name) - getattr(before, f.name) for f in fields(self)))

    @property
    def step_s(self) -> float | None:
        return self.duration_s / self.num_steps if self.num_steps else None

    @property
    def data_wait_s(self) -> float | None:
        """Return the total wait; None if part of it is unknown, as the sum would be too small."""
        return self.waited_s if self.num_measured == self.num_steps else None

    @property
    def num_samples(self) -> int | None:
        return self.samples if self.num_counted == self.num_steps else None

    @property
    def data_wait_ratio(self) -> float | None:
        ratio = self._per_s(self.data_wait_s)
        return None if ratio is None else min(ratio, 1.0)

    @property
    def samples_per_s(self) -> float | None:
        return self._per_s(self.num_samples)

    def _per_s(self, figure: float | None) -> float | None:
        return None if figure is None or self.duration_s <= 0 else figure / self.duration_s


EPOCH_ENDED = "epoch {} ended"  # the text of a phase event; `oomph watch --for 1-epoch` reads it

# Length of a span, by the age of the log. Judgement: a week stays below a megabyte.
_LENGTHS_S = ((600.0, 1.0), (6 * 3600.0, 10.0))
_LONGEST_S = 60.0
_IS_FULL = 0.95  # a caller that reports once a second is sometimes slightly early


class StepLog:
    """The step file of one process."""

    def __init__(self, directory: Path, rank: int = 0) -> None:
        self.rank = rank
        self._pid = os.getpid()
        self._began = time.monotonic()
        self._file = Appender(directory / f"steps-{rank}-{self._pid}.jsonl", self._header())
        self._begin_span()

    def _begin_span(self) -> None:
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

    def steps(self, steps: Sequence[Step]) -> None:
        """Add optimizer steps in order, each from the wait for its data to its end."""
        lines = [self._line() for step in steps if self._fills(step)]
        if lines:
            self._write("".join(lines))

    def _fills(self, step: Step) -> bool:
        """Add a step to the span; return whether the span is now full."""
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
        """Write the peak memory so far; the last line is the one that counts."""
        line = {"peak": to_jsonable(replace(peak, rank=self.rank, pid=self._pid))}
        line |= {"gpu_uuid": gpu_uuid} | ({"gpu": to_jsonable(gpu)} if gpu else {})
        self._write(json.dumps(line, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        """Write the gathered steps."""
        if self._tally.num_steps:
            self._write(self._line())

    def _line(self) -> str:
        """Return the gathered steps as a line, and begin a new span."""
        tally = self._tally
        span = StepSpan(
            rank=self.rank,
            began_s=self._first_began,
            ended_s=self._last_ended,
            num_steps=tally.num_steps,
            num_samples=tally.num_samples,
            step_s=tally.duration_s / tally.num_steps,
            longest_step_s=self._longest_s,
            data_wait_s=tally.data_wait_s,
        )
        self._begin_span()
        return object_line(span)

    def _write(self, line: str) -> None:
        if os.getpid() == self._pid:  # a fork, such as a loader's worker, has no steps of its own
            self._file.add(line)
            self._file.flush()

    def close(self) -> None:
        if os.getpid() == self._pid:
            self.flush()
            self._file.close()
