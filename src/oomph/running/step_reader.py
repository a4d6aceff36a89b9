"""steps-RANK-PID.jsonl, as step_log.py writes it -> StepSpan, Peak, Event in the run's time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oomph.records.run import Event, Peak, StepSpan, TorchGpu, WatchedGpu
from oomph.records.stored import SCHEMA, from_jsonable
from oomph.running.diary import RunStart
from oomph.running.line_files import Complaints, whole_lines
from oomph.running.run_lines import load, read_object


@dataclass(slots=True)
class Steps:
    """What one process told."""

    steps: list[StepSpan] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    peaks: list[Peak] = field(default_factory=list)
    gpus: list[WatchedGpu] = field(default_factory=list)  # that only torch knows: they come last


def read_step_file(
    path: Path, start: RunStart, gpus: Sequence[WatchedGpu], complaints: Complaints
) -> Steps:
    """All of it that makes sense; `gpus` are those of the run, in the order of their places."""
    read, peaks = Steps(), dict[int | None, Peak]()
    lines = whole_lines(path, complaints)
    try:
        offset_s = _offset_s(next(lines, b""), start)
    except ValueError as error:
        complaints.add(path.name, str(error))
        return read
    for line in lines:
        try:
            record, known_as = _record(line, offset_s)
        except ValueError as error:
            complaints.add(path.name, str(error))
            continue
        if isinstance(record, StepSpan):
            read.steps.append(record)
        elif isinstance(record, Event):
            read.events.append(record)
        else:
            place = _place(known_as, gpus, read.gpus)
            peaks[place] = replace(record, gpu=place)
    read.peaks = list(peaks.values())
    return read


def _offset_s(line: bytes, start: RunStart) -> float:
    """What to add to a time of that process to have it in the run's time."""
    content = load(line)
    process = content.get("process") if isinstance(content, dict) else None
    if not isinstance(process, dict) or process.get("schema") != SCHEMA:
        raise ValueError(f"it does not begin as one of schema {SCHEMA}")
    if process.get("host") == start.host:
        return -start.clock_s  # one clock for all processes of a machine
    clock_s, at = _time(process.get("clock_s")), _time(process.get("at"))
    return at - start.started_at - clock_s


def _time(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value) or not 0 <= value < 1e12:
        raise ValueError("it does not say when it began")
    return float(value)


KnownAs = tuple[str | None, TorchGpu | None]  # a GPU by its UUID, and as torch knows it
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
    # Clocks of two machines may be a little apart, but nobody trains before the run.
    if moved_s < -60:
        raise ValueError("its time lies before the run")
    return max(moved_s, 0.0)


def _place(known_as: KnownAs, gpus: Sequence[WatchedGpu], more: list[WatchedGpu]) -> int | None:
    """Among the GPUs of the run; one that nobody watched, as an emulated one, is one `more`.

    torch tells a UUID without the prefix that NVML gives it.
    """
    uuid, told = known_as
    bare = _bare(uuid or "")
    for place, gpu in enumerate(gpus):
        if gpu.uuid and _bare(gpu.uuid) == bare:
            return place
    if told is None:
        return None
    for place, gpu in enumerate((*gpus, *more)):
        if gpu.busy_source is None and gpu.uuid is None and gpu.cuda_index == told.cuda_index:
            return place
    more.append(
        WatchedGpu(
            index=told.cuda_index,  # there is no other
            uuid=None,
            name=told.name and told.name[:200],
            total_bytes=told.total_bytes,
            power_limit_w=None,
            busy_source=None,
            is_used=True,
            cuda_index=told.cuda_index,
        )
    )
    return len(gpus) + len(more) - 1


def _bare(uuid: str) -> str:
    return uuid.removeprefix("GPU-").removeprefix("MIG-")


class StepTail:
    """What processes go on telling: each time, only what is new is read."""

    def __init__(self, start: RunStart) -> None:
        self._start = start
        self._read_bytes: dict[Path, int] = {}
        self._offsets_s: dict[Path, float] = {}

    def read(self, paths: Iterable[Path]) -> Iterator[StepSpan | Event]:
        """Steps and events since the last time, in the run's time."""
        for path in paths:
            for line in self._new_lines(path):
                try:
                    if path not in self._offsets_s:
                        self._offsets_s[path] = _offset_s(line, self._start)
                        continue
                    record, _ = _record(line, self._offsets_s[path])
                except ValueError:  # which the report will complain about
                    continue
                if isinstance(record, StepSpan | Event):
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


_MOST_NEW_BYTES = 1 << 20  # at a time: a minute of steps is a few kilobytes


def told_steps(path: Path) -> Iterator[StepSpan | Event]:
    """Steps and events of a file that is being written, in the process's own time."""
    for line in whole_lines(path, Complaints()):
        try:
            record = read_object(line)
        except ValueError:  # the header, a peak, or what the report will complain about
            continue
        if isinstance(record, StepSpan | Event):
            yield record
