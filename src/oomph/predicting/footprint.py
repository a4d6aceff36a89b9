"""Two traces of one variant -> its memory and its work at every micro-batch, in columns.

A planner asks hundreds of times for a variant's memory at another micro-batch, with another
optimizer, with or without accumulation. Here a trace is stored as arrays, so the live bytes of
30,000 events take microseconds. They are exact for the trace and never more than the allocator
reserves: a variant whose live bytes do not fit cannot fit.
"""

from __future__ import annotations

import functools
import io
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args
from zipfile import BadZipFile

from oomph.predicting.reductions import NONE, Multiprocessors, staged_bytes
from oomph.predicting.replay import Moves, Requests
from oomph.predicting.scaling import AffineTrace, grown_product
from oomph.records.trace import Allocation, Category, Op, Phase, Product, Reduction, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Flags = NDArray[np.bool_]


CATEGORIES: tuple[Category, ...] = get_args(Category)
PHASES: tuple[Phase, ...] = get_args(Phase)
_OF_A_MICRO_STEP = ("input", "forward", "backward")


@dataclass(frozen=True, eq=False)
class Work:
    """What the ops of a step compute and move."""

    kernels: Sequence[Op]  # the distinct ops, regardless of module
    order: Numbers  # index into kernels for each op


def work_of(ops: Sequence[Op]) -> Work:
    import numpy as np

    numbers: dict[tuple[str | int | Product | None, ...], int] = {}
    kernels: list[Op] = []
    order = []
    for op in ops:
        key = (
            *(op.name, op.phase, op.dtype, op.flops, op.moved_bytes, op.num_pending, op.product),
            *(op.num_views, op.is_strided),
        )
        number = numbers.setdefault(key, len(kernels))
        if number == len(kernels):
            kernels.append(op)
        order.append(number)
    return Work(kernels, np.array(order, dtype=np.int64))


class Kernel(NamedTuple):
    """An op's flops, moved bytes and product: fixed + grown x micro-batch."""

    name: str
    phase: Phase
    dtype: str
    fixed_flops: int
    grown_flops: int
    fixed_moved_bytes: int
    grown_moved_bytes: int
    num_pending: int = 0  # for a wait: collectives that may still run
    fixed_product: Product | None = None
    grown_product: tuple[int, int, int, int] = (0, 0, 0, 0)  # num, rows, columns, depth
    num_views: int = 0
    is_strided: bool = False

    def at(self, micro_batch: int) -> Op:
        return Op(
            name=self.name,
            phase=self.phase,
            flops=self.fixed_flops + self.grown_flops * micro_batch,
            moved_bytes=self.fixed_moved_bytes + self.grown_moved_bytes * micro_batch,
            dtype=self.dtype,
            num_pending=self.num_pending,
            num_views=self.num_views,
            is_strided=self.is_strided,
            product=None
            if self.fixed_product is None
            else grown_product(self.fixed_product, self.grown_product, micro_batch),
        )


def _kernel_from(columns: Sequence[Any]) -> Kernel:
    """Read a kernel from JSON, which has lists for tuples."""
    kernel = Kernel(*columns)
    fixed, grown = kernel.fixed_product, kernel.grown_product
    return kernel._replace(
        fixed_product=None if fixed is None else Product(*fixed),
        grown_product=(grown[0], grown[1], grown[2], grown[3]),
    )


class ReductionLine(NamedTuple):
    """A reduction's shape: each number is fixed + grown x micro-batch."""

    part: Literal["staging", "semaphores"]
    element_bytes: int
    value_bytes: int
    is_along_inputs: bool
    fixed_outputs: int
    grown_outputs: int
    fixed_inputs: int
    grown_inputs: int
    fixed_contiguous: int
    grown_contiguous: int

    def at(self, examples: float) -> Reduction:
        """Return the reduction of so many examples; a fraction of a number is rounded up."""
        return Reduction(
            part=self.part,
            num_outputs=self.fixed_outputs + math.ceil(self.grown_outputs * examples),
            num_inputs=self.fixed_inputs + math.ceil(self.grown_inputs * examples),
            element_bytes=self.element_bytes,
            value_bytes=self.value_bytes,
            is_along_inputs=self.is_along_inputs,
            num_contiguous=self.fixed_contiguous + math.ceil(self.grown_contiguous * examples),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Footprint:
    """Allocations and events as columns; an allocation is fixed + grown x micro-batch bytes.

    What reductions stage depends on the card: it is in the requests to the allocator, not among the
    live bytes, which are a lower bound on every card.
    """

    fixed_bytes: Numbers  # of each allocation
    grown_bytes: Numbers
    stream: Numbers
    category: Numbers  # index into CATEGORIES
    born: Numbers  # index of its request's phase in PHASES
    label: Numbers  # index of the requesting op in names
    module: Numbers  # index into names
    is_output: Numbers  # 1: the model returned it to the training loop
    reduction: Numbers  # of an allocation that one stages: 1 + index into reductions; else 0
    event: Numbers  # i + 1 requests allocation i, -(i + 1) frees it
    phase: Numbers  # of each event
    step: Numbers  # of each event: 0 before training, then 1 and 2
    micro_step: Numbers  # of each event, in its step: 0 before the first, then 1 and 2
    kernels: tuple[Kernel, ...]  # the distinct kernels of the second step
    op: Numbers  # index into kernels for each op of the second step
    names: tuple[str, ...]
    reductions: tuple[ReductionLine, ...] = ()  # the distinct ones
    host_bytes: tuple[int, int] = (0, 0)  # of offloaded tensors: fixed, grown

    # ---- live bytes ------------------------------------------------------------------------------

    @functools.cached_property
    def _live(self) -> tuple[Numbers, Numbers]:
        """Return the live bytes after each event: the fixed part, and the part per example."""
        import numpy as np

        places, signs = np.abs(self.event) - 1, np.sign(self.event)
        fixed = np.cumsum(self.fixed_bytes[places] * signs)
        return fixed, np.cumsum(self.grown_bytes[places] * signs)

    def live_by_event(self, micro_batch: int) -> Numbers:
        fixed, grown = self._live
        return fixed + grown * micro_batch

    def examples_within(self, limit_bytes: int) -> float:
        """Return the most examples whose live bytes stay within a limit; may be fractional."""
        fixed, grown = self._live
        grows = grown > 0
        return float(((limit_bytes - fixed[grows]) / grown[grows]).min(initial=math.inf))

    def live_bytes(self, micro_batch: int) -> int:
        """Return the peak of live bytes. The allocator never reserves less."""
        return int(self.live_by_event(micro_batch).max(initial=0))

    def place_of_pairs(self) -> str | None:
        """Return where the forward makes a tensor with an entry per pair of examples, or None.

        Such a tensor has 4 units of bytes with two examples and 9 with three, so its line is 5 per
        example minus 6. If the batch only decides the number of rows, no line starts below zero.
        """
        is_of_pairs = (self.grown_bytes > 0) & (6 * self.grown_bytes == -5 * self.fixed_bytes)
        found = (is_of_pairs & (self.born == PHASES.index("forward"))).nonzero()[0]
        places = [(self.names[self.label[i]], self.names[self.module[i]]) for i in found]
        # the op that makes them says more than a copy of the labels to the GPU
        for op, module in sorted(places, key=lambda place: "copy" in place[0]):
            short = op.removesuffix(".default")
            return f"{short} in {module}" if module else short
        return None

    def work(self, micro_batch: int) -> Work:
        """Return what the second step computes."""
        return Work([kernel.at(micro_batch) for kernel in self.kernels], self.op)

    @functools.cached_property
    def is_op_of_step(self) -> Flags:
        """Return which ops belong to the optimizer's step."""
        import numpy as np

        of_step = np.array([kernel.phase == "step" for kernel in self.kernels], dtype=bool)
        found: Flags = of_step[self.op]
        return found

    def host_bytes_at(self, micro_batch: int) -> int:
        """Return the host memory of offloaded tensors."""
        fixed, grown = self.host_bytes
        return fixed + grown * micro_batch

    def requests(
        self,
        examples: float,
        multiprocessors: Multiprocessors = NONE,
        *,
        keeps_outputs: bool = False,
    ) -> Requests:
        """Return the requests to the allocator. A fraction of an example is rounded up.

        `multiprocessors` decide what reductions stage.
        `keeps_outputs`: the loop holds the model's outputs until the next ones are made.
        """
        import numpy as np

        sizes = self.fixed_bytes - (-self.grown_bytes * examples // 1).astype(np.int64)
        staged = [staged_bytes(each.at(examples), multiprocessors) for each in self.reductions]
        sizes += np.array([0, *staged], dtype=np.int64)[self.reduction]
        event = self._event_with_outputs_kept if keeps_outputs else self.event
        # torch requests nothing for an empty tensor
        events = event[sizes[np.abs(event) - 1] != 0]
        streams = self.stream.tolist() if self.stream.any() else None
        return Requests(sizes.tolist(), events.tolist(), streams)

    @functools.cached_property
    def _event_with_outputs_kept(self) -> Numbers:
        import numpy as np

        outputs = ((self.is_output != 0) & (self.born == PHASES.index("forward"))).nonzero()[0] + 1
        forwards = [start for start, phase in phase_starts(self) if phase == "forward"]
        events: list[int] = self.event.tolist()
        moves = Moves.of(events, outputs.tolist(), forwards)
        return np.array(moves.moved(events), dtype=np.int64)

    # ---- selecting events ------------------------------------------------------------------------

    def keeping(self, kept: Flags) -> Footprint:
        """Return the chosen events and the allocations that they request."""
        import numpy as np

        event = self.event[kept]
        requested = event[event > 0] - 1
        numbers = np.full(len(self.fixed_bytes), -1, dtype=np.int64)
        numbers[requested] = np.arange(len(requested))
        places = numbers[np.abs(event) - 1]
        known = places >= 0  # drop frees without a request
        return replace(
            self,
            **{name: getattr(self, name)[requested] for name in OF_ALLOCATIONS},
            event=(np.sign(event) * (places + 1))[known],
            **{name: getattr(self, name)[kept][known] for name in OF_EVENTS},
        )


OF_ALLOCATIONS = (
    "fixed_bytes",
    "grown_bytes",
    "stream",
    "category",
    "born",
    "label",
    "module",
    "is_output",
    "reduction",
)
OF_EVENTS = ("phase", "step", "micro_step")


def footprint_of(line: AffineTrace) -> Footprint:
    """Return the columns of an affine trace, without empty allocations."""
    import numpy as np

    trace = line.base
    grown = np.array(line.slopes, dtype=np.int64)
    fixed = np.array([a.size_bytes for a in trace.allocations], dtype=np.int64)
    fixed -= grown * trace.micro_batch
    phase, step, micro_step = _places_of_events(trace)
    kernels = _kernels(line)
    names = tuple(dict.fromkeys(name for a in trace.allocations for name in (a.op, a.module)))
    numbers = {kernel: number for number, kernel in enumerate(dict.fromkeys(kernels))}
    reductions = [_reduction_line(line, place) for place in range(len(trace.allocations))]
    distinct = dict.fromkeys(each for each in reductions if each is not None)
    places: dict[ReductionLine | None, int] = {None: 0}
    places.update((each, number) for number, each in enumerate(distinct, 1))
    whole = Footprint(
        fixed_bytes=fixed,
        grown_bytes=grown,
        stream=np.array([a.stream for a in trace.allocations], dtype=np.int64),
        category=_numbered([a.category for a in trace.allocations], CATEGORIES),
        born=_numbered([a.phase for a in trace.allocations], PHASES),
        label=_numbered([a.op for a in trace.allocations], names),
        module=_numbered([a.module for a in trace.allocations], names),
        is_output=np.array([a.is_output for a in trace.allocations], dtype=np.int64),
        reduction=np.array(list(map(places.__getitem__, reductions)), dtype=np.int64),
        event=np.array(trace.events, dtype=np.int64),
        phase=phase,
        step=step,
        micro_step=micro_step,
        kernels=tuple(numbers),
        op=np.array(list(map(numbers.__getitem__, kernels)), dtype=np.int64),
        names=names,
        reductions=tuple(distinct),
        host_bytes=(
            trace.host_peak_bytes - line.host_slope * trace.micro_batch,
            line.host_slope,
        ),
    )
    is_empty = (fixed == 0) & (grown == 0) & (whole.reduction == 0)
    return whole.keeping(~is_empty[np.abs(whole.event) - 1])


def _reduction_line(line: AffineTrace, place: int) -> ReductionLine | None:
    found = line.base.allocations[place].reduction
    if found is None:
        return None
    base = line.base.micro_batch
    outputs, inputs, contiguous = line.reduction_slopes.get(place, (0, 0, 0))
    return ReductionLine(
        part=found.part,
        element_bytes=found.element_bytes,
        value_bytes=found.value_bytes,
        is_along_inputs=found.is_along_inputs,
        fixed_outputs=found.num_outputs - outputs * base,
        grown_outputs=outputs,
        fixed_inputs=found.num_inputs - inputs * base,
        grown_inputs=inputs,
        fixed_contiguous=found.num_contiguous - contiguous * base,
        grown_contiguous=contiguous,
    )


def _kernels(line: AffineTrace) -> list[Kernel]:
    base = line.base.micro_batch
    return [
        Kernel(
            name=op.name,
            phase=op.phase,
            dtype=op.dtype,
            fixed_flops=op.flops - slope.flops * base,
            grown_flops=slope.flops,
            fixed_moved_bytes=op.moved_bytes - slope.moved_bytes * base,
            grown_moved_bytes=slope.moved_bytes,
            num_pending=op.num_pending,
            fixed_product=op.product and grown_product(op.product, slope.product, -base),
            grown_product=slope.product,
            num_views=op.num_views,
            is_strided=op.is_strided,
        )
        for op, slope in zip(line.base.ops, line.op_slopes, strict=True)
    ]


def _numbered(names: Sequence[str], of: Sequence[str]) -> Numbers:
    import numpy as np

    places = {name: place for place, name in enumerate(of)}
    return np.array([places[name] for name in names], dtype=np.int64)


def _places_of_events(trace: Trace) -> tuple[Numbers, Numbers, Numbers]:
    """Return the phase, the step and the micro-step of each event."""
    import numpy as np

    phase, step, micro_step = np.zeros((3, len(trace.events)), dtype=np.int64)
    for start in trace.step_starts:
        step[start:] += 1
    num_inputs = 0
    for begin, name in trace.phase_starts:
        if name == "zero_grad":
            num_inputs = 0
        num_inputs += name == "input"
        phase[begin:] = PHASES.index(name)
        micro_step[begin:] = num_inputs if name in _OF_A_MICRO_STEP else 0
    return phase, step, micro_step


# ---- back to a trace
# For what is shown of a variant: what holds the peak, where it is, and memory over a step. A
# footprint does not include convolution workspaces.


def trace_at(
    footprint: Footprint,
    micro_batch: int,
    *,
    torch_version: str,
    compute_capability: tuple[int, int],
    notes: tuple[str, ...] = (),
) -> Trace:
    """Return the trace at a micro-batch."""
    kernels = [kernel.at(micro_batch) for kernel in footprint.kernels]
    return Trace(
        allocations=_allocations(footprint, micro_batch),
        events=footprint.event.tolist(),
        step_starts=[int((footprint.step < number).sum()) for number in (1, 2)],
        phase_starts=phase_starts(footprint),
        ops=[kernels[number] for number in footprint.op.tolist()],
        micro_batch=micro_batch,
        torch_version=torch_version,
        compute_capability=compute_capability,
        notes=notes,
        host_peak_bytes=footprint.host_bytes_at(micro_batch),
    )


def _allocations(footprint: Footprint, micro_batch: int) -> list[Allocation]:
    sizes = (footprint.fixed_bytes + footprint.grown_bytes * micro_batch).tolist()
    columns = (
        footprint.label,
        footprint.module,
        footprint.born,
        footprint.category,
        footprint.stream,
        footprint.is_output,
        footprint.reduction,
    )
    reductions = [None, *(each.at(micro_batch) for each in footprint.reductions)]
    return [
        Allocation(
            size_bytes=size,
            op=footprint.names[label],
            module=footprint.names[module],
            phase=PHASES[born],
            category=CATEGORIES[category],
            stream=stream,
            is_output=bool(is_output),
            reduction=reductions[reduction],
        )
        for size, label, module, born, category, stream, is_output, reduction in zip(
            sizes, *(column.tolist() for column in columns), strict=True
        )
    ]


def phase_starts(footprint: Footprint) -> list[tuple[int, Phase]]:
    """Return the event at which each phase begins; there are no phases before training."""
    import numpy as np

    begins = np.zeros(len(footprint.event), dtype=bool)
    begins[:1] = True
    for column in (footprint.step, footprint.micro_step, footprint.phase):
        begins[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(begins & (footprint.step > 0))
    return [(start, PHASES[footprint.phase[start]]) for start in starts.tolist()]


# ---- footprints <-> bytes: numpy arrays and JSON, never code -------------------------------------
# The columns of all footprints are concatenated, one array per integer type. There are hundreds of
# columns, and opening an array for each would take longer than reading it.

_COLUMNS = (*OF_ALLOCATIONS, "event", *OF_EVENTS, "op")
_KINDS = ("int8", "int16", "int32", "int64")
_HEADER = "header"
_REST = ("kernels", "names", "reductions", "host_bytes")


def to_bytes(footprints: Mapping[str, Footprint], facts: Mapping[str, Any]) -> bytes:
    """Write footprints by name, and facts that JSON can hold."""
    import numpy as np

    every = [getattr(footprint, name) for footprint in footprints.values() for name in _COLUMNS]
    kinds = [_narrowest(column) for column in every]
    arrays: dict[str, Any] = {kind: _joined(every, kinds, kind) for kind in _KINDS}
    header = {
        "names": list(footprints),
        "rest": [
            {name: getattr(footprint, name) for name in _REST} for footprint in footprints.values()
        ],
        "columns": [[kind, len(column)] for kind, column in zip(kinds, every, strict=True)],
        "facts": facts,
    }
    arrays[_HEADER] = np.frombuffer(json.dumps(header).encode(), dtype=np.uint8)
    written = io.BytesIO()
    np.savez(written, **arrays)
    return written.getvalue()


def from_bytes(content: bytes) -> tuple[dict[str, Footprint], dict[str, Any]]:
    """Read what `to_bytes` wrote. Raises ValueError or KeyError for anything else."""
    try:
        return _read(content)
    except (BadZipFile, OSError, EOFError, TypeError, IndexError) as error:
        raise ValueError("these are no footprints") from error


def _read(content: bytes) -> tuple[dict[str, Footprint], dict[str, Any]]:
    import numpy as np

    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        header = json.loads(arrays[_HEADER].tobytes())
        wide = {kind: arrays[kind].astype(np.int64, copy=False) for kind in _KINDS}
    every = _columns(wide, header["columns"])
    footprints = {
        name: Footprint(
            **dict(zip(_COLUMNS, islice(every, len(_COLUMNS)), strict=True)),
            kernels=tuple(map(_kernel_from, rest["kernels"])),
            names=tuple(rest["names"]),
            reductions=tuple(ReductionLine(*each) for each in rest["reductions"]),
            host_bytes=(rest["host_bytes"][0], rest["host_bytes"][1]),
        )
        for name, rest in zip(header["names"], header["rest"], strict=True)
    }
    return footprints, header["facts"]


def _columns(wide: Mapping[str, Numbers], parts: Sequence[tuple[str, int]]) -> Iterator[Numbers]:
    """Yield one column after another, each starting where the last of its type ended."""
    done = dict.fromkeys(wide, 0)
    for kind, length in parts:
        begin, done[kind] = done[kind], done[kind] + length
        if done[kind] > len(wide[kind]):
            raise ValueError(f"a column ends after the {kind} do")
        yield wide[kind][begin : done[kind]]


def _joined(every: Sequence[Numbers], kinds: Sequence[str], kind: str) -> NDArray[Any]:
    """Return all columns of one integer type as one array."""
    import numpy as np

    those = [column for column, its in zip(every, kinds, strict=True) if its == kind]
    return np.concatenate([np.zeros(0, np.int64), *those]).astype(kind)


def _narrowest(column: Numbers) -> str:
    """Return the smallest integer type that holds a column."""
    import numpy as np

    low, high = int(column.min(initial=0)), int(column.max(initial=0))
    return next(k for k in _KINDS if np.iinfo(k).min <= low and high <= np.iinfo(k).max)
