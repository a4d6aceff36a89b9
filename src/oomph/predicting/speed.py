"""The ops of a step, a GpuModel -> the seconds that the step takes.

Each op takes what pricing.py says. The host issues one op after another, the GPU runs them in that
order once they are issued, and bus and links carry data meanwhile: each has a clock. A step begins
with all of them idle, as after reading the loss.
"""

# `low_s` and `high_s` are the step with kernels and host at their best and at their worst. A step
# of the same kind that was measured makes it much more accurate: `anchored`. Limits: eager mode.
# Not modelled: tensors that stay in the L2 cache, clocks below the datasheet's, and data loading.

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from oomph.errors import UsageError
from oomph.predicting.footprint import PHASES, Footprint, Work, work_of
from oomph.predicting.links import COMMUNICATION, NO_LINKS, Links
from oomph.predicting.pricing import Bound, Lane, Place, Priced, Prices, Sizes, sizes_of
from oomph.predicting.rates import MatmulPrecision, Rates
from oomph.records.gpu_model import GpuModel
from oomph.records.trace import Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    Seconds = NDArray[np.float64]


# ---- the clocks of host, GPU, bus and link
# A stretch of kernels that run on the GPU alone is described by three numbers: how many there are,
# their total time, and the earliest end of the last one after the host began to issue them. Only
# traffic over the bus or between GPUs is simulated op by op.

# Tensors that wait on the GPU for their copy: tricks/offload_activations.py keeps this many.
_NUM_WAITING = 5


class Bus:
    """The clock of copies between GPU and host, and of the host's work on the copied data."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited_s = 0.0
        self._copied: list[float] = []  # when each copy to the host ends

    def copy(self) -> Bus:
        copied = Bus()
        copied.now, copied.waited_s, copied._copied = self.now, self.waited_s, [*self._copied]
        return copied

    def run(self, place: Place, seconds: float, host: float, gpu: float) -> tuple[float, float]:
        """Return the clocks of host and GPU after an op off the GPU."""
        if place == "to host":
            before = self.now
            self.now = now = (gpu if gpu > before else before) + seconds  # noqa: FURB136 - as below
            copied = self._copied
            copied.append(now)
            if len(copied) > _NUM_WAITING:  # its memory is released before more is taken
                return max(copied[-1 - _NUM_WAITING], host), gpu
            return host, gpu
        if place == "host":
            return max(host, self.now) + seconds, gpu
        self.now = now = (max(host, self.now)) + seconds
        if now <= gpu:
            return host, gpu
        self.waited_s += now - gpu
        return host, now


class LinkClock:
    """The clock of the link, which runs one collective after another, as NCCL's stream does.

    Moments are seconds since the step began.
    """

    def __init__(self) -> None:
        self.busy_s = self.waited_s = 0.0
        self._ends: list[float] = []  # end of each collective so far
        self._taken = 0.0  # when the GPU last waited; a gather starts one wait ahead

    def copy(self) -> LinkClock:
        copied = LinkClock()
        copied.busy_s, copied.waited_s = self.busy_s, self.waited_s
        copied._ends, copied._taken = [*self._ends], self._taken
        return copied

    def begin(self, seconds: float, host: float, gpu: float | None) -> None:
        """Start a collective that the host issues now.

        `gpu` is when its input is ready; None if it was ready at the GPU's last wait.
        """
        last = self._ends[-1] if self._ends else 0.0
        self._ends.append(max(last, host, self._taken if gpu is None else gpu) + seconds)
        self.busy_s += seconds

    def wait(self, num_pending: int, gpu: float) -> float:
        """Let the GPU wait for all but the last `num_pending` collectives; return its clock."""
        done = self._ends[-1 - num_pending] if len(self._ends) > num_pending else gpu
        self.waited_s += max(done - gpu, 0.0)
        self._taken = max(gpu, done)
        return self._taken


class Clocks:
    """Seconds since the step began. The GPU's clock is never behind the host's."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0
        self.bus, self.link = Bus(), LinkClock()

    def copy(self) -> Clocks:
        copied = Clocks()
        copied.host, copied.gpu = self.host, self.gpu
        copied.bus, copied.link = self.bus.copy(), self.link.copy()
        return copied

    def end(self) -> float:
        """Return when everything is done, including the last copies."""
        late_s = self.bus.now - self.gpu
        if late_s > 0:
            self.bus.waited_s += late_s
            self.gpu = self.bus.now
        return self.gpu


class _Stretches(NamedTuple):
    """Columns for all stretches: each is a run of GPU kernels or one op off the GPU.

    There is one list per column, because there are thousands of stretches and an object for each
    would take longer than simulating them.
    """

    beside: Sequence[Lane | None]  # ops off the GPU
    is_waited_for: Sequence[bool]


@dataclass(frozen=True, eq=False)
class Order:
    """Ops in order, as indices of kernels; `phase` has a number for each op's phase."""

    lanes: Sequence[Lane]
    op: Numbers
    phase: Numbers

    @functools.cached_property
    def _starts(self) -> Numbers:
        """Return where stretches begin: at a phase, after a wait, and around ops off the GPU."""
        import numpy as np

        is_gpus = np.array([lane.is_gpus for lane in self.lanes], dtype=bool)[self.op]
        waits = np.array([lane.is_waited_for for lane in self.lanes], dtype=bool)[self.op]
        begins = np.ones(len(self.op), dtype=bool)
        begins[1:] = ~is_gpus[1:] | ~is_gpus[:-1] | waits[:-1] | (self.phase[1:] != self.phase[:-1])
        return np.flatnonzero(begins)

    @functools.cached_property
    def _stretches(self) -> _Stretches:
        import numpy as np

        lasts = np.append(self._starts[1:], len(self.op)) - 1
        beside = [None if lane.is_gpus else lane for lane in self.lanes]
        return _Stretches(
            [beside[first] for first in self.op[self._starts].tolist()],
            [self.lanes[last].is_waited_for for last in self.op[lasts].tolist()],
        )

    def paced(self, seconds: Seconds, host_s: Seconds) -> Paced:
        """Return the order with the seconds of each kernel, and of the host to issue it."""
        import numpy as np

        if not len(self.op):
            return Paced(_Stretches((), ()), (), (), ())
        taken, issuing = seconds[self.op], host_s[self.op]
        ended, issued = np.cumsum(taken), np.cumsum(issuing)
        starts = self._starts
        before, issued_before = ended[starts] - taken[starts], issued[starts] - issuing[starts]
        after, issued_after = (
            np.append(befores[1:], last[-1])
            for befores, last in ((before, ended), (issued_before, issued))
        )
        latest = np.maximum.reduceat(issued - ended + taken, starts)
        return Paced(
            self._stretches,
            (issued_after - issued_before).tolist(),
            (after - before).tolist(),
            (latest - issued_before + after).tolist(),
        )


@dataclass(frozen=True, eq=False)
class Paced:
    """An order with times: of each stretch the host's and the GPU's sum, and the earliest end."""

    stretches: _Stretches
    issuing: Sequence[float]
    sums: Sequence[float]
    ends: Sequence[float]

    def run(self, clocks: Clocks) -> None:
        """Advance the clocks by the whole order: a hot loop, with calls only off the GPU."""
        host, gpu = clocks.host, clocks.gpu
        for beside, is_waited_for, issuing_s, sum_s, end_s in zip(
            self.stretches.beside,
            self.stretches.is_waited_for,
            self.issuing,
            self.sums,
            self.ends,
            strict=True,
        ):
            if beside is not None:
                host, gpu = _run_off_gpu(beside, sum_s, clocks, host, gpu, issuing_s)
                continue
            after_gpu, after_host = gpu + sum_s, host + end_s
            gpu = after_host if after_host > after_gpu else after_gpu  # noqa: FURB136 - no call
            host = gpu if is_waited_for else host + issuing_s
        clocks.host, clocks.gpu = host, gpu


def _run_off_gpu(
    lane: Lane, seconds: float, clocks: Clocks, host: float, gpu: float, host_s: float
) -> tuple[float, float]:
    """Run an op on the bus, the host or the link -> the clocks of host and GPU after it."""
    if lane.role == "wait":
        return host, clocks.link.wait(lane.num_pending, gpu)
    if lane.role != "kernel":
        clocks.link.begin(seconds, host, None if lane.role == "gather" else gpu)
        return host, gpu
    return clocks.bus.run(lane.place, seconds, host + host_s, gpu)


# ---- the second micro-step, which further ones would repeat --------------------------------------
# The first one is different: it makes gradients, and the others add to them.

_OF_A_MICRO_STEP = ("input", "forward", "backward")
_TRACED = 2  # micro-steps


def second_micro_step(phases: Sequence[str], order: Numbers) -> range:
    """Return the places of its ops; empty if a step has only one micro-step.

    `phases` are those of the distinct ops, `order` has the index of each op.
    """
    import numpy as np

    is_backward, begins, is_inside = (
        np.array([phase in ones for phase in phases], dtype=bool)[order]
        for ones in (("backward",), ("input", "forward"), _OF_A_MICRO_STEP)
    )
    starts = np.flatnonzero(is_backward[:-1] & begins[1:])
    if not len(starts):
        return range(len(order), len(order))
    begin = int(starts[0]) + 1
    ends = np.flatnonzero(~is_inside[begin:])
    return range(begin, begin + int(ends[0]) if len(ends) else len(order))


def parts_of_work(work: Work, num_micro_steps: int | None) -> list[tuple[Numbers, int]]:
    """Return runs of ops and their repeats: as traced, or with more micro-steps."""
    if num_micro_steps is None or num_micro_steps <= _TRACED:
        return [(work.order, 1)]
    second = second_micro_step([op.phase for op in work.kernels], work.order)
    repeated = middle_micro_step(
        [op.name for op in work.kernels],
        work.order[: second.start],
        work.order[second.start : second.stop],
    )
    return [
        (work.order[: second.stop], 1),
        (repeated, num_micro_steps - _TRACED),
        (work.order[second.stop :], 1),
    ]


def middle_micro_step(names: Sequence[str], first: Numbers, last: Numbers) -> Numbers:
    """Return the ops of a micro-step that is neither the first nor the last of its step.

    If nothing is sent in the first one, gradients are sent only after the last: DDP's no_sync.
    """
    import numpy as np

    sends = np.array([name in COMMUNICATION for name in names], dtype=bool)
    if sends[first].any() or not sends[last].any():
        return last
    waits = np.array([name == "wait" for name in names], dtype=bool)
    kept: Numbers = last[~(sends | waits)[last]]
    return kept


# In the study behind the likely pace, ratios between steps of one model were off by 7 % on average
# and 11 % at worst, but by up to 50 % if one of the two is launch-bound.
RATIO_OFF = 0.11


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Times of kernels, of the host and of what is beside the GPU, as ratios of the likely ones."""

    kernels: float = 1.0
    host: float = 1.0
    beside: float = 1.0  # bus, host memory and links


# The ends of the range, from `python -m accuracy.time_ranges`: about the quantiles to the power of
# 1.25 where the host is slow, and of 1.5 to 1.9 at the other ends. Nine of ten published steps of
# each source in sample lie in it, but for parts of a step below two milliseconds. A source that is
# left out is covered less, above all the one with the fastest host. beside: pinned copies and
# links, judgement.
LIKELY = Pace()
BEST = Pace(kernels=0.80, host=0.55, beside=0.7)
WORST = Pace(kernels=1.60, host=2.2, beside=2.0)
# Two steps of one model on one machine have the same host and the same bus, whatever their pace is.
# Kernels stay as they are: only the pace of the others relative to theirs moves a ratio of steps.
SHARED = (
    LIKELY,
    Pace(host=BEST.host),
    Pace(host=WORST.host),
    Pace(beside=BEST.beside),
    Pace(beside=WORST.beside),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long a training step takes, and why."""

    step_s: float
    gpu_busy_s: float
    host_s: float  # host time to issue all ops
    bound_by: Bound  # what takes most of the step
    low_s: float
    high_s: float
    waited_s: float = 0.0  # for communication that no kernel hides


def estimate(
    ops: Sequence[Op] | Work,
    model: GpuModel,
    *,
    matmul_precision: MatmulPrecision = "fp32",
    links: Links = NO_LINKS,
    num_micro_steps: int | None = None,
    best: Pace | None = None,
    worst: Pace | None = None,
) -> StepTime | None:
    """Return the time of a step with these ops; None if a needed rate is unknown.

    If the ops are those of two micro-steps, `num_micro_steps` may be larger. `best` and `worst`
    are the ends of the range, for whoever derives them.
    """
    work = ops if isinstance(ops, Work) else work_of(ops)
    rates = Rates(model, matmul_precision, links)
    if not work.kernels:
        return None
    priced = Prices(rates).of(work.kernels)
    if priced is None:
        return None
    step = _Step(priced, sizes_of(work.kernels), _parts(work, priced, num_micro_steps))
    clocks = step.simulate(LIKELY)
    busy_s = step.busy(clocks)
    return StepTime(
        step_s=clocks.gpu,
        gpu_busy_s=sum(busy_s.values()) - busy_s.get("communication", 0.0),
        host_s=float((priced.host_s * step.counts).sum()),
        bound_by=_bound_by(busy_s, clocks),
        low_s=step.simulate(best or BEST).gpu,
        high_s=step.simulate(worst or WORST).gpu,
        waited_s=busy_s.get("communication", 0.0),
    )


def anchored(predicted: StepTime, reference: StepTime, measured_s: float) -> StepTime:
    """Scale a prediction by a measured step of the same kind.

    `reference` is the prediction of the measured step. The same kind means the same model, GPU and
    software, and the same bottleneck. If the bottleneck differs, the bounds stay as wide as they
    were.
    """
    if not measured_s > 0 or not reference.step_s > 0:
        raise UsageError(
            "a step cannot be held to one that took no time",
            because=f"measured {measured_s} s, predicted {reference.step_s} s",
            attempt="measuring the mean of some steps after the first",
        )
    factor = measured_s / reference.step_s
    step_s = predicted.step_s * factor
    low_s, high_s = step_s * (1 - RATIO_OFF), step_s * (1 + RATIO_OFF)
    if predicted.bound_by != reference.bound_by:
        low_s, high_s = min(low_s, predicted.low_s), max(high_s, predicted.high_s)
    return replace(
        predicted,
        step_s=step_s,
        gpu_busy_s=predicted.gpu_busy_s * factor,
        host_s=predicted.host_s * factor,
        low_s=low_s,
        high_s=high_s,
        waited_s=predicted.waited_s * factor,
    )


# ---- one step


@dataclass(frozen=True, eq=False)
class _Step:
    """The priced kernels of a step, and the order and repeats of its parts."""

    priced: Priced
    sizes: Sizes
    parts: Sequence[tuple[Order, int]]

    @functools.cached_property
    def seconds(self) -> Seconds:
        """Return the seconds of each kernel."""
        return self.priced.seconds(self.sizes)

    @functools.cached_property
    def counts(self) -> Numbers:
        """Return how often each kernel runs."""
        import numpy as np

        counts = np.zeros(len(self.priced.lanes), dtype=np.int64)
        for order, times in self.parts:
            counts += np.bincount(order.op, minlength=len(counts)) * times
        return counts

    def simulate(self, pace: Pace) -> Clocks:
        """Return the clocks after the whole step."""
        seconds = self.seconds * _ratios(self.priced.lanes, pace)
        host_s = self.priced.host_s * pace.host
        clocks = Clocks()
        for order, repeats in self.parts:
            paced = order.paced(seconds, host_s)
            for _ in range(repeats):
                paced.run(clocks)
        clocks.end()
        return clocks

    def busy(self, clocks: Clocks) -> dict[Bound, float]:
        """Return the GPU's seconds by what bounds them."""
        busy: dict[Bound, float] = {}
        taken_s = (self.seconds * self.counts).tolist()
        bounds = self.priced.bounds(self.sizes)
        for lane, bound, kernel_s in zip(self.priced.lanes, bounds, taken_s, strict=True):
            if lane.is_gpus:
                busy[bound] = busy.get(bound, 0.0) + kernel_s
        if clocks.link.busy_s:
            sent_s = busy.get("communication", 0.0)
            busy["communication"] = sent_s + clocks.link.waited_s
        return busy


def _ratios(lanes: Sequence[Lane], pace: Pace) -> Seconds:
    """Return what each kernel takes at a pace, as a ratio of what it likely takes."""
    import numpy as np

    is_kernel = np.array([lane.is_gpus and not lane.is_sent for lane in lanes], dtype=bool)
    return np.where(is_kernel, pace.kernels, pace.beside)


def _parts(work: Work, priced: Priced, num_micro_steps: int | None) -> list[tuple[Order, int]]:
    import numpy as np

    codes = np.array([PHASES.index(op.phase) for op in work.kernels], dtype=np.int64)
    return [
        (Order(priced.lanes, numbers, codes[numbers]), repeats)
        for numbers, repeats in parts_of_work(work, num_micro_steps)
    ]


def _bound_by(busy_s: Mapping[Bound, float], clocks: Clocks) -> Bound:
    """Return what takes most of the step; idle time counts as launch time."""
    waited_s = clocks.bus.waited_s
    idle_s = clocks.gpu - sum(busy_s.values()) - waited_s
    shares = {**busy_s, "host and bus": waited_s}
    shares["kernel launches"] = shares.get("kernel launches", 0.0) + idle_s
    return max(shares, key=lambda bound: shares[bound])


# ---- the seconds of any variant, from the footprints of its parts -------------------------------
# Gives the same result as `estimate` at any micro-batch and accumulation, for a planner that asks
# hundreds of times. Each footprint is priced once, its micro-steps are simulated once per
# micro-batch, and the optimizer follows the rest. Each micro-step after the third takes as long as
# the third.

_SIMULATED = 3  # micro-steps


def prices_on(
    model: GpuModel,
    matmul_precision: MatmulPrecision = "fp32",
    links: Links = NO_LINKS,
) -> Prices:
    """Return what kernels take on one of these GPUs, joined by these links."""
    return Prices(Rates(model, matmul_precision, links))


@dataclass(frozen=True, eq=False)
class PricedFootprint:
    """The work of a footprint on one GPU: its kernels' seconds at any micro-batch."""

    footprint: Footprint
    prices: Prices
    _optimizer_steps: dict[Pace, Paced] = field(default_factory=dict)

    @functools.cached_property
    def _kernels(self) -> Priced | None:
        return self.prices.of([kernel.at(1) for kernel in self.footprint.kernels])

    @property
    def is_known(self) -> bool:
        return self._kernels is not None

    @functools.cached_property
    def _lines(self) -> tuple[Sizes, Sizes]:
        """Return the sizes of no example, and what each example adds."""
        fixed, one = (
            sizes_of([kernel.at(examples) for kernel in self.footprint.kernels])
            for examples in (0, 1)
        )
        return fixed, Sizes(*(more - less for less, more in zip(fixed, one, strict=True)))

    def seconds(self, micro_batch: int) -> Seconds:
        """Return the seconds of each kernel at a micro-batch."""
        import numpy as np

        if self._kernels is None:
            return np.zeros(len(self.footprint.kernels), dtype=np.float64)
        return self._kernels.seconds(
            Sizes(*(less + more * micro_batch for less, more in zip(*self._lines, strict=True)))
        )

    @functools.cached_property
    def host_s(self) -> Seconds:
        """Return the host's seconds to issue each kernel."""
        import numpy as np

        kernels = self._kernels
        return np.zeros(len(self.footprint.kernels)) if kernels is None else kernels.host_s

    def paced(self, micro_batch: int, pace: Pace) -> tuple[Seconds, Seconds]:
        """Return the seconds of each kernel at a micro-batch and a pace, and the host's."""
        seconds = self.seconds(micro_batch)
        if pace == LIKELY or self._kernels is None:
            return seconds, self.host_s
        return seconds * _ratios(self._kernels.lanes, pace), self.host_s * pace.host

    def order(self, op: Numbers) -> Order:
        import numpy as np

        lanes = () if self._kernels is None else self._kernels.lanes
        return Order(lanes, op, np.zeros(len(op), dtype=np.int64))

    @functools.cached_property
    def is_counted(self) -> Flags:
        """Return which kernels count: without a collective there is nothing to wait for."""
        import numpy as np

        names = [kernel.name for kernel in self.footprint.kernels]
        sends = any(name in COMMUNICATION for name in names)
        return np.array([sends or name != "wait" for name in names], dtype=bool)

    def optimizer_step(self, pace: Pace = LIKELY) -> Paced:
        """Return the optimizer's own part of a step."""
        if pace not in self._optimizer_steps:
            order = self.order(self.footprint.op[self.footprint.is_op_of_step])
            self._optimizer_steps[pace] = order.paced(*self.paced(0, pace))
        return self._optimizer_steps[pace]


@dataclass(frozen=True, eq=False)
class MicroSteps:
    """A step without its optimizer step: the clocks after any number of micro-steps."""

    priced: PricedFootprint
    has_step: bool = False  # the optimizer runs in backward, so all ops belong here
    is_one: bool = False  # even if it runs backward several times
    _known: dict[tuple[int, int, Pace], Clocks] = field(default_factory=dict)

    def clocks(self, micro_batch: int, num: int, pace: Pace = LIKELY) -> Clocks:
        """Return the clocks after `num` micro-steps; the caller may advance them."""
        return self._finished(micro_batch, num, pace).copy()

    def one_more_s(self, micro_batch: int, num: int, pace: Pace = LIKELY) -> float:
        """Return how long the last of `num` micro-steps takes."""
        before = self._finished(micro_batch, num - 1, pace)
        return self._finished(micro_batch, num, pace).gpu - before.gpu

    def _finished(self, micro_batch: int, num: int, pace: Pace) -> Clocks:
        key = micro_batch, num, pace
        if key not in self._known:
            first, middle, last, after = self._parts
            in_order = [first, after] if num == 1 else [first, *[middle] * (num - 2), last, after]
            (seconds, host_s), clocks = self.priced.paced(micro_batch, pace), Clocks()
            for part in in_order:
                part.paced(seconds, host_s).run(clocks)
            self._known[key] = clocks
        return self._known[key]

    @functools.cached_property
    def _parts(self) -> tuple[Order, ...]:
        """Return the first micro-step, a middle one, the last, and what comes after."""
        kernels = self.priced.footprint.kernels
        op = self.priced.footprint.op
        if not self.has_step:
            op = op[~self.priced.footprint.is_op_of_step]
        op = op[self.priced.is_counted[op]]
        second = second_micro_step([kernel.phase for kernel in kernels], op)
        if self.is_one:
            second = range(len(op), len(op))
        first, last, after = op[: second.start], op[second.start : second.stop], op[second.stop :]
        middle = middle_micro_step([kernel.name for kernel in kernels], first, last)
        return tuple(self.priced.order(part) for part in (first, middle, last, after))


def step_seconds(
    micro_steps: MicroSteps,
    step: PricedFootprint | None,
    micro_batch: int,
    accumulation: int,
    pace: Pace = LIKELY,
) -> float | None:
    """Return the seconds of one optimizer step; None if a needed rate is unknown.

    `step` is None if the optimizer runs in backward or is among the micro-steps.
    """
    if not micro_steps.priced.is_known or (step is not None and not step.is_known):
        return None
    num_simulated = min(accumulation, _SIMULATED)
    clocks = micro_steps.clocks(micro_batch, num_simulated, pace)
    more_s = 0.0
    if accumulation > num_simulated:  # from here on all take equally long
        one_more_s = micro_steps.one_more_s(micro_batch, num_simulated, pace)
        more_s = (accumulation - num_simulated) * one_more_s
    if step is not None:
        step.optimizer_step(pace).run(clocks)
    return clocks.end() + more_s
