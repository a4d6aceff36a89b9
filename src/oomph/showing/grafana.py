"""A dashboard for Grafana over what /metrics tells Prometheus: `oomph serve --grafana`.

Means come from counters, so that they are true whatever the distance of two scrapes is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_SOURCE = {"type": "prometheus", "uid": "${source}"}
_CHOSEN = '{instance=~"$instance",uuid=~"$gpu"}'
_LEGEND = "{{instance}} GPU {{gpu}}"
_WIDTH, _HEIGHT = 12, 8  # of a panel; Grafana's page is 24 wide
_SCHEMA = 39  # Grafana 10 and later


@dataclass(frozen=True, slots=True, kw_only=True)
class _Panel:
    title: str
    told: str
    unit: str  # Grafana's names
    query: str
    legend: str = _LEGEND
    highest: float | None = None


_PANELS = (
    _Panel(
        title="Memory in use",
        told="By everybody, as a share of the GPU's memory.",
        unit="percentunit",
        query=f"oomph_gpu_memory_used_bytes{_CHOSEN} / oomph_gpu_memory_total_bytes{_CHOSEN}",
        highest=1,
    ),
    _Panel(
        title="Kernel-active time",
        told="Share of the time with at least one kernel running. It does not tell how much of "
        "the GPU each kernel fills.",
        unit="percentunit",
        query=f"rate(oomph_gpu_kernel_active_seconds_total{_CHOSEN}[$__rate_interval])"
        f" / rate(oomph_gpu_kernel_known_seconds_total{_CHOSEN}[$__rate_interval])",
        highest=1,
    ),
    _Panel(
        title="Whose memory it is",
        told="Held by processes of the user that serves, of others, or of whom nobody can say.",
        unit="bytes",
        query=f"sum by (owner) (oomph_gpu_memory_held_bytes{_CHOSEN})",
        legend="{{owner}}",
    ),
    _Panel(
        title="Processes",
        told="On the GPUs, by whose they are.",
        unit="short",
        query=f"sum by (owner) (oomph_gpu_processes{_CHOSEN})",
        legend="{{owner}}",
    ),
    _Panel(
        title="Power",
        told="Mean, by the driver's counter of energy where it has one.",
        unit="watt",
        query=f"rate(oomph_gpu_energy_joules_total{_CHOSEN}[$__rate_interval])",
    ),
    _Panel(
        title="Clocks held down",
        told="Share of the time, by cause.",
        unit="percentunit",
        query=f"rate(oomph_gpu_throttled_seconds_total{_CHOSEN}[$__rate_interval]) > 0",
        legend=f"{_LEGEND}: {{{{cause}}}}",
        highest=1,
    ),
    _Panel(
        title="Temperature",
        told="Of the GPU.",
        unit="celsius",
        query=f"oomph_gpu_temperature_celsius{_CHOSEN}",
    ),
    _Panel(
        title="GPUs that do not answer",
        told="A GPU that was there, and is lost.",
        unit="short",
        query=f"oomph_gpu_up{_CHOSEN} == 0",
    ),
)


def dashboard() -> str:
    """The JSON that Grafana imports."""
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
        "refresh": 2,  # when the time changes: machines come and go
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _panel(place: int, panel: _Panel) -> dict[str, Any]:
    row, column = divmod(place, 24 // _WIDTH)
    limits = {} if panel.highest is None else {"max": panel.highest}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.told,
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
