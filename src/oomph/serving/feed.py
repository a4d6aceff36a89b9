"""The sampler's spans -> a Sighting each second, a short history, and totals.

One feed serves all viewers, so its cost does not depend on their number. It does not ask NVML: it
takes what the sampler's thread has read, and never waits for it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, TypeVar

from oomph.records.machine import Device, Past, SeenGpu, Sighting, Totals
from oomph.records.run import GpuSpan, WatchedGpu
from oomph.sensing.sampling import Sampler

HISTORY_S = 900  # one Sighting a second: fifteen minutes
# Spans end once a second. If the newest is older than this, the GPU does not answer.
_OLD_S = 3.0
_MOST_NOTES = 20
Number = TypeVar("Number", int, float)


class Feed:
    """The machine now, and its last quarter of an hour."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._spans: dict[int, GpuSpan] = {}
        self._totals: dict[int, Totals] = {}
        self._notes: dict[str, None] = {}  # each once, in order
        self._num_looks = 0
        self.history: deque[Past] = deque(maxlen=HISTORY_S)
        self.newest = self.look()

    def look(self) -> Sighting:
        """Take the sampler's new spans."""
        taken = self._sampler.take()
        for event in taken.events:
            if event.kind == "warning" and len(self._notes) < _MOST_NOTES:
                self._notes[event.text] = None
        for span in taken.spans:
            self._spans[span.gpu] = span
            self._totals[span.gpu] = added(self._totals.get(span.gpu, Totals()), span)
        machine = self._sampler.machine()
        # Both are in the sampler's GPU order.
        pairs = zip(self._sampler.gpus(), _parts(machine.gpus), strict=False)
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
        is_old = span is None or self._sampler.clock() - span.ended_s > _OLD_S
        return SeenGpu(
            watched=gpu,
            device=device,
            span=None if is_old else span,
            totals=self._totals.get(place, Totals()),
        )


def added(totals: Totals, span: GpuSpan) -> Totals:
    """Return the totals with one more span."""
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
    """Return each GPU or, if it is divided, its slices: as they are sampled."""
    return [part for device in devices for part in device.slices or (device,)]


def _remembered(sighting: Sighting) -> Past:
    spans = [seen.span for seen in sighting.gpus]  # None: it did not answer
    return Past(
        at=sighting.at,
        used_bytes=tuple(span.used_bytes if span else None for span in spans),
        busy_ratios=tuple(span.busy_ratio if span else None for span in spans),
        power_w=tuple(span.power_w if span else None for span in spans),
    )


# ---- frames -> server-sent events, for any number of viewers ----
# A frame is encoded once and sent to all viewers. There are no queues: a slow viewer gets the
# newest frame when there is room again, and misses those in between. A viewer that reads nothing at
# all is disconnected by server.py.

# A periodic comment line shows each side whether the other is gone; browsers send nothing.
_ALIVE_S = 15.0
_AGAIN_MS = 2000  # when a browser that lost the stream reconnects


def encoded(data: Mapping[str, Any]) -> bytes:
    """Return the data as JSON in ASCII: a command line may hold bytes that are not UTF-8."""
    return json.dumps(data, allow_nan=False, separators=(",", ":")).encode()


def event(name: str, data: Mapping[str, Any]) -> bytes:
    """Encode one event. `json` writes no line breaks, which would end the event early."""
    return b"event: %s\ndata: %s\n\n" % (name.encode(), encoded(data))


class Hub:
    """The newest frame, and the viewers waiting for the next. Lives in one event loop."""

    def __init__(self, greet: Callable[[], bytes], most: int) -> None:
        self._greet = greet  # the first message to a new viewer
        self._most = most
        self._frame = b""
        self._bells: set[asyncio.Event] = set()
        self.is_closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._bells)

    @property
    def is_full(self) -> bool:
        return self.num_viewers >= self._most

    def publish(self, frame: bytes) -> None:
        self._frame = frame
        self._ring()

    def close(self) -> None:
        """Disconnect every viewer."""
        self.is_closed = True
        self._ring()

    def _ring(self) -> None:
        for bell in self._bells:
            bell.set()

    async def frames(self) -> AsyncGenerator[bytes, None]:
        """Yield the greeting, then the newest frame whenever there is a new one."""
        bell = asyncio.Event()
        self._bells.add(bell)
        try:
            yield f"retry: {_AGAIN_MS}\n\n".encode() + self._greet()
            while not self.is_closed:
                try:
                    await asyncio.wait_for(bell.wait(), _ALIVE_S)
                except asyncio.TimeoutError:
                    yield b":\n\n"
                    continue
                bell.clear()
                yield self._frame
        finally:
            self._bells.discard(bell)
