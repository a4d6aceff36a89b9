"""Two traces -> every micro-batch size from the smaller one up.

Every allocation is c + k x micro-batch bytes, with the same order of requests and frees; two traces
give c and k. This does not hold for a micro-batch of 1, where torch drops dimensions. A model that
is not affine is refused and has to be traced at each size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from oomph.records.trace import Allocation, Convolution, Op, Product, Reduction, Trace


class NotAffine(Exception):
    """The two traces differ in structure, or their sizes are not on a line."""


Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ConvolutionSlopes:
    """How much each number of a convolution grows with an example."""

    input_shape: Shape
    weight_shape: Shape  # some filters are per example
    output_shape: Shape
    groups: int

    def at(self, convolution: Convolution, more: int) -> Convolution:
        """Return the convolution for so many more examples."""
        each = convolution
        return replace(
            each,
            input_shape=_further(each.input_shape, self.input_shape, more),
            weight_shape=_further(each.weight_shape, self.weight_shape, more),
            output_shape=_further(each.output_shape, self.output_shape, more),
            groups=each.groups + self.groups * more,
        )


def _further(shape: Shape, slopes: Shape, more: int) -> Shape:
    return tuple(number + slope * more for number, slope in zip(shape, slopes, strict=True))


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
    convolution_slopes: Sequence[ConvolutionSlopes] = ()
    # outputs, inputs and contiguous values per example, of each reduction
    reduction_slopes: Mapping[int, tuple[int, int, int]] = field(default_factory=dict)

    def at(self, micro_batch: int) -> Trace:
        """Return the trace for a micro-batch."""
        more = micro_batch - self.base.micro_batch
        if more < 0:
            raise NotAffine(f"{micro_batch} is below what was traced ({self.base.micro_batch})")
        return replace(
            self.base,
            allocations=[
                replace(
                    allocation,
                    size_bytes=allocation.size_bytes + slope * more,
                    reduction=self._reduction_at(place, more),
                )
                for place, (allocation, slope) in enumerate(
                    zip(self.base.allocations, self.slopes, strict=True)
                )
            ],
            ops=[
                slope.grown(op, more)
                for op, slope in zip(self.base.ops, self.op_slopes, strict=True)
            ],
            convolutions=tuple(
                slopes.at(each, more)
                for each, slopes in zip(
                    self.base.convolutions, self.convolution_slopes, strict=True
                )
            ),
            micro_batch=micro_batch,
            host_peak_bytes=self.base.host_peak_bytes + self.host_slope * more,
        )

    def _reduction_at(self, place: int, more: int) -> Reduction | None:
        base = self.base.allocations[place].reduction
        if base is None or place not in self.reduction_slopes:
            return base
        outputs, inputs, contiguous = self.reduction_slopes[place]
        return replace(
            base,
            num_outputs=base.num_outputs + outputs * more,
            num_inputs=base.num_inputs + inputs * more,
            num_contiguous=base.num_contiguous + contiguous * more,
        )


def affine(smaller: Trace, larger: Trace) -> AffineTrace:
    """Return the line through two traces. Raises NotAffine."""
    step = larger.micro_batch - smaller.micro_batch
    ordered = _ordered_events(smaller)
    if ordered != _ordered_events(larger):
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
        _reduction_slopes(smaller.allocations, larger.allocations, step),
    )


def ordered(trace: Trace) -> Trace:
    """Return the trace with its frees in a deterministic order."""
    return replace(trace, events=_ordered_events(trace))


def _ordered_events(trace: Trace) -> list[int]:
    return with_ordered_frees(
        trace.events, [*(start for start, _ in trace.phase_starts), *trace.emptied_at]
    )


def with_ordered_frees(events: Sequence[int], borders_at: Iterable[int] = ()) -> list[int]:
    """Sort each run of frees between borders, because their order is arbitrary."""
    borders = set(borders_at)
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
) -> list[ConvolutionSlopes]:
    if [_place(each) for each in before] != [_place(each) for each in after]:
        raise NotAffine("the order of convolutions depends on the micro-batch")

    def growth(smaller: Shape, larger: Shape) -> Shape:
        return tuple((b - a) // step for a, b in zip(smaller, larger, strict=True))

    return [
        ConvolutionSlopes(
            input_shape=growth(a.input_shape, b.input_shape),
            weight_shape=growth(a.weight_shape, b.weight_shape),
            output_shape=growth(a.output_shape, b.output_shape),
            groups=(b.groups - a.groups) // step,
        )
        for a, b in zip(before, after, strict=True)
    ]


def _reduction_slopes(
    before: Sequence[Allocation], after: Sequence[Allocation], step: int
) -> dict[int, tuple[int, int, int]]:
    return {
        place: (
            (b.num_outputs - a.num_outputs) // step,
            (b.num_inputs - a.num_inputs) // step,
            (b.num_contiguous - a.num_contiguous) // step,
        )
        for place, (a, b) in enumerate(
            (one.reduction, two.reduction) for one, two in zip(before, after, strict=True)
        )
        if a is not None and b is not None
    }


def _place(convolution: Convolution) -> tuple[object, ...]:
    return (
        convolution.at_event,
        convolution.direction,
        convolution.kind,
        len(convolution.input_shape),
        convolution.is_channels_last,
    )
