"""The ops of a step, a GpuModel -> the seconds that the step takes.

Each op takes the longest of its arithmetic, its memory traffic and the least that a kernel
takes. The host issues one op after the other, the GPU runs them in that order when they have
been issued, and bus and links carry beside: the clocks of `winding.py`. A step begins with all
idle, as after a loss is read.

Good for comparing ways to train and for the order of magnitude: `low_s` and `high_s` are the
step with all constants at their best and at their worst. A measured step of the same kind makes
it much better: `anchored`. Limits: eager mode, GPUs of one machine. Not modelled are matmuls too
small to fill the GPU, caches, copies of the batch and data loading. What is offloaded goes over
the bus, a clock of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oomph.errors import UsageError
from oomph.predicting.communication import link_between
from oomph.predicting.kernels import Bound, PricedKernel, kernel_of
from oomph.predicting.micro_steps import parts_of_work
from oomph.predicting.paces import BEST, LIKELY, WORST, Pace
from oomph.predicting.rates import MatmulPrecision, Rates
from oomph.predicting.winding import Clocks, Order
from oomph.predicting.work import Work, work_of
from oomph.records.catalog import GpuModel
from oomph.records.trace import Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# The study behind the likely pace: ratios between steps of one model were off by 7 % in the mean
# and by 11 % at worst, but by up to 50 % where one of the two is bound by launches.
_ANCHORED_RATIO = 0.11


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a training step takes, and why."""

    step_s: float
    gpu_busy_s: float
    host_s: float  # what the host needs to issue all ops
    by_phase: Mapping[str, float]  # seconds; together they are step_s
    flops: int
    bound_by: Bound  # what most of the step is spent on
    low_s: float
    high_s: float
    communication_s: float = 0.0  # all that is sent and received
    waited_s: float = 0.0  # of it, what no kernel hides


def estimate(
    ops: Sequence[Op] | Work,
    model: GpuModel,
    *,
    matmul_precision: MatmulPrecision = "fp32",
    num_gpus: int = 1,
    num_micro_steps: int | None = None,
) -> StepTime | None:
    """The time of a step with these ops; None if a rate is needed that nobody knows.

    Where they are those of two micro-steps, it may have more of them.
    """
    work = ops if isinstance(ops, Work) else work_of(ops)
    step = _priced(work, Rates(model, matmul_precision, link_between(model, num_gpus)), num_gpus)
    if step is None:
        return None
    step = replace(step, parts=_parts(work, step.kernels, num_micro_steps))
    likely = step.wind(LIKELY)
    num_ops = sum(len(order.op) * times for order, times in step.parts)
    return StepTime(
        step_s=likely.step_s,
        gpu_busy_s=sum(likely.busy_s.values()) - likely.exposed_s,
        host_s=num_ops * LIKELY.host_s,
        by_phase=likely.by_phase,
        flops=sum(op.flops * num for op, num in zip(work.kernels, step.counts, strict=True)),
        bound_by=_bound_by(likely),
        low_s=step.wind(BEST).step_s,
        high_s=step.wind(WORST).step_s,
        communication_s=likely.communication_s,
        waited_s=likely.exposed_s,
    )


def anchored(predicted: StepTime, reference: StepTime, measured_s: float) -> StepTime:
    """A prediction, scaled by what a step of the same kind, predicted the same way, really took.

    The same kind: the same model, GPU and software, and bound by the same. Where another thing
    decides, the bounds stay as wide as they were.
    """
    if not measured_s > 0 or not reference.step_s > 0:
        raise UsageError(
            "a step cannot be held to one that took no time",
            because=f"measured {measured_s} s, predicted {reference.step_s} s",
            attempt="measuring the mean of some steps after the first",
        )
    factor = measured_s / reference.step_s
    step_s = predicted.step_s * factor
    low_s, high_s = step_s * (1 - _ANCHORED_RATIO), step_s * (1 + _ANCHORED_RATIO)
    if predicted.bound_by != reference.bound_by:
        low_s, high_s = min(low_s, predicted.low_s), max(high_s, predicted.high_s)
    return replace(
        predicted,
        step_s=step_s,
        gpu_busy_s=predicted.gpu_busy_s * factor,
        host_s=predicted.host_s * factor,
        by_phase={phase: seconds * factor for phase, seconds in predicted.by_phase.items()},
        low_s=low_s,
        high_s=high_s,
        communication_s=predicted.communication_s * factor,
        waited_s=predicted.waited_s * factor,
    )


# ---- the clocks ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wound:
    step_s: float
    busy_s: Mapping[Bound, float]
    by_phase: Mapping[str, float]
    waited_s: float  # by the GPU, for the bus and for the host's own work
    communication_s: float  # of the link
    exposed_s: float  # of it, what the GPU waited for


@dataclass(frozen=True, eq=False, kw_only=True)
class _Step:
    """The kernels of a step with their prices, and the orders of its parts with their repeats."""

    kernels: Sequence[PricedKernel]
    parts: Sequence[tuple[Order, int]] = ()

    @property
    def counts(self) -> list[int]:
        """How often each kernel runs."""
        import numpy as np

        of_parts = (
            np.bincount(order.op, minlength=len(self.kernels)) * times
            for order, times in self.parts
        )
        counts: list[int] = sum(of_parts, np.zeros(len(self.kernels), dtype=np.int64)).tolist()
        return counts

    def wind(self, pace: Pace) -> _Wound:
        times = [kernel.at(pace) for kernel in self.kernels]
        seconds = _array([time_s for time_s, _ in times])
        clocks = Clocks()
        for order, repeats in self.parts:
            paced = order.paced(seconds, pace)
            for _ in range(repeats):
                paced.wind(clocks)
        step_s = clocks.end()
        return _Wound(
            step_s=step_s,
            busy_s=self._busy(times, clocks),
            by_phase=clocks.by_phase,
            waited_s=clocks.bus.waited_s,
            communication_s=clocks.link.busy_s,
            exposed_s=clocks.link.waited_s,
        )

    def _busy(self, times: Sequence[tuple[float, Bound]], clocks: Clocks) -> dict[Bound, float]:
        """The GPU's seconds by what decides them."""
        busy: dict[Bound, float] = {}
        for kernel, (time_s, bound), count in zip(self.kernels, times, self.counts, strict=True):
            if kernel.is_gpus:
                busy[bound] = busy.get(bound, 0.0) + time_s * count
        if clocks.link.busy_s:
            busy["communication"] = clocks.link.waited_s
        return busy


def _priced(work: Work, rates: Rates, num_gpus: int) -> _Step | None:
    """None if an op computes at a rate that nobody knows."""
    bandwidth = rates.bandwidth_bytes_per_s
    if not work.kernels or not bandwidth or (num_gpus > 1 and rates.link is None):
        return None
    kernels = [kernel_of(op, rates, bandwidth) for op in work.kernels]
    known = [kernel for kernel in kernels if kernel is not None]
    return _Step(kernels=known) if len(known) == len(kernels) else None


def _parts(
    work: Work, kernels: Sequence[PricedKernel], num_micro_steps: int | None
) -> list[tuple[Order, int]]:
    phases = tuple(dict.fromkeys(op.phase for op in work.kernels))
    codes = _array([phases.index(op.phase) for op in work.kernels]).astype(int)
    return [
        (Order(kernels, numbers, codes[numbers], phases), repeats)
        for numbers, repeats in parts_of_work(work, num_micro_steps)
    ]


def _array(numbers: Sequence[float]) -> NDArray[np.float64]:
    import numpy as np

    return np.array(numbers, dtype=np.float64)


def _bound_by(wound: _Wound) -> Bound:
    """What takes most of the step; a GPU that waits, waits for launches."""
    idle_s = wound.step_s - sum(wound.busy_s.values()) - wound.waited_s
    shares = {**wound.busy_s, "host and bus": wound.waited_s}
    shares["kernel launches"] = shares.get("kernel launches", 0.0) + idle_s
    return max(shares, key=lambda bound: shares[bound])
