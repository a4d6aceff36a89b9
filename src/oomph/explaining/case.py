"""Case: one GPU with what is known beside it, and from which figures on a rule speaks.

The thresholds are judgement, to be tuned on real runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from oomph.records.report import BusyFigures, Finding, GpuFigures, HostFigures, StepFigures
from oomph.units import format_ratio

SHORTEST_RUN_S = 30.0
FEWEST_SAMPLES = 20
SHARED_RATIO = 0.05  # of the time, others are on the GPU
LOW_RATIO = 0.30  # kernel-active time below this is low
HIGH_RATIO = 0.90  # and from this on there is nothing to gain by feeding the GPU faster
WAITS_RATIO = 0.20  # of a step, for data: from here on the input is what to mend first
FED_RATIO = 0.05  # below this the input is not to blame
SATURATED_RATIO = 0.90  # of one core, or of all that the run may use
GAPS_RATIO = 0.10  # of the time: below this the gaps are short
PHASES_RATIO = 0.05  # of the run: less is not worth a word
PAUSING_RATIO = 0.50  # pauses in so much of the time are the way it trains, no accident
NARROW_RATIO = 0.40  # of the multiprocessors
LOW_POWER_RATIO = 0.50  # of the power limit
MEMORY_BOUND_RATIO = 0.70  # of the time, DRAM moves data
THROTTLED_RATIO = 0.05  # of the time
IDLE_IN_STEP_RATIO = 0.20  # of a step, without a kernel and without a wait for data
WORKING_CORES = 0.50  # of the busiest process: with less it does not work, but waits
CONTENDED_RATIO = 0.25  # of the CPUs, by others: less of it is the usual bustle of a machine
CPU_LIMITED_RATIO = 0.10  # of the scheduler's periods
SWAPPING_RATIO = 0.05  # of the time
LINK_RATIO = 0.60  # of what PCIe carries: about what a stream of copies reaches
SPILLS_LINK_RATIO = 0.50
SPILLS_FULL_RATIO = 0.95  # of the memory
FULL_RATIO = 0.80  # of the memory: from here on there is no room to speak of


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A GPU, and what is known beside it."""

    gpu: GpuFigures
    steps: StepFigures | None  # of its rank
    host: HostFigures
    lasted_s: float
    until_s: float = math.inf  # when it began to hang
    has_stalls: bool = False  # some of its steps take long, which is told by itself

    @property
    def busy(self) -> BusyFigures | None:
        return self.gpu.busy

    @property
    def working_ratio(self) -> float | None:
        """Mean kernel-active time while the run worked."""
        working = self.busy.working if self.busy else None
        return None if working is None else working.mean

    @property
    def is_low(self) -> bool:
        return self.working_ratio is not None and self.working_ratio < LOW_RATIO

    @property
    def is_high(self) -> bool:
        return self.working_ratio is not None and self.working_ratio >= HIGH_RATIO

    @property
    def is_shared(self) -> bool:
        return (self.gpu.shared_ratio or 0.0) > SHARED_RATIO

    @property
    def waits_ratio(self) -> float | None:
        """Share of a step that is spent waiting for data; None: the script did not say."""
        return self.steps.data_wait_ratio if self.steps else None

    @property
    def full_ratio(self) -> float | None:
        """How much of the memory was taken at most, by everybody; None: unknown."""
        memory = self.gpu.memory
        held = [one for one in (memory.peak_bytes, memory.seen_bytes) if one is not None]
        return max(held) / memory.total_bytes if held and memory.total_bytes else None

    @property
    def is_throttled(self) -> bool:
        return (self.gpu.power.throttled_ratio or 0.0) > THROTTLED_RATIO


Rule = Callable[[Case], Finding | None]


def active(case: Case) -> str:
    """How busy it was, with the words that must stand beside it."""
    ratio = format_ratio(case.working_ratio or 0.0)
    polled = case.busy is not None and case.busy.source == "polled"
    return f"kernel-active {ratio} of the time while it worked{', as polled' if polled else ''}"
