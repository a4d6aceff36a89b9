"""Two traces -> every micro-batch size from the smaller one up.

Every allocation is c + k x micro-batch bytes, with the same order of requests and frees; two traces
give c and k. This does not hold for a micro-batch of 1, where torch drops dimensions. A model that
is not affine is refused and has to be traced at each size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from oomph.records.trace import Allocation, Convolution, Op, Product, Trace


class NotAffine(Exception):
    """The two traces differ in structure, or their sizes are not on a line."""


class OpSlope(NamedTuple):
    """An op's growth per example."""

    flops: int
    moved_bytes: int
    product: tuple[int, int, int, int] = (0, 0, 0, 0)  # the edges: num, rows, columns, depth

    def grown(self, op: Op, more: int) -> Op:
        """Return the op with `more` examples."""
        product = op.product
        if product is not None:
            product = grown_product(product, self.product, more)
        return replace(
            op,
            flops=op.flops + self.flops * more,
            moved_bytes=op.moved_bytes + self.moved_bytes * more,
            product=product,
        )


def grown_product(product: Product, slope: Sequence[int], more: int) -> Product:
    """Return a product with `more` examples, whose edges grow by `slope` per example."""
    num, rows, columns, depth = slope
    return product._replace(
        num=product.num + num * more,
        rows=product.rows + rows * more,
        columns=product.columns + columns * more,
        depth=product.depth + depth * more,
    )


@dataclass(frozen=True, slots=True)
class AffineTrace:
    """A trace as a function of the micro-batch."""

    base: Trace
    slopes: Sequence[int]  # bytes per example, of each allocation
    op_slopes: Sequence[OpSlope]
    host_slope: int = 0  # host bytes per example
    # input, weight and output bytes per example, of each convolution
    convolution_slopes: Sequence[tuple[int, int, int]] = ()

    def at(self, micro_batch: int) -> Trace:
        """Return the trace for a micro-batch."""
        more = micro_batch - self.base.micro_batch
        if more < 0:
            raise NotAffine(f"{micro_batch} is below what was traced ({self.base.micro_batch})")
        return replace(
            self.base,
            allocations=[
                replace(allocation, size_bytes=allocation.size_bytes + slope * more)
                for allocation, slope in zip(self.base.allocations, self.slopes, strict=True)
            ],
            ops=[
                slope.grown(op, more)
                for op, slope in zip(self.base.ops, self.op_slopes, strict=True)
            ],
            convolutions=tuple(
                replace(
                    each,
                    input_bytes=each.input_bytes + read * more,
                    weight_bytes=each.weight_bytes + weighed * more,
                    output_bytes=each.output_bytes + written * more,
                )
                for each, (read, weighed, written) in zip(
                    self.base.convolutions, self.convolution_slopes, strict=True
                )
            ),
            micro_batch=micro_batch,
            host_peak_bytes=self.base.host_peak_bytes + self.host_slope * more,
        )


def affine(smaller: Trace, larger: Trace) -> AffineTrace:
    """Return the line through two traces. Raises NotAffine."""
    step = larger.micro_batch - smaller.micro_batch
    ordered = with_ordered_frees(smaller.events, smaller.phase_starts)
    if ordered != with_ordered_frees(larger.events, larger.phase_starts):
        raise NotAffine("the order of allocations depends on the micro-batch")
    pairs = zip(smaller.allocations, larger.allocations, strict=True)
    slopes = [_slope(before, after, step) for before, after in pairs]
    op_slopes = _op_slopes(smaller.ops, larger.ops, step)
    host_slope = (larger.host_peak_bytes - smaller.host_peak_bytes) // step
    return AffineTrace(
        replace(smaller, events=ordered),
        slopes,
        op_slopes,
        host_slope,
        _convolution_slopes(smaller.convolutions, larger.convolutions, step),
    )


def ordered(trace: Trace) -> Trace:
    """Return the trace with its frees in a deterministic order."""
    return replace(trace, events=with_ordered_frees(trace.events, trace.phase_starts))


def with_ordered_frees(
    events: Sequence[int], phase_starts: Sequence[tuple[int, str]] = ()
) -> list[int]:
    """Sort each run of frees within a phase, because their order is arbitrary."""
    borders = {start for start, _ in phase_starts}
    ordered: list[int] = []
    run: list[int] = []
    for place, event in enumerate(events):
        if place in borders:
            ordered += sorted(run, reverse=True)
            run.clear()
        if event < 0:
            run.append(event)
        else:
            ordered += sorted(run, reverse=True)
            run.clear()
            ordered.append(event)
    return ordered + sorted(run, reverse=True)


def _slope(before: Allocation, after: Allocation, step: int) -> int:
    growth = after.size_bytes - before.size_bytes
    if before.op != after.op or growth % step or growth < 0:
        raise NotAffine(f"{before.op} takes {before.size_bytes} and {after.size_bytes} bytes")
    return growth // step


def _op_slopes(before: Sequence[Op], after: Sequence[Op], step: int) -> list[OpSlope]:
    if [op.name for op in before] != [op.name for op in after]:
        raise NotAffine("the order of kernels depends on the micro-batch")
    return [
        OpSlope(
            (b.flops - a.flops) // step,
            (b.moved_bytes - a.moved_bytes) // step,
            _product_slope(a.product, b.product, step),
        )
        for a, b in zip(before, after, strict=True)
    ]


def _product_slope(
    before: Product | None, after: Product | None, step: int
) -> tuple[int, int, int, int]:
    if before is None or after is None:
        return 0, 0, 0, 0
    return (
        (after.num - before.num) // step,
        (after.rows - before.rows) // step,
        (after.columns - before.columns) // step,
        (after.depth - before.depth) // step,
    )


def _convolution_slopes(
    before: Sequence[Convolution], after: Sequence[Convolution], step: int
) -> list[tuple[int, int, int]]:
    if [_place(each) for each in before] != [_place(each) for each in after]:
        raise NotAffine("the order of convolutions depends on the micro-batch")
    return [
        (
            (b.input_bytes - a.input_bytes) // step,
            (b.weight_bytes - a.weight_bytes) // step,  # some filters are per example
            (b.output_bytes - a.output_bytes) // step,
        )
        for a, b in zip(before, after, strict=True)
    ]


def _place(convolution: Convolution) -> tuple[int, str, str]:
    return convolution.at_event, convolution.direction, convolution.kind
