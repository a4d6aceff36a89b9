"""Footprints of forward and backward and of an optimizer's step, a GPU -> the seconds of a step.

At any micro-batch and accumulation, as `speed.estimate` has it, for a planner that asks hundreds of
times: each footprint is priced once, each of its parts is wound once at each micro-batch, and what
optimizers do comes after all the rest. Each micro-step after the third takes what the third took.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from oomph.predicting.communication import COMMUNICATION, link_between
from oomph.predicting.footprint import Footprint
from oomph.predicting.kernels import PricedKernel, kernel_of
from oomph.predicting.micro_steps import between, second_micro_step
from oomph.predicting.paces import LIKELY
from oomph.predicting.rates import MatmulPrecision, Rates
from oomph.predicting.winding import Clocks, Order, Paced
from oomph.records.catalog import GpuModel
from oomph.records.trace import Op

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Seconds = NDArray[np.float64]

_SIMULATED = 3  # micro-steps
_GIGA = 10**9  # bytes or operations: enough for a difference to be exact


class _UnitPrice(NamedTuple):
    """Of a kind of kernel, at the likely pace."""

    kernel: PricedKernel
    flop_s: float
    byte_s: float
    least_s: float  # what one takes, however little it does
    fixed_s: float  # that comes on top, as for a collective


class Prices:
    """What kernels take on a GPU, each kind found out once."""

    def __init__(
        self, model: GpuModel, matmul_precision: MatmulPrecision = "fp32", num_gpus: int = 1
    ) -> None:
        link = link_between(model, num_gpus) if num_gpus > 1 else None
        self._rates = Rates(model, matmul_precision, link)
        self._known: dict[tuple[str, str, bool, int], _UnitPrice | None] = {}

    def of(self, name: str, dtype: str, *, has_flops: bool, num_pending: int) -> _UnitPrice | None:
        """None if a rate is needed that nobody knows."""
        key = name, dtype, has_flops, num_pending
        if key not in self._known:
            self._known[key] = self._found(*key)
        return self._known[key]

    def _found(self, name: str, dtype: str, has_flops: bool, num_pending: int) -> _UnitPrice | None:
        bandwidth = self._rates.bandwidth_bytes_per_s
        if not bandwidth:
            return None
        nothing, giga = (
            kernel_of(
                Op(
                    name=name,
                    phase="forward",
                    flops=amount * has_flops,
                    moved_bytes=amount,
                    dtype=dtype,
                    num_pending=num_pending,
                ),
                self._rates,
                bandwidth,
            )
            for amount in (0, _GIGA)
        )
        if nothing is None or giga is None:
            return None
        if not giga.is_gpus:
            fixed_s = nothing.at(LIKELY)[0]
            return _UnitPrice(giga, 0.0, (giga.at(LIKELY)[0] - fixed_s) / _GIGA, 0.0, fixed_s)
        if not giga.runs:
            return _UnitPrice(giga, 0.0, 0.0, 0.0, 0.0)
        flop_s, byte_s = (seconds / _GIGA for seconds in giga.unit_seconds(LIKELY))
        return _UnitPrice(giga, flop_s, byte_s, LIKELY.kernel_s, 0.0)


@dataclass(frozen=True, eq=False)
class PricedFootprint:
    """The work of a footprint on one GPU: its kernels' seconds at any micro-batch."""

    footprint: Footprint
    prices: Prices

    @functools.cached_property
    def _of_kernels(self) -> tuple[_UnitPrice, ...] | None:
        found = [
            self.prices.of(
                kernel.name,
                kernel.dtype,
                has_flops=bool(kernel.fixed_flops or kernel.grown_flops),
                num_pending=kernel.num_pending,
            )
            for kernel in self.footprint.kernels
        ]
        known = tuple(price for price in found if price is not None)
        return known if len(known) == len(found) else None

    @property
    def is_known(self) -> bool:
        return self._of_kernels is not None

    @functools.cached_property
    def _columns(self) -> Seconds:
        """Seconds of arithmetic and of traffic, fixed and per example; least; on top."""
        import numpy as np

        rows = [
            (
                kernel.fixed_flops * price.flop_s,
                kernel.grown_flops * price.flop_s,
                kernel.fixed_moved_bytes * price.byte_s,
                kernel.grown_moved_bytes * price.byte_s,
                price.least_s,
                price.fixed_s,
            )
            for kernel, price in zip(self.footprint.kernels, self._of_kernels or (), strict=True)
        ]
        columns: Seconds = np.array(rows, dtype=np.float64).reshape(-1, 6).T
        return columns

    def seconds(self, micro_batch: int) -> Seconds:
        import numpy as np

        flops, more_flops, moved, more_moved, least, on_top = self._columns
        work = np.maximum(flops + more_flops * micro_batch, moved + more_moved * micro_batch)
        seconds: Seconds = np.maximum(work, least) + on_top
        return seconds

    def order(self, op: Numbers) -> Order:
        import numpy as np

        kernels = [price.kernel for price in self._of_kernels or ()]
        return Order(kernels, op, np.zeros(len(op), dtype=np.int64), ("",))

    @functools.cached_property
    def is_of_any_account(self) -> NDArray[np.bool_]:
        """Which kernels are: without a collective there is none to wait for."""
        import numpy as np

        names = [kernel.name for kernel in self.footprint.kernels]
        sends = any(name in COMMUNICATION for name in names)
        return np.array([sends or name != "wait" for name in names], dtype=bool)

    @functools.cached_property
    def is_of_step(self) -> NDArray[np.bool_]:
        """Which ops are of the optimizer's step."""
        import numpy as np

        of_step = np.array([k.phase == "step" for k in self.footprint.kernels], dtype=bool)
        found: NDArray[np.bool_] = of_step[self.footprint.op]
        return found


@dataclass(frozen=True, eq=False)
class MicroSteps:
    """All of a step but the optimizer's own: its clocks after any number of micro-steps."""

    priced: PricedFootprint
    has_step: bool = False  # the optimizer runs in backward: all ops belong here
    is_one: bool = False  # however often it goes backward
    _known: dict[tuple[int, int], Clocks] = field(default_factory=dict)
    _unfinished: dict[tuple[int, int], Clocks] = field(default_factory=dict)
    _wound: dict[int, tuple[Paced, ...]] = field(default_factory=dict)

    def clocks(self, micro_batch: int, num: int) -> Clocks:
        """The clocks after so many micro-steps, free to be wound on."""
        return self._finished(micro_batch, num).copy()

    def one_more_s(self, micro_batch: int, num: int) -> float:
        """What the last of so many micro-steps takes."""
        return self._finished(micro_batch, num).gpu - self._finished(micro_batch, num - 1).gpu

    def _finished(self, micro_batch: int, num: int) -> Clocks:
        key = micro_batch, num
        if key not in self._known:
            clocks = self._all_but_after(micro_batch, num)
            self._paced(micro_batch)[-1].wind(clocks)
            self._known[key] = clocks
        return self._known[key]

    def _all_but_after(self, micro_batch: int, num: int) -> Clocks:
        _, middle, last, _ = self._paced(micro_batch)
        if num == 1 or middle is last:
            return self._unfinished_after(micro_batch, num)
        clocks = self._unfinished_after(micro_batch, num - 1)
        last.wind(clocks)
        return clocks

    def _unfinished_after(self, micro_batch: int, num: int) -> Clocks:
        """After so many micro-steps of which none is the last that differs from the others."""
        key = micro_batch, num
        if key not in self._unfinished:
            first, middle, _, _ = self._paced(micro_batch)
            clocks = Clocks() if num == 1 else self._unfinished_after(micro_batch, num - 1)
            (first if num == 1 else middle).wind(clocks)
            self._unfinished[key] = clocks
        return self._unfinished[key].copy()

    def _paced(self, micro_batch: int) -> tuple[Paced, ...]:
        if micro_batch not in self._wound:
            seconds = self.priced.seconds(micro_batch)
            paced = {id(part): part.paced(seconds, LIKELY) for part in self._parts}
            self._wound[micro_batch] = tuple(paced[id(part)] for part in self._parts)
        return self._wound[micro_batch]

    @functools.cached_property
    def _parts(self) -> tuple[Order, ...]:
        """The first micro-step, one in the middle, the last, and what comes after."""
        kernels = self.priced.footprint.kernels
        op = self.priced.footprint.op
        if not self.has_step:
            op = op[~self.priced.is_of_step]
        op = op[self.priced.is_of_any_account[op]]
        second = second_micro_step([kernel.phase for kernel in kernels], op)
        if self.is_one:
            second = range(len(op), len(op))
        first, last, after = op[: second.start], op[second.start : second.stop], op[second.stop :]
        middle = between([kernel.name for kernel in kernels], first, last)
        orders = {id(part): self.priced.order(part) for part in (first, middle, last, after)}
        return tuple(orders[id(part)] for part in (first, middle, last, after))


@dataclass(frozen=True, eq=False)
class OptimizerStep:
    """The optimizer's own part of a step."""

    priced: PricedFootprint

    @functools.cached_property
    def paced(self) -> Paced:
        order = self.priced.order(self.priced.footprint.op[self.priced.is_of_step])
        return order.paced(self.priced.seconds(0), LIKELY)


@dataclass(frozen=True, eq=False)
class StepTimes:
    """The time of one way to train on one GPU."""

    micro_steps: MicroSteps
    step: OptimizerStep | None  # None: there is none beside

    def seconds(self, micro_batch: int, accumulation: int) -> float | None:
        """Of one optimizer step; None if a rate is needed that nobody knows."""
        is_known = self.step is None or self.step.priced.is_known
        if not is_known or not self.micro_steps.priced.is_known:
            return None
        num_simulated = min(accumulation, _SIMULATED)
        clocks = self.micro_steps.clocks(micro_batch, num_simulated)
        more_s = 0.0
        if accumulation > num_simulated:  # all is in its stride
            one_more_s = self.micro_steps.one_more_s(micro_batch, num_simulated)
            more_s = (accumulation - num_simulated) * one_more_s
        if self.step is not None:
            self.step.paced.wind(clocks)
        return clocks.end() + more_s
