"""The ops of a step, a GpuModel -> the seconds that the step takes.

Each op takes the longest of its arithmetic, its memory traffic and the least that a kernel
takes. The host issues one op after the other, the GPU runs them in that order when they have
been issued, and what joins several GPUs sends beside: three clocks, wound op by op. A step begins
with all idle, as after a loss is read.

Good for comparing ways to train and for the order of magnitude: `low_s` and `high_s` are the
step with all constants at their best and at their worst. A measured step of the same kind makes
it much better: `anchored`. Limits: eager mode, GPUs of one machine. Not modelled are matmuls too
small to fill the GPU, caches, copies of the batch and data loading. What is offloaded goes over
the bus, a clock of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from oomph.errors import UsageError
from oomph.predicting.communication import COMMUNICATION, LinkClock, link_between
from oomph.predicting.kernels import Bound, Place, PricedKernel, kernel_of
from oomph.predicting.micro_steps import second_micro_step
from oomph.predicting.paces import BEST, LIKELY, WORST, Pace
from oomph.predicting.rates import MatmulPrecision, Rates
from oomph.records.catalog import GpuModel
from oomph.records.trace import Op

# The study behind the likely pace: ratios between steps of one model were off by 7 % in the mean
# and by 11 % at worst, but by up to 50 % where one of the two is bound by launches.
_ANCHORED_RATIO = 0.11

# Tensors that wait on the GPU for their copy: training/offload_activations.py keeps so many.
_NUM_WAITING = 5

_TRACED_MICRO_STEPS = 2


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
    ops: Sequence[Op],
    model: GpuModel,
    *,
    matmul_precision: MatmulPrecision = "fp32",
    num_gpus: int = 1,
) -> StepTime | None:
    """The time of a step with these ops; None if a rate is needed that nobody knows."""
    issued = _issued_on(ops, model, matmul_precision, num_gpus)
    if issued is None:
        return None
    likely = _wind(issued, LIKELY)
    return StepTime(
        step_s=likely.step_s,
        gpu_busy_s=sum(likely.busy_s.values()) - likely.exposed_s,
        host_s=len(ops) * LIKELY.host_s,
        by_phase=likely.by_phase,
        flops=sum(op.flops for op in ops),
        bound_by=_bound_by(likely),
        low_s=_wind(issued, BEST).step_s,
        high_s=_wind(issued, WORST).step_s,
        communication_s=likely.communication_s,
        waited_s=likely.exposed_s,
    )


def likely_seconds(
    ops: Sequence[Op], model: GpuModel, matmul_precision: MatmulPrecision, num_gpus: int
) -> float | None:
    """The time alone, as `estimate` has it."""
    issued = _issued_on(ops, model, matmul_precision, num_gpus)
    return None if issued is None else _wind(issued, LIKELY).step_s


def _issued_on(
    ops: Sequence[Op], model: GpuModel, matmul_precision: MatmulPrecision, num_gpus: int
) -> _Issued | None:
    bandwidth = model.memory_bandwidth_bytes_per_s
    link = link_between(model, num_gpus)
    if not ops or not bandwidth or (num_gpus > 1 and link is None):
        return None
    return _issued(ops, Rates(model, matmul_precision, link), bandwidth)


def with_micro_steps(ops: Sequence[Op], num_micro_steps: int) -> list[Op]:
    """The ops of a step that accumulates over more micro-steps than the two that were traced."""
    if num_micro_steps <= _TRACED_MICRO_STEPS:
        return list(ops)
    second = second_micro_step([op.phase for op in ops])
    repeated = ops[second.start : second.stop]
    if not any(op.name in COMMUNICATION for op in ops[: second.start]):
        # Gradients are sent after the last micro-step only: DDP's no_sync.
        repeated = [op for op in repeated if op.name not in COMMUNICATION and op.name != "wait"]
    more = [*repeated] * (num_micro_steps - _TRACED_MICRO_STEPS)
    return [*ops[: second.stop], *more, *ops[second.stop :]]


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


# ---- the three clocks ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class _Issued:
    """The ops of a step as numbers of kernels: a step has many ops and few different ones."""

    kernels: Sequence[PricedKernel]
    runs: Sequence[tuple[str, Sequence[int]]]  # ops of one phase that follow each other


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wound:
    step_s: float
    busy_s: Mapping[Bound, float]
    by_phase: Mapping[str, float]
    waited_s: float  # by the GPU, for the bus and for the host's own work
    communication_s: float  # of the link
    exposed_s: float  # of it, what the GPU waited for


class _Bus:
    """The clock of the copies between GPU and host, and of the host's work on what was copied."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited_s = 0.0
        self._copied: list[float] = []  # when each copy to the host ends

    def run(self, place: Place, seconds: float, host: float, gpu: float) -> tuple[float, float]:
        """The clocks of host and GPU after something that is not the GPU's work."""
        if place == "host":
            return max(host, self.now) + seconds, gpu
        if place == "to host":
            self.now = max(self.now, gpu) + seconds
            self._copied.append(self.now)
            if len(self._copied) > _NUM_WAITING:  # its memory is given back before more is taken
                host = max(host, self._copied[-1 - _NUM_WAITING])
            return host, gpu
        self.now = max(self.now, host) + seconds
        self.waited_s += max(self.now - gpu, 0.0)
        return host, max(gpu, self.now)


def _wind(issued: _Issued, pace: Pace) -> _Wound:
    times = [kernel.at(pace) for kernel in issued.kernels]
    seconds = [time_s for time_s, _ in times]
    waits = [kernel.is_waited_for for kernel in issued.kernels]
    is_gpus = [kernel.is_gpus for kernel in issued.kernels]
    bus, link = _Bus(), LinkClock()
    by_phase: dict[str, float] = {}
    host = gpu = 0.0  # seconds since the step began; the GPU's clock is never behind the host's
    for phase, numbers in issued.runs:
        began = gpu
        for number in numbers:
            if not is_gpus[number]:
                kernel = issued.kernels[number]
                host, gpu = _beside_the_gpu(kernel, seconds[number], pace, bus, link, (host, gpu))
                continue
            host += pace.host_s
            if gpu < host:
                gpu = host
            gpu += seconds[number]
            if waits[number]:
                host = gpu
        by_phase[phase] = by_phase.get(phase, 0.0) + gpu - began
    if issued.runs and bus.now > gpu:  # the last copies
        by_phase[issued.runs[-1][0]] += bus.now - gpu
        bus.waited_s += bus.now - gpu
        gpu = bus.now
    return _Wound(
        step_s=gpu,
        busy_s=_busy(issued, times, link),
        by_phase=by_phase,
        waited_s=bus.waited_s,
        communication_s=link.busy_s,
        exposed_s=link.waited_s,
    )


def _beside_the_gpu(
    kernel: PricedKernel,
    seconds: float,
    pace: Pace,
    bus: _Bus,
    link: LinkClock,
    clocks: tuple[float, float],
) -> tuple[float, float]:
    """The clocks of host and GPU after what the bus, the host or the link does."""
    host, gpu = clocks
    if kernel.role == "wait":
        return host, link.wait(kernel.num_pending, gpu)
    if kernel.role != "kernel":
        link.begin(seconds, host, None if kernel.role == "gather" else gpu)
        return host, gpu
    return bus.run(kernel.place, seconds, host + pace.host_s, gpu)


def _busy(
    issued: _Issued, times: Sequence[tuple[float, Bound]], link: LinkClock
) -> dict[Bound, float]:
    """The GPU's seconds by what decides them."""
    busy: dict[Bound, float] = {}
    for number, count in Counter(n for _, numbers in issued.runs for n in numbers).items():
        if issued.kernels[number].is_gpus:
            time_s, bound = times[number]
            busy[bound] = busy.get(bound, 0.0) + time_s * count
    if link.busy_s:
        busy["communication"] = link.waited_s
    return busy


def _bound_by(wound: _Wound) -> Bound:
    """What takes most of the step; a GPU that waits, waits for launches."""
    idle_s = wound.step_s - sum(wound.busy_s.values()) - wound.waited_s
    shares = {**wound.busy_s, "host and bus": wound.waited_s}
    shares["kernel launches"] = shares.get("kernel launches", 0.0) + idle_s
    return max(shares, key=lambda bound: shares[bound])


def _issued(ops: Sequence[Op], rates: Rates, bandwidth: float) -> _Issued | None:
    """None if an op computes at a rate that nobody knows."""
    numbers: dict[tuple[str, str, int, int, int], int] = {}
    kernels: list[PricedKernel] = []
    runs: list[tuple[str, list[int]]] = []
    for op in ops:
        key = (op.name, op.dtype, op.flops, op.moved_bytes, op.num_pending)
        number = numbers.get(key)
        if number is None:
            kernel = kernel_of(op, rates, bandwidth)
            if kernel is None:
                return None
            number = numbers[key] = len(kernels)
            kernels.append(kernel)
        if not runs or runs[-1][0] != op.phase:
            runs.append((op.phase, []))
        runs[-1][1].append(number)
    return _Issued(kernels=kernels, runs=runs)
