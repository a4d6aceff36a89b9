"""Two traces of one way to train -> its memory and its work at every micro-batch, in columns.

A planner asks hundreds of times what a way to train takes at another micro-batch, with another
optimizer, with and without accumulation. Here a trace is arrays of numbers, so that the live
bytes of 30,000 events take microseconds. They are exact for the trace, and never more than what
the allocator reserves: what they say does not fit, does not fit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from oomph.predicting.scaling import AffineTrace
from oomph.predicting.work import Work
from oomph.records.trace import Op, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]

CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "inputs",
    "temporaries",
    "workspace",
)
PHASES = ("build", "input", "forward", "backward", "clip", "step", "zero_grad")
_OF_A_MICRO_STEP = ("input", "forward", "backward")


class Kernel(NamedTuple):
    """What an op computes and moves: fixed + grown x micro-batch."""

    name: str
    phase: str
    dtype: str
    fixed_flops: int
    grown_flops: int
    fixed_moved_bytes: int
    grown_moved_bytes: int
    num_pending: int = 0  # of a wait for communication

    def at(self, micro_batch: int) -> Op:
        return Op(
            name=self.name,
            phase=self.phase,  # type: ignore[arg-type] # it is one
            flops=self.fixed_flops + self.grown_flops * micro_batch,
            moved_bytes=self.fixed_moved_bytes + self.grown_moved_bytes * micro_batch,
            dtype=self.dtype,
            num_pending=self.num_pending,
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class Footprint:
    """Allocations and events as columns; an allocation is fixed + grown x micro-batch bytes."""

    fixed_bytes: Numbers  # of each allocation
    grown_bytes: Numbers
    stream: Numbers
    category: Numbers  # in CATEGORIES
    born: Numbers  # phase of its request, in PHASES
    label: Numbers  # the op that requested it, in names
    module: Numbers  # in names
    is_output: Numbers  # 1: the model returned it to the training loop
    event: Numbers  # i + 1 requests allocation i, -(i + 1) frees it
    phase: Numbers  # of each event
    step: Numbers  # of each event: 0 before training, then 1 and 2
    micro_step: Numbers  # of each event, in its step: 0 before the first, then 1 and 2
    kernels: tuple[Kernel, ...]  # the different ones of the second step
    op: Numbers  # which of them each op of the second step is
    names: tuple[str, ...]
    host_bytes: tuple[int, int] = (0, 0)  # of what left the GPU: fixed, grown

    # ---- live bytes ------------------------------------------------------------------------------

    @functools.cached_property
    def _live(self) -> tuple[Numbers, Numbers]:
        """Live bytes after each event: the fixed part, and the part per example."""
        import numpy as np

        places, signs = np.abs(self.event) - 1, np.sign(self.event)
        fixed = np.cumsum(self.fixed_bytes[places] * signs)
        return fixed, np.cumsum(self.grown_bytes[places] * signs)

    def live_by_event(self, micro_batch: int) -> Numbers:
        fixed, grown = self._live
        return fixed + grown * micro_batch

    def examples_within(self, limit_bytes: int) -> float:
        """The most of which the live bytes are within a limit, a part of one included."""
        fixed, grown = self._live
        grows = grown > 0
        return float(((limit_bytes - fixed[grows]) / grown[grows]).min(initial=math.inf))

    def live_bytes(self, micro_batch: int) -> int:
        """The most that is alive at a time. The allocator never reserves less."""
        return int(self.live_by_event(micro_batch).max(initial=0))

    def place_of_pairs(self) -> str | None:
        """Where a forward makes a tensor for each pair of examples; None if nowhere.

        The line through 4 bytes with two examples and 9 with three, or multiples: 5 for each, less
        6. Where the batch only decides how many rows there are, no size begins below nothing.
        """
        is_of_pairs = (self.grown_bytes > 0) & (6 * self.grown_bytes == -5 * self.fixed_bytes)
        found = (is_of_pairs & (self.born == PHASES.index("forward"))).nonzero()[0]
        places = [(self.names[self.label[i]], self.names[self.module[i]]) for i in found]
        # what makes them says more than the labels' way to the GPU
        for op, module in sorted(places, key=lambda place: "copy" in place[0]):
            short = op.removesuffix(".default")
            return f"{short} in {module}" if module else short
        return None

    def work(self, micro_batch: int) -> Work:
        """What the second step computes."""
        return Work([kernel.at(micro_batch) for kernel in self.kernels], self.op)

    def host_bytes_at(self, micro_batch: int) -> int:
        """Of the host's memory, for what left the GPU."""
        fixed, grown = self.host_bytes
        return fixed + grown * micro_batch

    def requests(self, examples: float) -> tuple[list[int], list[int], list[int] | None]:
        """Sizes, events and streams, as `replay` takes them; a part of an example is rounded up."""
        import numpy as np

        sizes = self.fixed_bytes - (-self.grown_bytes * examples // 1).astype(np.int64)
        # torch asks for nothing where a tensor is empty
        events = self.event[sizes[np.abs(self.event) - 1] != 0]
        streams = self.stream.tolist() if self.stream.any() else None
        return sizes.tolist(), events.tolist(), streams

    # ---- parts of it -----------------------------------------------------------------------------

    def keeping(self, kept: Any) -> Footprint:
        """The events that are kept, and the allocations that they request."""
        import numpy as np

        event = self.event[kept]
        requested = event[event > 0] - 1
        numbers = np.full(len(self.fixed_bytes), -1, dtype=np.int64)
        numbers[requested] = np.arange(len(requested))
        places = numbers[np.abs(event) - 1]
        known = places >= 0  # what is not requested is not freed
        return Footprint(
            **{name: getattr(self, name)[requested] for name in OF_ALLOCATIONS},
            event=(np.sign(event) * (places + 1))[known],
            **{name: getattr(self, name)[kept][known] for name in OF_EVENTS},
            kernels=self.kernels,
            op=self.op,
            names=self.names,
            host_bytes=self.host_bytes,
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
)
OF_EVENTS = ("phase", "step", "micro_step")


def footprint_of(line: AffineTrace) -> Footprint:
    """The columns of an affine trace; empty allocations take nothing and are left out."""
    import numpy as np

    trace = line.base
    grown = np.array(line.slopes, dtype=np.int64)
    fixed = np.array([a.size_bytes for a in trace.allocations], dtype=np.int64)
    fixed -= grown * trace.micro_batch
    phase, step, micro_step = _places_of_events(trace)
    kernels = _kernels(line)
    names = tuple(dict.fromkeys(name for a in trace.allocations for name in (a.op, a.module)))
    numbers = {kernel: number for number, kernel in enumerate(dict.fromkeys(kernels))}
    whole = Footprint(
        fixed_bytes=fixed,
        grown_bytes=grown,
        stream=np.array([a.stream for a in trace.allocations], dtype=np.int64),
        category=_numbered([a.category for a in trace.allocations], CATEGORIES),
        born=_numbered([a.phase for a in trace.allocations], PHASES),
        label=_numbered([a.op for a in trace.allocations], names),
        module=_numbered([a.module for a in trace.allocations], names),
        is_output=np.array([a.is_output for a in trace.allocations], dtype=np.int64),
        event=np.array(trace.events, dtype=np.int64),
        phase=phase,
        step=step,
        micro_step=micro_step,
        kernels=tuple(numbers),
        op=np.array(list(map(numbers.__getitem__, kernels)), dtype=np.int64),
        names=names,
        host_bytes=(
            trace.host_peak_bytes - line.host_slope * trace.micro_batch,
            line.host_slope,
        ),
    )
    is_empty = (fixed == 0) & (grown == 0)
    return whole.keeping(~is_empty[np.abs(whole.event) - 1])


def _kernels(line: AffineTrace) -> list[Kernel]:
    base = line.base.micro_batch
    return [
        Kernel(
            name=op.name,
            phase=op.phase,
            dtype=op.dtype,
            fixed_flops=op.flops - flops * base,
            grown_flops=flops,
            fixed_moved_bytes=op.moved_bytes - moved * base,
            grown_moved_bytes=moved,
            num_pending=op.num_pending,
        )
        for op, (flops, moved) in zip(line.base.ops, line.op_slopes, strict=True)
    ]


def _numbered(names: Sequence[str], of: Sequence[str]) -> Numbers:
    import numpy as np

    places = {name: place for place, name in enumerate(of)}
    return np.array([places[name] for name in names], dtype=np.int64)


def _places_of_events(trace: Trace) -> tuple[Numbers, Numbers, Numbers]:
    """The phase, the step and the micro-step of each event."""
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
