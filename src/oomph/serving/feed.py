"""The sampler's spans -> a Sighting each second, a short history, and totals.

One feed serves everybody: what it costs does not depend on how many look at it. It asks NVML
nothing: it takes what the sampler's own thread has found, and never waits for it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from oomph.records.machine import Device, Machine
from oomph.records.run import Event, GpuSpan, WatchedGpu
from oomph.records.sighting import Past, SeenGpu, Sighting, Totals

HISTORY_S = 900  # one Sighting a second: fifteen minutes
# Spans end once a second. One that is older than this is not of now: the GPU does not answer.
_OLD_S = 3.0
_MOST_NOTES = 20
Number = TypeVar("Number", int, float)


class Found(Protocol):
    """What a sampler has found since the last time."""

    @property
    def spans(self) -> tuple[GpuSpan, ...]: ...
    @property
    def events(self) -> tuple[Event, ...]: ...


class Source(Protocol):
    """A sampler: none of this waits."""

    @property
    def clock(self) -> Callable[[], float]: ...
    def take(self) -> Found: ...
    def gpus(self) -> tuple[WatchedGpu, ...]: ...
    def machine(self) -> Machine: ...


class Feed:
    """The machine, as it is now and as it was in the last quarter of an hour."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self._spans: dict[int, GpuSpan] = {}
        self._totals: dict[int, Totals] = {}
        self._notes: dict[str, None] = {}  # each once, in their order
        self._num_looks = 0
        self.history: deque[Past] = deque(maxlen=HISTORY_S)
        self.newest = self.look()

    def look(self) -> Sighting:
        """Take what is new."""
        found = self._source.take()
        for event in found.events:
            if event.kind == "warning" and len(self._notes) < _MOST_NOTES:
                self._notes[event.text] = None
        for span in found.spans:
            self._spans[span.gpu] = span
            self._totals[span.gpu] = added(self._totals.get(span.gpu, Totals()), span)
        machine = self._source.machine()
        # Both are in the order of the sampler's GPUs.
        pairs = zip(self._source.gpus(), _parts(machine.gpus), strict=False)
        self.newest = Sighting(
            number=self._num_looks,
            at=time.time(),
            gpus=tuple(self._seen(place, *pair) for place, pair in enumerate(pairs)),
            problem=machine.problem,
            notes=tuple(self._notes),
        )
        self._num_looks += 1
        self.history.append(_remembered(self.newest))
        return self.newest

    def _seen(self, place: int, gpu: WatchedGpu, device: Device) -> SeenGpu:
        span = self._spans.get(place)
        is_old = span is None or self._source.clock() - span.ended_s > _OLD_S
        return SeenGpu(
            watched=gpu,
            device=device,
            span=None if is_old else span,
            totals=self._totals.get(place, Totals()),
        )


def added(totals: Totals, span: GpuSpan) -> Totals:
    """The totals with one more span."""
    lasted_s = max(span.ended_s - span.began_s, 0.0)
    throttled_s = dict(totals.throttled_s)
    for cause in span.throttled_by:
        share = span.throttled_ratio or 0.0
        throttled_s[cause] = throttled_s.get(cause, 0.0) + share * lasted_s
    return Totals(
        num_spans=totals.num_spans + 1,
        watched_s=totals.watched_s + lasted_s,
        busy_known_s=totals.busy_known_s + (0.0 if span.busy_ratio is None else lasted_s),
        active_s=_sum(totals.active_s, _over(span.busy_ratio, lasted_s)),
        energy_j=_sum(totals.energy_j, _over(span.power_w, lasted_s)),
        received_bytes=_sum(totals.received_bytes, span.received_bytes),
        throttled_s=throttled_s,
    )


def _over(rate: float | None, lasted_s: float) -> float | None:
    return None if rate is None else rate * lasted_s


def _sum(total: Number | None, more: Number | None) -> Number | None:
    if more is None:
        return total
    return more if total is None else total + more


def _parts(devices: Sequence[Device]) -> list[Device]:
    """Each GPU, or the slices that it is cut into: as they are sampled."""
    return [part for device in devices for part in device.slices or (device,)]


def _remembered(sighting: Sighting) -> Past:
    spans = [seen.span for seen in sighting.gpus]  # None: it did not answer
    return Past(
        at=sighting.at,
        used_bytes=tuple(span.used_bytes if span else None for span in spans),
        busy_ratios=tuple(span.busy_ratio if span else None for span in spans),
        power_w=tuple(span.power_w if span else None for span in spans),
    )
