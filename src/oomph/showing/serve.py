"""Sighting -> what `oomph serve` sends: the page's data, /metrics, a dashboard for Grafana.

Other users' command lines are left out unless requested: everybody on the machine may see them, but
not everybody who opens a page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from oomph.records.machine import Device, Job, Past, Process, SeenGpu, Sighting, Totals

if TYPE_CHECKING:
    from prometheus_client import Metric


Value = TypeVar("Value", int, float)
_MOST_COMMAND = 300  # characters: a row of a table shows fewer
_DIGITS = 4  # significant, for shares and watts
_RUN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{4}")  # as oomph/monitoring/diary.py names a run
_OWNERS = {"this-run": "mine", "mine": "mine", "others": "others", "unknown": "unknown"}


def as_frame(
    sighting: Sighting, jobs: Iterable[Job] = (), *, shows_commands: bool
) -> dict[str, Any]:
    """Return the machine as it is now; `jobs` are the jobs of its processes."""
    by_pid = {job.pid: job for job in jobs}
    return {
        "number": sighting.number,
        "at": round(sighting.at, 2),
        "problem": sighting.problem,
        "notes": list(sighting.notes),
        "gpus": [_gpu(seen, by_pid, shows_commands) for seen in sighting.gpus],
    }


def as_history(sighting: Sighting, past: Sequence[Past]) -> dict[str, Any]:
    """Return the last quarter of an hour, in columns. A GPU not there yet has no values."""
    return {
        "times": [round(one.at, 2) for one in past],
        "gpus": [
            {
                "used_bytes": [_at(one.used_bytes, place) for one in past],
                "busy_ratio": [_short(_at(one.busy_ratios, place)) for one in past],
                "power_w": [_short(_at(one.power_w, place)) for one in past],
            }
            for place in range(len(sighting.gpus))
        ],
    }


def _gpu(seen: SeenGpu, jobs: Mapping[int, Job], shows_commands: bool) -> dict[str, Any]:
    device, span, watched = seen.device, seen.span, seen.watched
    return {
        "index": watched.index,  # for a slice, that of its GPU
        "uuid": device.uuid,
        "name": device.name,
        "is_slice": device.is_slice,
        "slice": device.index if device.is_slice else None,  # its number on its GPU
        "is_free": device.is_free if span else None,
        "problem": device.problem if span or device.problem else "it does not answer",
        "total_bytes": watched.total_bytes,
        "used_bytes": span.used_bytes if span else None,
        "held_bytes": held_bytes(device) if span else None,
        "busy_ratio": _short(span.busy_ratio if span else None),
        "busy_source": watched.busy_source,
        "sm_active_ratio": _short(span.sm_active_ratio if span else None),
        "power_w": _short(span.power_w if span else None),
        "power_limit_w": watched.power_limit_w,
        "temperature_c": span.temperature_c if span else None,
        "throttled_by": list(span.throttled_by) if span else [],
        "processes": _processes(device, jobs, shows_commands) if span else None,
    }


def held_bytes(device: Device) -> dict[str, int] | None:
    """Return the memory by owner; None if processes or their memory are unknown."""
    if device.processes is None:
        return None
    sizes: dict[str, int] = {}
    for process in device.processes:
        if process.used_bytes is None:
            return None
        owner = owner_of(process)
        sizes[owner] = sizes.get(owner, 0) + process.used_bytes
    return sizes


def owner_of(process: Process) -> str:
    """Return "mine", "others" or "unknown": the server itself has no run."""
    return _OWNERS[process.owner]


def _processes(
    device: Device, jobs: Mapping[int, Job], shows_commands: bool
) -> list[dict[str, Any]] | None:
    if device.processes is None:
        return None
    return [
        {**_process(one, shows_commands), "job": _job(jobs.get(one.pid))}
        for one in device.processes
    ]


def _job(job: Job | None) -> dict[str, Any] | None:
    if job is None:
        return None
    # A run that is not recorded has no name but its token, which must stay secret.
    is_kept = bool(job.run_id and _RUN.fullmatch(job.run_id))
    return {
        "run": job.run_id if is_kept else None,
        "rank": job.rank,
        "world_size": job.world_size,
        "launcher": job.launcher,
    }


def _process(process: Process, shows_commands: bool) -> dict[str, Any]:
    owner = owner_of(process)
    is_shown = shows_commands or owner == "mine"
    command = process.command if is_shown else None
    return {
        "pid": process.pid,
        "owner": owner,
        "user": process.user,
        "command": command and command[:_MOST_COMMAND],
        "is_hidden": not is_shown and process.command is not None,
        "used_bytes": process.used_bytes,
        "started_at": process.started_at,
        "kind": process.kind,
        "note": process.note,
    }


def _at(values: Sequence[Value | None], place: int) -> Value | None:
    return values[place] if place < len(values) else None


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")


# ---- /metrics, for Prometheus --------------------------------------------------------------------
# Units are base units. Growing figures are counters, so that nothing between two scrapes is lost:
# the mean of kernel-active time is the growth of `oomph_gpu_kernel_active_seconds_total` divided by
# that of `oomph_gpu_kernel_known_seconds_total`. Needs prometheus_client (the extra `web`).

_GPU = ("uuid", "gpu", "name")
_OWNER_LABELS = ("mine", "others", "unknown")
_CAUSES = ("hardware", "heat", "power")
_Rows = Iterable[tuple[Sequence[str], float | None]]  # labels, value


def as_metrics(sighting: Sighting, num_viewers: int, *, per_process: bool) -> bytes:
    """Return the metrics in the text format that every Prometheus reads."""
    from prometheus_client import generate_latest

    return generate_latest(_Metrics(sighting, num_viewers, per_process))


@dataclass(frozen=True, slots=True)
class _Metrics:
    """The metrics, as a collector of prometheus_client."""

    sighting: Sighting
    num_viewers: int
    per_process: bool

    def collect(self) -> Iterator[Metric]:
        from oomph import __version__

        gpus = [(_labels(seen), seen) for seen in self.sighting.gpus]
        yield _family("oomph_info", "The version of oomph.", ["version"], [([__version__], 1)])
        yield _family("oomph_serve_viewers", "Pages that are live.", [], [([], self.num_viewers)])
        for name, (description, figure) in _NOW.items():
            rows: _Rows = ((labels, figure(seen)) for labels, seen in gpus)
            yield _family(f"oomph_gpu_{name}", description, _GPU, rows)
        for name, (description, total) in _TOTALS.items():
            rows = ((labels, total(seen.totals)) for labels, seen in gpus)
            yield _family(f"oomph_gpu_{name}", description, _GPU, rows, is_counter=True)
        yield from self._by_label(gpus)

    def _by_label(self, gpus: Sequence[tuple[list[str], SeenGpu]]) -> Iterator[Metric]:
        """Yield what is divided further than by GPU: by cause, owner or process."""
        throttled = (
            ([*labels, cause], seen.totals.throttled_s.get(cause, 0.0))
            for labels, seen in gpus
            for cause in _CAUSES
        )
        yield _family(
            "oomph_gpu_throttled_seconds",
            "Time with clocks held down, by cause.",
            [*_GPU, "cause"],
            throttled,
            is_counter=True,
        )
        listed = [
            (labels, seen.device, seen.device.processes)
            for labels, seen in gpus
            if seen.span is not None and seen.device.processes is not None
        ]
        yield _family(
            "oomph_gpu_memory_held_bytes",
            "Memory held by processes, by whose they are.",
            [*_GPU, "owner"],
            (
                ([*labels, owner], sizes.get(owner, 0))
                for labels, device, _ in listed
                if (sizes := held_bytes(device)) is not None
                for owner in _OWNER_LABELS
            ),
        )
        yield _family(
            "oomph_gpu_processes",
            "Processes on the GPU, by whose they are.",
            [*_GPU, "owner"],
            (
                ([*labels, owner], sum(owner_of(process) == owner for process in processes))
                for labels, _, processes in listed
                for owner in _OWNER_LABELS
            ),
        )
        if self.per_process:  # many series over time
            yield _family(
                "oomph_gpu_process_memory_bytes",
                "Memory held by a process.",
                [*_GPU, "pid", "user", "owner"],
                (
                    ([*labels, str(one.pid), one.user or "", owner_of(one)], one.used_bytes)
                    for labels, _, processes in listed
                    for one in processes
                ),
            )


def _family(
    name: str, description: str, labels: Sequence[str], rows: _Rows, *, is_counter: bool = False
) -> Metric:
    """Return a metric with a value for each row; what is unknown is left out."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    kind = CounterMetricFamily if is_counter else GaugeMetricFamily
    family = kind(name, description, labels=labels)
    for of, value in rows:
        if value is not None:
            family.add_metric(of, value)
    return family


def _labels(seen: SeenGpu) -> list[str]:
    device = seen.device
    return [device.uuid or "", str(seen.watched.index), device.name or ""]


def _of_span(field: str) -> Callable[[SeenGpu], float | None]:
    return lambda seen: getattr(seen.span, field, None)  # None: the GPU does not answer


# Figures of the last second.
_NOW: dict[str, tuple[str, Callable[[SeenGpu], float | None]]] = {
    "up": ("Whether the GPU answers.", lambda seen: seen.span is not None),
    "memory_total_bytes": ("Memory of the GPU.", lambda seen: seen.watched.total_bytes),
    "memory_used_bytes": (
        "Memory in use, by everybody, mean of the last second.",
        _of_span("used_bytes"),
    ),
    "kernel_active_ratio": (
        "Share of the last second with a kernel running, however little of the GPU it filled.",
        _of_span("busy_ratio"),
    ),
    "sm_active_ratio": (
        "Share of the multiprocessors at work (GPM: Hopper and later).",
        _of_span("sm_active_ratio"),
    ),
    "memory_active_ratio": (
        "Share of the time that memory was moving data (GPM).",
        _of_span("memory_active_ratio"),
    ),
    "power_watts": ("Power, mean of the last second.", _of_span("power_w")),
    "power_limit_watts": ("Power that the GPU may draw.", lambda seen: seen.watched.power_limit_w),
    "temperature_celsius": ("Temperature.", _of_span("temperature_c")),
}
# Totals since the server was started.
_TOTALS: dict[str, tuple[str, Callable[[Totals], float | None]]] = {
    "samples": ("Spans of a second that were taken.", lambda totals: totals.num_spans),
    "kernel_active_seconds": (
        "Time with at least one kernel running.",
        lambda totals: totals.active_s,
    ),
    "kernel_known_seconds": (
        "Time for which it is known whether a kernel was running.",
        lambda totals: None if totals.active_s is None else totals.busy_known_s,
    ),
    "energy_joules": (
        "Energy, by the driver's counter where it has one.",
        lambda totals: totals.energy_j,
    ),
    "pcie_received_bytes": ("Received over PCIe.", lambda totals: totals.received_bytes),
}


# ---- the dashboard for Grafana -------------------------------------------------------------------
# Means come from counters, so they are correct for any scrape interval.

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_CHOSEN = '{instance=~"$instance",uuid=~"$gpu"}'
_LEGEND = "{{instance}} GPU {{gpu}}"
_WIDTH, _HEIGHT = 12, 8  # of a panel; Grafana's page is 24 wide
_SCHEMA = 39  # Grafana 10 and later


@dataclass(frozen=True, slots=True)
class _Panel:
    title: str
    description: str
    unit: str  # in Grafana's names
    query: str
    legend: str = _LEGEND


_PANELS = (
    _Panel(
        "Memory in use",
        "By everybody, as a share of the GPU's memory.",
        "percentunit",
        f"oomph_gpu_memory_used_bytes{_CHOSEN} / oomph_gpu_memory_total_bytes{_CHOSEN}",
    ),
    _Panel(
        "Kernel-active time",
        "Share of the time with at least one kernel running. It does not show how much of the GPU"
        " each kernel fills.",
        "percentunit",
        f"rate(oomph_gpu_kernel_active_seconds_total{_CHOSEN}[$__rate_interval])"
        f" / rate(oomph_gpu_kernel_known_seconds_total{_CHOSEN}[$__rate_interval])",
    ),
    _Panel(
        "Whose memory it is",
        "Held by processes of the user that serves, of others, or of an unknown owner.",
        "bytes",
        f"sum by (owner) (oomph_gpu_memory_held_bytes{_CHOSEN})",
        "{{owner}}",
    ),
    _Panel(
        "Processes",
        "On the GPUs, by whose they are.",
        "short",
        f"sum by (owner) (oomph_gpu_processes{_CHOSEN})",
        "{{owner}}",
    ),
    _Panel(
        "Power",
        "Mean, by the driver's counter of energy where it has one.",
        "watt",
        f"rate(oomph_gpu_energy_joules_total{_CHOSEN}[$__rate_interval])",
    ),
    _Panel(
        "Clocks held down",
        "Share of the time, by cause.",
        "percentunit",
        f"rate(oomph_gpu_throttled_seconds_total{_CHOSEN}[$__rate_interval]) > 0",
        f"{_LEGEND}: {{{{cause}}}}",
    ),
    _Panel("Temperature", "Of the GPU.", "celsius", f"oomph_gpu_temperature_celsius{_CHOSEN}"),
    _Panel(
        "GPUs that do not answer",
        "A GPU that was there, and is lost.",
        "short",
        f"oomph_gpu_up{_CHOSEN} == 0",
    ),
)


def dashboard() -> str:
    """Return the JSON that Grafana imports."""
    import json

    content = {
        "title": "oomph: GPUs",
        "uid": "oomph-gpus",
        "tags": ["oomph", "gpu"],
        "schemaVersion": _SCHEMA,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": _variables()},
        "panels": [_panel(place, panel) for place, panel in enumerate(_PANELS)],
    }
    return json.dumps(content, indent=2)


def _variables() -> list[dict[str, Any]]:
    source = {"name": "source", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    instance = _variable("instance", "Machine", "label_values(oomph_gpu_up, instance)")
    gpu = _variable("gpu", "GPU", 'label_values(oomph_gpu_up{instance=~"$instance"}, uuid)')
    return [source, instance, gpu]


def _variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,  # when the time range changes: machines come and go
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(place: int, panel: _Panel) -> dict[str, Any]:
    row, column = divmod(place, 24 // _WIDTH)
    limits = {"max": 1} if panel.unit == "percentunit" else {}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.description,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, **limits}, "overrides": []},
        "options": {"tooltip": {"mode": "multi"}, "legend": {"displayMode": "list"}},
        "targets": [
            {
                "refId": "A",
                "datasource": _SOURCE,
                "expr": panel.query,
                "legendFormat": panel.legend,
            }
        ],
    }
