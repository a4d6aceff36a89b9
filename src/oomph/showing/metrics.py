"""Sighting -> what Prometheus scrapes. Made at each scrape: who has ended is not in it.

Units are base units. What only grows is a counter, so that nothing between two scrapes is lost:
the mean of kernel-active time is the growth of `oomph_gpu_kernel_active_seconds_total` divided by
that of `oomph_gpu_kernel_known_seconds_total`. Needs prometheus_client (the extra `web`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from oomph.records.sighting import SeenGpu, Sighting
from oomph.showing.dashboard import held_bytes, owner_of

if TYPE_CHECKING:
    from prometheus_client import Metric

_GPU = ("uuid", "gpu", "name")
_OWNERS = ("mine", "others", "unknown")


def as_metrics(sighting: Sighting, num_viewers: int, *, per_process: bool) -> bytes:
    """The exposition, in the text format that every Prometheus reads."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(sighting, num_viewers, per_process))
    return generate_latest(registry)


class _Collector:
    """What a registry asks for its metrics."""

    def __init__(self, sighting: Sighting, num_viewers: int, per_process: bool) -> None:
        self._sighting = sighting
        self._num_viewers = num_viewers
        self._per_process = per_process

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        gpus = self._sighting.gpus
        yield from _server(self._num_viewers)
        yield from _now(gpus)
        yield from _totals(gpus)
        yield from _by_owner(gpus)
        if self._per_process:
            yield from _by_process(gpus)


def _server(num_viewers: int) -> Iterator[Metric]:
    from prometheus_client.core import GaugeMetricFamily

    from oomph import __version__

    version = GaugeMetricFamily("oomph_info", "The version of oomph.", labels=["version"])
    version.add_metric([__version__], 1)
    yield version
    yield GaugeMetricFamily("oomph_serve_viewers", "Pages that are live.", value=num_viewers)


def _now(gpus: Iterable[SeenGpu]) -> Iterator[Metric]:
    """Figures of the last second. A GPU that does not answer has none but `up`."""
    rows: list[tuple[SeenGpu, dict[str, float | None]]] = [(seen, _figures(seen)) for seen in gpus]
    for name, told in _TOLD.items():
        yield _gauge(name, told, ((seen, figures[name]) for seen, figures in rows))


_TOLD = {
    "up": "Whether the GPU answers.",
    "memory_total_bytes": "Memory of the GPU.",
    "memory_used_bytes": "Memory in use, by everybody, mean of the last second.",
    "kernel_active_ratio": "Share of the last second with a kernel running; says nothing of how "
    "much of the GPU it filled.",
    "sm_active_ratio": "Share of the multiprocessors at work (GPM: Hopper and later).",
    "memory_active_ratio": "Share of the time that memory was moving data (GPM).",
    "power_watts": "Power, mean of the last second.",
    "power_limit_watts": "Power that the GPU may draw.",
    "temperature_celsius": "Temperature.",
}


def _figures(seen: SeenGpu) -> dict[str, float | None]:
    span, watched = seen.span, seen.watched
    return {
        "up": float(span is not None),
        "memory_total_bytes": watched.total_bytes,
        "memory_used_bytes": span.used_bytes if span else None,
        "kernel_active_ratio": span.busy_ratio if span else None,
        "sm_active_ratio": span.sm_active_ratio if span else None,
        "memory_active_ratio": span.memory_active_ratio if span else None,
        "power_watts": span.power_w if span else None,
        "power_limit_watts": watched.power_limit_w,
        "temperature_celsius": span.temperature_c if span else None,
    }


def _totals(gpus: Iterable[SeenGpu]) -> Iterator[Metric]:
    """Since the server was started."""
    gpus = list(gpus)
    yield _counter(
        "samples", "Spans of a second that were taken.", ((g, g.totals.num_spans) for g in gpus)
    )
    yield _counter(
        "kernel_active_seconds",
        "Time with at least one kernel running.",
        ((g, g.totals.active_s) for g in gpus),
    )
    yield _counter(
        "kernel_known_seconds",
        "Time for which it is known whether a kernel was running.",
        ((g, g.totals.busy_known_s) for g in gpus if g.totals.active_s is not None),
    )
    yield _counter(
        "energy_joules",
        "Energy, by the driver's counter where it has one.",
        ((g, g.totals.energy_j) for g in gpus),
    )
    yield _counter(
        "pcie_received_bytes", "Received over PCIe.", ((g, g.totals.received_bytes) for g in gpus)
    )
    yield _throttled(gpus)


def _throttled(gpus: Iterable[SeenGpu]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    family = CounterMetricFamily(
        "oomph_gpu_throttled_seconds",
        "Time with clocks held down, by cause.",
        labels=[*_GPU, "cause"],
    )
    for seen in gpus:
        for cause in ("hardware", "heat", "power"):
            family.add_metric([*_labels(seen), cause], seen.totals.throttled_s.get(cause, 0.0))
    return family


def _by_owner(gpus: Iterable[SeenGpu]) -> Iterator[Metric]:
    """Whose it is: of the user that runs the server, of others, or nobody can say."""
    from prometheus_client.core import GaugeMetricFamily

    labels = [*_GPU, "owner"]
    held = GaugeMetricFamily(
        "oomph_gpu_memory_held_bytes", "Memory held by processes, by whose they are.", labels=labels
    )
    number = GaugeMetricFamily(
        "oomph_gpu_processes", "Processes on the GPU, by whose they are.", labels=labels
    )
    for seen in gpus:
        if seen.span is None or seen.device.processes is None:
            continue
        sizes = held_bytes(seen.device)
        owners = [owner_of(process) for process in seen.device.processes]
        for owner in _OWNERS:
            if sizes is not None:
                held.add_metric([*_labels(seen), owner], sizes.get(owner, 0))
            number.add_metric([*_labels(seen), owner], owners.count(owner))
    yield held
    yield number


def _by_process(gpus: Iterable[SeenGpu]) -> Iterator[Metric]:
    """A series for each process, which is many over time: only where it was asked for."""
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(
        "oomph_gpu_process_memory_bytes",
        "Memory held by a process.",
        labels=[*_GPU, "pid", "user", "owner"],
    )
    for seen in gpus:
        for process in (seen.device.processes if seen.span else None) or ():
            if process.used_bytes is not None:
                whose = [str(process.pid), process.user or "", owner_of(process)]
                family.add_metric([*_labels(seen), *whose], process.used_bytes)
    yield family


def _gauge(name: str, told: str, rows: Iterable[tuple[SeenGpu, float | None]]) -> Metric:
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(f"oomph_gpu_{name}", told, labels=_GPU), rows)


def _counter(name: str, told: str, rows: Iterable[tuple[SeenGpu, float | None]]) -> Metric:
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(f"oomph_gpu_{name}", told, labels=_GPU), rows)


def _filled(family: Any, rows: Iterable[tuple[SeenGpu, float | None]]) -> Metric:
    for seen, value in rows:
        if value is not None:
            family.add_metric(_labels(seen), value)
    metric: Metric = family
    return metric


def _labels(seen: SeenGpu) -> list[str]:
    device = seen.device
    return [device.uuid or "", str(seen.watched.index), device.name or ""]
