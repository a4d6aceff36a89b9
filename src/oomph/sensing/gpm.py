"""GPM -> how many of the multiprocessors worked, and how busy the memory was: Hopper and later.

NVML's GPM counts in hardware; the difference of two samples is a mean over the time between,
without a daemon. The counters are shared: where DCGM's host engine runs, it is left alone
(nvtop#483).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from oomph.sensing.nvml import Handle, Nvml, Refusal

# nvml.h: nvmlGpmMetricId_t.
_SM_UTIL, _DRAM_BW_UTIL = 2, 10
_DCGM = "nv-hostengine"


def dcgm_runs(proc: Path = Path("/proc")) -> bool:
    """Is DCGM's host engine among the processes that can be seen?"""
    return any(_name_of(path) == _DCGM for path in proc.iterdir() if path.name.isdecimal())


def _name_of(process: Path) -> str | None:
    try:
        return (process / "comm").read_text().strip()
    except OSError:  # it has ended
        return None


def open_gpm(nvml: Nvml, handle: Handle) -> Gpm | None:
    """GPM of one GPU; None where it has none, or this user may not use it."""
    support = nvml.ask_gpu(handle, "nvmlGpmQueryDeviceSupport")
    if isinstance(support, Refusal) or not support.isSupportedDevice:
        return None
    samples = [nvml.ask("nvmlGpmSampleAlloc") for _ in range(2)]
    if any(isinstance(sample, Refusal) for sample in samples):
        return None
    return Gpm(nvml, handle, samples)


class Gpm:
    """Two samples in turn."""

    def __init__(self, nvml: Nvml, handle: Handle, samples: list[Any]) -> None:
        self._nvml = nvml
        self._handle = handle
        self._older, self._newer = samples
        self._filled = 0
        self._metrics = nvml.constant("c_nvmlGpmMetricsGet_t")()
        self._metrics.version = nvml.constant("NVML_GPM_METRICS_GET_VERSION")
        self._metrics.numMetrics = 2
        for metric, number in zip(self._metrics.metrics, (_SM_UTIL, _DRAM_BW_UTIL), strict=False):
            metric.metricId = number

    def ratios(self) -> tuple[float | None, float | None]:
        """Multiprocessors and memory, as means since the last time. Two NVML calls."""
        self._older, self._newer = self._newer, self._older
        refusal = self._nvml.call_gpu(self._handle, "nvmlGpmSampleGet", self._newer)
        if refusal:
            self._filled = 0
            return None, None
        self._filled = min(self._filled + 1, 2)
        return self._difference() if self._filled == 2 else (None, None)

    def _difference(self) -> tuple[float | None, float | None]:
        metrics = self._metrics
        metrics.sample1, metrics.sample2 = self._older, self._newer
        answer = self._nvml.ask("nvmlGpmMetricsGet", metrics)
        if isinstance(answer, Refusal):
            return None, None
        sm, dram = metrics.metrics[0], metrics.metrics[1]
        return _ratio(sm), _ratio(dram)


def _ratio(metric: Any) -> float | None:
    return metric.value / 100 if not metric.nvmlReturn and 0 <= metric.value <= 100 else None
