"""Run -> the few lines that stand at the end of a watched command."""

from __future__ import annotations

from collections.abc import Iterator

from oomph.records.run import Peak, Run
from oomph.showing.safe import printable
from oomph.units import format_bytes, format_duration, format_ratio

_SOURCES = {
    "torch": "exact, by torch's allocator",
    "accounting": "exact, by the driver's accounting",
    "polled": "seen at five looks a second: a shorter peak can be missed",
}
_ORDER = ("torch", "accounting", "polled")


def run_lines(run: Run) -> Iterator[str]:
    """What happened, in short."""
    yield f"{_ending(run)}; kept as {run.id}"
    for place, gpu in enumerate(run.gpus):
        if not gpu.is_used:
            continue
        peaks = [peak for peak in run.peaks if peak.gpu == place]
        name = f"GPU {gpu.index}"
        if peaks:
            yield f"{name}: peak {_peak(peaks, gpu.total_bytes)}"
        yield f"{name}: kernel-active {_busy(run, place)} of the time"
    for event in run.events:
        if event.kind in ("lost", "back", "out-of-memory", "warning", "stopped", "neighbour"):
            where = "" if event.gpu is None else f"GPU {run.gpus[event.gpu].index}: "
            yield printable(f"at {format_duration(event.at_s)}: {event.kind}: {where}{event.text}")


def _ending(run: Run) -> str:
    ending = run.ending
    if ending is None:
        return f"no ending seen; last seen after {format_duration(run.last_seen_s)}"
    after = f"after {format_duration(ending.at_s)}"
    how = f"{ending.signal} {after}" if ending.signal else f"exit {ending.exit_code} {after}"
    if ending.out_of_memory:
        memory = "GPU" if ending.out_of_memory == "gpu" else "host"
        return f"out of {memory} memory: {how}"
    return how


def _peak(peaks: list[Peak], total_bytes: int | None) -> str:
    best = min(peaks, key=lambda peak: _ORDER.index(peak.source))
    of_source = [peak.used_bytes for peak in peaks if peak.source == best.source]
    most_bytes = max(of_source)
    of_all = f" of {format_bytes(total_bytes)}" if total_bytes else ""
    return f"{format_bytes(most_bytes)}{of_all} ({_SOURCES[best.source]})"


def _busy(run: Run, place: int) -> str:
    known = [s for s in run.gpu_spans if s.gpu == place and s.busy_ratio is not None]
    duration_s = sum(span.ended_s - span.began_s for span in known)
    if not duration_s:
        return "an unknown share"
    busy_s = sum((span.busy_ratio or 0.0) * (span.ended_s - span.began_s) for span in known)
    source = run.gpus[place].busy_source
    return f"{format_ratio(busy_s / duration_s)} ({source})"
