"""Machine, spans -> Look: all that the live view shows, one look after the other.

The first look reads everything once; the next ones are made of what the sampler has seen since,
so that kernel-active time is a mean of the driver's own samples, without gaps. Both happen on
threads of their own: whoever takes a look never waits for NVML.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from oomph.records.live import Look
from oomph.records.machine import Device, Machine
from oomph.records.run import GpuSpan
from oomph.sensing.gpus import read_machine
from oomph.sensing.sampling import Sampler
from oomph.sensing.seeing import Seeing

_LEAVES_AFTER_S = 0.3  # a sampler that hangs is left behind


class LiveLooks:
    """Looks at this machine, for as long as somebody watches."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self._on_first = on_first
        self._sampler = Sampler("all", watches_cut_gpus=True)
        self._seeing = Seeing()
        self._notes: list[str] = []
        self.first: Look | None = None  # until the driver has answered
        self._error: BaseException | None = None
        self._first_thread = threading.Thread(
            target=self._look_first, name="oomph-first-look", daemon=True
        )

    def start(self) -> None:
        self._first_thread.start()

    def stop(self) -> None:
        self._sampler.stop(timeout_s=_LEAVES_AFTER_S)

    def _look_first(self) -> None:
        try:
            first = self._seeing.look(read_machine())
            if first.machine.gpus:
                self._sampler.start()
            self.first = first
        except BaseException as error:  # noqa: BLE001 - raised again where it can be seen
            self._error = error
        self._on_first()

    def take(self, *, even_without_spans: bool) -> Look | None:
        """What was seen since the last time; None if that is nothing, unless it is wanted so."""
        if self._error is not None:
            raise self._error
        if self.first is None:
            return None
        taken = self._sampler.take()
        self._notes += [event.text for event in taken.events if event.kind == "warning"]
        if not taken.spans and not even_without_spans:
            return None
        uuids = [gpu.uuid for gpu in self._sampler.gpus()]
        by_uuid: dict[str, list[GpuSpan]] = {}
        for span in taken.spans:
            by_uuid.setdefault(uuids[span.gpu] or "", []).append(span)
        return replace(
            self._seeing.look(self._machine(by_uuid)),
            sm_active_ratios=_sm_active(by_uuid),
            notes=tuple(dict.fromkeys(self._notes)),
        )

    def _machine(self, spans: Mapping[str, Sequence[GpuSpan]]) -> Machine:
        machine = self._sampler.machine()
        return replace(
            machine,
            gpus=tuple(_with_mean(gpu, spans) for gpu in machine.gpus),
            driver_version=self.first.machine.driver_version if self.first else None,
        )


def _with_mean(gpu: Device, spans: Mapping[str, Sequence[GpuSpan]]) -> Device:
    """Busy over all spans, and not in the last one only."""
    busy_ratio = mean_ratio([(s, s.busy_ratio) for s in spans.get(gpu.uuid or "", ())])
    return replace(gpu, busy_ratio=busy_ratio)


def _sm_active(spans: Mapping[str, Sequence[GpuSpan]]) -> dict[str, float]:
    means = {
        uuid: mean_ratio([(span, span.sm_active_ratio) for span in of_gpu])
        for uuid, of_gpu in spans.items()
    }
    return {uuid: mean for uuid, mean in means.items() if mean is not None}


def mean_ratio(ratios: Iterable[tuple[GpuSpan, float | None]]) -> float | None:
    """By the length of the spans; of those that know it."""
    known = [(span.ended_s - span.began_s, ratio) for span, ratio in ratios if ratio is not None]
    total_s = sum(length_s for length_s, _ in known)
    return sum(length_s * ratio for length_s, ratio in known) / total_s if total_s > 0 else None
