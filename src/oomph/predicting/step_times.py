"""A footprint, a GPU -> the seconds of a step at any micro-batch and accumulation, at once.

The same two clocks as `speed.estimate`, for a planner that asks hundreds of times: the GPU ends
when the op that it waited for longest, and all after it, are done, which is a maximum over running
sums. Each micro-step after the third takes what the third took. Where something goes over the bus
or between GPUs there are more clocks, and it is `speed.estimate` itself that answers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oomph.predicting.communication import COMMUNICATION
from oomph.predicting.footprint import Footprint
from oomph.predicting.kernels import WAITED_FOR, is_beside_the_gpu, kernel_of
from oomph.predicting.micro_steps import second_micro_step
from oomph.predicting.paces import LIKELY
from oomph.predicting.rates import MatmulPrecision, Rates
from oomph.predicting.speed import likely_seconds
from oomph.records.catalog import GpuModel

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Seconds = NDArray[np.float64]

_SIMULATED = 3  # micro-steps


@dataclass(frozen=True, eq=False)
class StepTimes:
    """The time of one way to train on one GPU."""

    footprint: Footprint
    model: GpuModel
    matmul_precision: MatmulPrecision = "fp32"
    num_gpus: int = 1

    def seconds(self, micro_batch: int, accumulation: int) -> float | None:
        """Of one optimizer step; None if a rate is needed that nobody knows."""
        simulated = self._simulated(micro_batch, min(accumulation, _SIMULATED))
        if simulated is None or accumulation <= _SIMULATED:
            return simulated
        one_less = self._simulated(micro_batch, _SIMULATED - 1) or 0.0
        return simulated + (accumulation - _SIMULATED) * (simulated - one_less)

    def _simulated(self, micro_batch: int, num_micro_steps: int) -> float | None:
        if self.has_other_clocks:
            return self._by_all_clocks(micro_batch, num_micro_steps)
        times = self._times(micro_batch)
        if times is None:
            return None
        order = self._orders[num_micro_steps - 1]
        return _wind(times[order], self._is_waited_for[order])

    def _by_all_clocks(self, micro_batch: int, num_micro_steps: int) -> float | None:
        """Where something goes over a bus or between GPUs, beside what the GPU does."""
        kernels = [kernel.at(micro_batch) for kernel in self.footprint.kernels]
        ops = [kernels[number] for number in self._orders[num_micro_steps - 1]]
        return likely_seconds(ops, self.model, self.matmul_precision, self.num_gpus)

    @functools.cached_property
    def has_other_clocks(self) -> bool:
        return any(is_beside_the_gpu(kernel.name) for kernel in self.footprint.kernels)

    def _times(self, micro_batch: int) -> Seconds | None:
        """Of each different kernel: its arithmetic, its traffic, or the least that one takes."""
        import numpy as np

        if self._prices is None:
            return None
        flops, moved, runs = self._prices
        work = np.maximum(flops[0] + flops[1] * micro_batch, moved[0] + moved[1] * micro_batch)
        times: Seconds = np.maximum(work, LIKELY.kernel_s) * runs
        return times

    @functools.cached_property
    def _prices(self) -> tuple[Seconds, Seconds, Seconds] | None:
        """Seconds of arithmetic and traffic, fixed and per example, and whether it runs at all."""
        import numpy as np

        bandwidth = self.model.memory_bandwidth_bytes_per_s
        if not bandwidth:
            return None
        rates = Rates(self.model, self.matmul_precision)
        rows = []
        for kernel in self.footprint.kernels:
            one = kernel._replace(fixed_flops=1, grown_flops=0, fixed_moved_bytes=1).at(0)
            has_flops = kernel.fixed_flops or kernel.grown_flops
            priced = kernel_of(one if has_flops else replace(one, flops=0), rates, bandwidth)
            if priced is None:
                return None
            flop_s, byte_s = priced.unit_seconds(LIKELY)
            rows.append(
                (
                    kernel.fixed_flops * flop_s,
                    kernel.grown_flops * flop_s,
                    kernel.fixed_moved_bytes * byte_s,
                    kernel.grown_moved_bytes * byte_s,
                    float(priced.runs),
                )
            )
        columns = np.array(rows, dtype=np.float64).reshape(-1, 5).T
        return columns[:2], columns[2:4], columns[4]

    @functools.cached_property
    def _orders(self) -> tuple[Numbers, ...]:
        """The ops of a step with 1, 2 and 3 micro-steps."""
        import numpy as np

        op = self.footprint.op
        second = second_micro_step([self.footprint.kernels[number].phase for number in op])
        before, last, after = np.split(op, [second.start, second.stop])
        between = last
        if not self._sends[before].any():  # only after the last micro-step: DDP's no_sync
            between = last[~self._sends[last]]
        return (
            np.concatenate([before, after]),
            np.concatenate([before, last, after]),
            np.concatenate([before, between, last, after]),
        )

    @functools.cached_property
    def _sends(self) -> NDArray[np.bool_]:
        import numpy as np

        names = (*COMMUNICATION, "wait")
        return np.array([kernel.name in names for kernel in self.footprint.kernels], dtype=bool)

    @functools.cached_property
    def _is_waited_for(self) -> NDArray[np.bool_]:
        import numpy as np

        return np.array([kernel.name in WAITED_FOR for kernel in self.footprint.kernels])


def _wind(seconds: Seconds, is_waited_for: NDArray[np.bool_]) -> float:
    """The end of the last op, for both clocks at 0 when the first is issued."""
    import numpy as np

    waits = np.flatnonzero(is_waited_for)
    total_s = 0.0
    for part in np.split(seconds, waits + 1):  # the host goes on when the GPU is done
        if len(part):
            issued = np.arange(1, len(part) + 1) * LIKELY.host_s
            before = np.concatenate([[0.0], np.cumsum(part)[:-1]])
            total_s += float((issued - before).max() + part.sum())
    return total_s
