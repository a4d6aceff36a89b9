"""Pace: how training went for a while, as the script itself saw it."""

from __future__ import annotations

from dataclasses import dataclass

from oomph.records.run import GpuSpan, Peak, WatchedGpu
from oomph.units import GIB

SWITCH = "OOMPH_WATCHING"  # "off": scripts tell nothing, as in a rehearsal, which is no training


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The steps of a while, the GPU that they ran on, and torch's peak so far."""

    num_steps: int
    step_s: float | None  # mean
    samples_per_s: float | None  # of this process
    data_wait_ratio: float | None  # share of the step; None: not measured
    gpu: WatchedGpu | None  # of this process
    span: GpuSpan | None  # that GPU meanwhile
    gpu_problem: str | None  # why nothing is known of it
    peak: Peak | None  # on that GPU, by torch

    @property
    def used_ratio(self) -> float | None:
        """Of the GPU's memory, by everybody."""
        if self.gpu is None or self.span is None or self.span.used_bytes is None:
            return None
        return self.span.used_bytes / self.gpu.total_bytes if self.gpu.total_bytes else None

    def scalars(self) -> dict[str, float]:
        """At most eight figures for a logger, under the names that they are logged by."""
        span = self.span
        figures = {
            "gpu/util": span.busy_ratio if span else None,
            "gpu/mem_used_ratio": self.used_ratio,
            "gpu/mem_peak_reserved_gib": self.peak.used_bytes / GIB if self.peak else None,
            "gpu/power_w": span.power_w if span else None,
            "gpu/sm_active": span.sm_active_ratio if span else None,
            "time/step_s": self.step_s,
            "time/data_wait_ratio": self.data_wait_ratio,
            "throughput/samples_s": self.samples_per_s,
        }
        return {name: figure for name, figure in figures.items() if figure is not None}
