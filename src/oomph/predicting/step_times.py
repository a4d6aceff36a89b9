"""A footprint, a GPU -> the seconds of a step at any micro-batch and accumulation, at once.

The same two clocks as `speed.estimate`, for a planner that asks hundreds of times: the GPU ends
when the op that it waited for longest, and all after it, are done, which is a maximum over running
sums. Each micro-step after the third takes what the third took. Where several GPUs send beside
their kernels there is a third clock, and it is `speed.estimate` itself that answers.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.predicting.footprint import Footprint, Kernel
from oomph.predicting.micro_steps import second_micro_step
from oomph.predicting.speed import (
    LIKELY,
    WAITED_FOR,
    MatmulPrecision,
    Rates,
    estimate,
    kernel_of,
    last_micro_step,
    with_micro_steps,
)
from oomph.records.catalog import GpuModel
from oomph.records.trace import Op

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
        if self.num_gpus > 1:
            return self._on_several(micro_batch, accumulation)
        times = self._times(micro_batch)
        if times is None:
            return None
        simulated = self._wound(times, min(accumulation, _SIMULATED))
        if accumulation <= _SIMULATED:
            return simulated
        more = simulated - self._wound(times, _SIMULATED - 1)
        return simulated + (accumulation - _SIMULATED) * more

    def _on_several(self, micro_batch: int, accumulation: int) -> float | None:
        kernels = [_at(kernel, micro_batch) for kernel in self.footprint.kernels]
        ops = [kernels[number] for number in self.footprint.op]
        issued = with_micro_steps(ops, accumulation) if accumulation > 1 else last_micro_step(ops)
        found = estimate(
            issued, self.model, matmul_precision=self.matmul_precision, num_gpus=self.num_gpus
        )
        return None if found is None else found.step_s

    def _times(self, micro_batch: int) -> Seconds | None:
        """Of each different kernel."""
        import numpy as np

        bandwidth = self.model.memory_bandwidth_bytes_per_s
        if not bandwidth:
            return None
        rates = Rates(self.model, self.matmul_precision)
        found = []
        for kernel in self.footprint.kernels:
            priced = kernel_of(_at(kernel, micro_batch), rates, bandwidth)
            if priced is None:
                return None
            found.append(priced.at(LIKELY)[0])
        return np.array(found)

    def _wound(self, times: Seconds, num_micro_steps: int) -> float:
        order = self._orders[num_micro_steps - 1]
        return _wind(times[order], self._is_waited_for[order])

    @functools.cached_property
    def _orders(self) -> tuple[Numbers, ...]:
        """The ops of a step with 1, 2 and 3 micro-steps."""
        import numpy as np

        op = self.footprint.op
        second = second_micro_step([self.footprint.kernels[number].phase for number in op])
        before, again, after = np.split(op, [second.start, second.stop])
        return tuple(np.concatenate([before, *[again] * more, after]) for more in range(_SIMULATED))

    @functools.cached_property
    def _is_waited_for(self) -> NDArray[np.bool_]:
        import numpy as np

        return np.array([kernel.name in WAITED_FOR for kernel in self.footprint.kernels])


def _at(kernel: Kernel, micro_batch: int) -> Op:
    return Op(
        name=kernel.name,
        phase=kernel.phase,  # type: ignore[arg-type] # it is one
        flops=kernel.fixed_flops + kernel.grown_flops * micro_batch,
        moved_bytes=kernel.fixed_moved_bytes + kernel.grown_moved_bytes * micro_batch,
        dtype=kernel.dtype,
        num_pending=kernel.num_pending,
    )


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
