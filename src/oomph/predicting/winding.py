"""Kernels in the order of their ops -> what the clocks of host, GPU, bus and link show after them.

The host issues one op after the other, the GPU runs them in that order when they have been issued.
Of a run of kernels that the GPU alone has a say in, three numbers are all that matters: how many,
how long they take together, and how long after the host began to issue them the last one ends at
the earliest. Only what goes over the bus or between GPUs is wound op by op.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from oomph.predicting.communication import LinkClock
from oomph.predicting.kernels import Place, PricedKernel
from oomph.predicting.paces import Pace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Flags = NDArray[np.bool_]
    Seconds = NDArray[np.float64]

# Tensors that wait on the GPU for their copy: training/offload_activations.py keeps so many.
_NUM_WAITING = 5


class Bus:
    """The clock of the copies between GPU and host, and of the host's work on what was copied."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waited_s = 0.0
        self._copied: list[float] = []  # when each copy to the host ends

    def copy(self) -> Bus:
        copied = Bus()
        copied.now, copied.waited_s, copied._copied = self.now, self.waited_s, [*self._copied]
        return copied

    def run(self, place: Place, seconds: float, host: float, gpu: float) -> tuple[float, float]:
        """The clocks of host and GPU after something that is not the GPU's work."""
        if place == "to host":
            before = self.now
            self.now = now = (gpu if gpu > before else before) + seconds  # noqa: FURB136 - as below
            copied = self._copied
            copied.append(now)
            if len(copied) > _NUM_WAITING:  # its memory is given back before more is taken
                return max(copied[-1 - _NUM_WAITING], host), gpu
            return host, gpu
        if place == "host":
            return max(host, self.now) + seconds, gpu
        self.now = now = (max(host, self.now)) + seconds
        if now <= gpu:
            return host, gpu
        self.waited_s += now - gpu
        return host, now


class Clocks:
    """Seconds since the step began. The GPU's clock is never behind the host's."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0
        self.bus, self.link = Bus(), LinkClock()
        self.by_phase: dict[str, float] = {}

    def copy(self) -> Clocks:
        copied = Clocks()
        copied.host, copied.gpu = self.host, self.gpu
        copied.bus, copied.link = self.bus.copy(), self.link.copy()
        copied.by_phase = {**self.by_phase}
        return copied

    def end(self) -> float:
        """When all is done, the last copies included."""
        late_s = self.bus.now - self.gpu
        if late_s > 0 and self.by_phase:
            self.by_phase[next(reversed(self.by_phase))] += late_s
            self.bus.waited_s += late_s
            self.gpu = self.bus.now
        return self.gpu


class _Stretches(NamedTuple):
    """Of each stretch, which is either a run of the GPU's kernels or one op that is not the GPU's.

    One list for each column: there are thousands of stretches, and an object for each takes longer
    than winding them.
    """

    phases: Sequence[tuple[str, int, int]]  # those of one phase that follow each other: from, to
    beside: Sequence[PricedKernel | None]  # what is not the GPU's
    is_waited_for: Sequence[bool]


@dataclass(frozen=True, eq=False)
class Order:
    """Ops in their order, as numbers of kernels; `phase` has a number for each op."""

    kernels: Sequence[PricedKernel]
    op: Numbers
    phase: Numbers
    phase_names: Sequence[str]

    @functools.cached_property
    def _starts(self) -> Numbers:
        """Where stretches begin: a phase, after a wait, and around what is not the GPU's."""
        import numpy as np

        is_gpus = np.array([kernel.is_gpus for kernel in self.kernels], dtype=bool)[self.op]
        waits = np.array([kernel.is_waited_for for kernel in self.kernels], dtype=bool)[self.op]
        begins = np.ones(len(self.op), dtype=bool)
        begins[1:] = ~is_gpus[1:] | ~is_gpus[:-1] | waits[:-1] | (self.phase[1:] != self.phase[:-1])
        return np.flatnonzero(begins)

    @functools.cached_property
    def _stretches(self) -> _Stretches:
        import numpy as np

        lasts = np.append(self._starts[1:], len(self.op)) - 1
        beside = [None if kernel.is_gpus else kernel for kernel in self.kernels]
        return _Stretches(
            self._phases(),
            [beside[first] for first in self.op[self._starts].tolist()],
            [self.kernels[last].is_waited_for for last in self.op[lasts].tolist()],
        )

    def _phases(self) -> list[tuple[str, int, int]]:
        import numpy as np

        phase = self.phase[self._starts]
        bounds = np.flatnonzero(np.diff(phase, prepend=-1, append=-1)).tolist()
        return [
            (self.phase_names[phase[begin]], begin, end)
            for begin, end in itertools.pairwise(bounds)
        ]

    def paced(self, seconds: Seconds, pace: Pace) -> Paced:
        """With the seconds of each kernel at a pace."""
        import numpy as np

        if not len(self.op):
            return Paced(_Stretches((), (), ()), (), (), (), pace)
        taken = seconds[self.op]
        ended = np.cumsum(taken)
        issued = np.arange(1, len(taken) + 1) * pace.host_s
        starts = self._starts
        before = ended[starts] - taken[starts]
        after = np.append(before[1:], ended[-1])
        latest = np.maximum.reduceat(issued - ended + taken, starts)
        counts = np.diff(np.append(starts, len(taken)))
        return Paced(
            self._stretches,
            counts.tolist(),
            (after - before).tolist(),
            (latest - starts * pace.host_s + after).tolist(),
            pace,
        )


@dataclass(frozen=True, eq=False)
class Paced:
    """An order with its times: of each stretch how many ops, their sum, and the earliest end."""

    stretches: _Stretches
    counts: Sequence[int]
    sums: Sequence[float]
    ends: Sequence[float]
    pace: Pace

    def wind(self, clocks: Clocks) -> None:
        """Let the clocks run through it."""
        for phase, begin, end in self.stretches.phases:
            began = clocks.gpu
            self._wind(clocks, begin, end)
            clocks.by_phase[phase] = clocks.by_phase.get(phase, 0.0) + clocks.gpu - began

    def _wind(self, clocks: Clocks, begin: int, end: int) -> None:
        """The inside of the hot loop: no call of a function but for what is not the GPU's."""
        host_s, host, gpu = self.pace.host_s, clocks.host, clocks.gpu
        for beside, is_waited_for, count, sum_s, end_s in zip(
            self.stretches.beside[begin:end],
            self.stretches.is_waited_for[begin:end],
            self.counts[begin:end],
            self.sums[begin:end],
            self.ends[begin:end],
            strict=True,
        ):
            if beside is not None:
                host, gpu = _wind_beside(beside, sum_s, clocks, host, gpu, host_s)
                continue
            after_gpu, after_host = gpu + sum_s, host + end_s
            gpu = after_host if after_host > after_gpu else after_gpu  # noqa: FURB136 - a call less
            host = gpu if is_waited_for else host + count * host_s
        clocks.host, clocks.gpu = host, gpu


def _wind_beside(
    kernel: PricedKernel, seconds: float, clocks: Clocks, host: float, gpu: float, host_s: float
) -> tuple[float, float]:
    """What the bus, the host or the link does: the clocks of host and GPU after it."""
    if kernel.role == "wait":
        return host, clocks.link.wait(kernel.num_pending, gpu)
    if kernel.role != "kernel":
        clocks.link.begin(seconds, host, None if kernel.role == "gather" else gpu)
        return host, gpu
    return clocks.bus.run(kernel.place, seconds, host + host_s, gpu)
