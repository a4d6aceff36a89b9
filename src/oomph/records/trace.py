"""Trace: what whole training steps allocate, free and compute, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "workspace"
]
Direction = Literal["forward", "data gradient", "filter gradient"]
ConvolutionKind = Literal["depthwise", "pointwise", "dense"]  # pointwise: 1 x 1, a matrix product
Phase = Literal["build", "input", "forward", "backward", "clip", "step", "zero_grad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """The shape of a sum, a maximum and the like, which decides how many blocks share an output.

    If there are several, they exchange their results through memory, and count with semaphores who
    is last. How many there are depends on the card, so neither size is known in a trace.
    """

    part: Literal["staging", "semaphores"]
    num_outputs: int
    num_inputs: int  # of each output
    element_bytes: int  # of an input
    value_bytes: int  # of what is added up
    is_along_inputs: bool  # neighbouring threads read values of one output, not of several
    num_contiguous: int  # how many values lie side by side, as far as alignment goes; 0: none


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block that torch requests from the allocator, until it is freed."""

    size_bytes: int  # 0 for a reduction's
    op: str  # "aten::mm", or "build" if made before the first step
    module: str  # "encoder.layer.3.attention"; "" is the model itself
    phase: Phase
    category: Category
    stream: int = 0  # blocks of different streams come from different pools
    is_output: bool = False  # the model returned it to the training loop
    reduction: Reduction | None = None  # what decides the size on a card


class Product(NamedTuple):
    """The matrix product of a matmul or a convolution: (rows x depth) times (depth x columns).

    Attention is two of them: its rows are queries, its columns keys, its depth the head's size.
    A convolution is one by im2col: forward, its rows are positions of the result, its columns are
    output channels, and its depth is the input channels times the window.
    """

    num: int  # products of one kernel: the batch of a bmm, the groups of a convolution
    rows: int
    columns: int
    depth: int
    window: int = 1  # places of a convolution's filter: 9 if it is 3 x 3
    stride: int = 1  # of a convolution, along its first edge
    is_channels_last: bool = False
    channels: int = 0  # of one group of a convolution, the fewer of its input's and its result's


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel, with what decides its time.

    "copy_to_host" and "copy_from_host" go over the bus, "on_host" is the host's own work.
    """

    name: str
    phase: Phase
    flops: int
    moved_bytes: int  # read and written
    dtype: str  # of the arithmetic: "float32", "bfloat16"
    module: str = ""  # as in an allocation
    # Communication is "all_gather", "reduce_scatter" or "all_reduce": moved_bytes is what this GPU
    # sends. At a "wait" the GPU waits for all collectives so far but the last `num_pending`.
    num_pending: int = 0
    product: Product | None = None  # for a matmul, a convolution or fused attention
    num_views: int = 0  # that the host made since the op before: they run no kernel
    is_strided: bool = False  # its tensors are not all laid out alike, as in a transposing copy


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One run of a convolution's kernel: its place among the events, and what it reads and writes.

    Shapes and direction are as cuDNN sees them: the forward pass of a transposed convolution is the
    data gradient of the convolution that it transposes. Shapes are examples (of a weight: output
    channels), channels, edges. cuDNN takes its workspace after the result is allocated, and
    releases it before it returns.
    """

    at_event: int  # number of events before it
    direction: Direction
    dtype: str  # "float16"
    input_shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    is_channels_last: bool = False

    @property
    def kind(self) -> ConvolutionKind:
        if self.groups > 1 and self.groups == self.input_shape[1]:
            return "depthwise"
        return "pointwise" if all(edge == 1 for edge in self.weight_shape[2:]) else "dense"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of a rehearsal: `i + 1` requests allocation i, `-(i + 1)` frees it."""

    allocations: Sequence[Allocation]
    events: Sequence[int]
    step_starts: Sequence[int]  # index of the first event of each training step
    phase_starts: Sequence[tuple[int, Phase]]  # index of its first event, and the phase
    ops: Sequence[Op]  # of the last step
    micro_batch: int
    torch_version: str
    compute_capability: tuple[int, int]
    notes: tuple[str, ...] = ()  # what was assumed for values that do not exist
    doubt: str | None = None  # what the self-test of rehearsals found wrong on this torch
    host_peak_bytes: int = 0  # peak host memory of what is offloaded
    convolutions: Sequence[Convolution] = ()
    measures_convolutions: bool = False  # torch.backends.cudnn.benchmark
    allows_tf32: bool = True  # in convolutions, as torch does unless it is told otherwise
    # Elements per example in the batch's tensors, which grow with its length; None if not seen.
    example_elements: int | None = None
    example_tokens: int | None = None  # of the longest sequence of whole numbers; None: no text
    emptied_at: Sequence[int] = ()  # torch.cuda.empty_cache(): the number of events before each
    # The events that the program itself recorded (torch.cuda.memory._record_memory_history), from
    # the first to the one after the last; None if it wrote no snapshot.
    recorded: tuple[int, int] | None = None


# ---- Trace <-> plain columns, small enough to store: each name once, allocations as numbers ------

_ALLOCATION = ("op", "module", "phase", "category")
_REDUCTION_NUMBERS = (
    "num_outputs",
    "num_inputs",
    "element_bytes",
    "value_bytes",
    "is_along_inputs",
    "num_contiguous",
)
_OP = ("name", "phase", "dtype", "module")
_CONVOLUTION = ("direction", "dtype")
_SHAPES = ("input_shape", "weight_shape", "output_shape", "stride", "dilation")
_CONVOLUTION_NUMBERS = ("at_event", "groups", "is_channels_last")


def to_columns(trace: Trace) -> dict[str, Any]:
    """Convert the trace to what JSON can write."""
    names: dict[str, int] = {}

    def number(name: str) -> int:
        return names.setdefault(name, len(names))

    products: dict[Product | None, int] = {}
    product_of_ops = [products.setdefault(op.product, len(products)) for op in trace.ops]
    return {
        "sizes": [allocation.size_bytes for allocation in trace.allocations],
        "streams": [allocation.stream for allocation in trace.allocations],
        "outputs": [place for place, each in enumerate(trace.allocations) if each.is_output],
        "allocations": [_numbers(trace.allocations, field, number) for field in _ALLOCATION],
        "reductions": [
            [place, each.reduction.part == "staging", *_reduction_numbers(each.reduction)]
            for place, each in enumerate(trace.allocations)
            if each.reduction is not None
        ],
        "events": list(trace.events),
        "step_starts": list(trace.step_starts),
        "phase_starts": [list(start) for start in trace.phase_starts],
        "flops": [op.flops for op in trace.ops],
        "moved_bytes": [op.moved_bytes for op in trace.ops],
        "num_pending": [op.num_pending for op in trace.ops],
        "products": list(products),
        "product_of_ops": product_of_ops,
        "num_views": [op.num_views for op in trace.ops],
        "strided": [place for place, op in enumerate(trace.ops) if op.is_strided],
        "ops": [_numbers(trace.ops, field, number) for field in _OP],
        "convolutions": [_numbers(trace.convolutions, field, number) for field in _CONVOLUTION],
        "convolution_numbers": [
            [getattr(each, field) for each in trace.convolutions] for field in _CONVOLUTION_NUMBERS
        ],
        "convolution_shapes": [
            [getattr(each, field) for each in trace.convolutions] for field in _SHAPES
        ],
        "measures_convolutions": trace.measures_convolutions,
        "allows_tf32": trace.allows_tf32,
        "example_elements": trace.example_elements,
        "example_tokens": trace.example_tokens,
        "emptied_at": list(trace.emptied_at),
        "recorded": trace.recorded,
        "micro_batch": trace.micro_batch,
        "torch_version": trace.torch_version,
        "compute_capability": list(trace.compute_capability),
        "notes": list(trace.notes),
        "doubt": trace.doubt,
        "host_peak_bytes": trace.host_peak_bytes,
        "names": list(names),
    }


def from_columns(columns: dict[str, Any]) -> Trace:
    """Convert columns back to the trace."""
    names: list[str] = columns["names"]
    allocations = _rows(columns["allocations"], names, _ALLOCATION)
    outputs = set(columns["outputs"])
    reductions = {place: _reduction(*numbers) for place, *numbers in columns["reductions"]}
    ops = _rows(columns["ops"], names, _OP)
    strided = set(columns["strided"])
    products = [None if each is None else Product(*each) for each in columns["products"]]
    return Trace(
        allocations=[
            Allocation(
                size_bytes=size_bytes,
                stream=stream,
                is_output=place in outputs,
                reduction=reductions.get(place),
                **fields,
            )
            for place, (size_bytes, stream, fields) in enumerate(
                zip(columns["sizes"], columns["streams"], allocations, strict=True)
            )
        ],
        events=columns["events"],
        step_starts=columns["step_starts"],
        phase_starts=[(start, phase) for start, phase in columns["phase_starts"]],
        ops=[
            Op(
                flops=flops,
                moved_bytes=moved_bytes,
                num_pending=num_pending,
                product=products[product],
                num_views=num_views,
                is_strided=place in strided,
                **fields,
            )
            for place, flops, moved_bytes, num_pending, product, num_views, fields in zip(
                range(len(ops)),
                columns["flops"],
                columns["moved_bytes"],
                columns["num_pending"],
                columns["product_of_ops"],
                columns["num_views"],
                ops,
                strict=True,
            )
        ],
        micro_batch=columns["micro_batch"],
        torch_version=columns["torch_version"],
        compute_capability=(columns["compute_capability"][0], columns["compute_capability"][1]),
        notes=tuple(columns["notes"]),
        doubt=columns["doubt"],
        host_peak_bytes=columns["host_peak_bytes"],
        measures_convolutions=columns["measures_convolutions"],
        allows_tf32=columns["allows_tf32"],
        example_elements=columns["example_elements"],
        example_tokens=columns["example_tokens"],
        emptied_at=tuple(columns["emptied_at"]),
        recorded=None if columns["recorded"] is None else tuple(columns["recorded"]),
        convolutions=tuple(
            Convolution(**fields)
            for fields in map(
                _merged,
                _rows(columns["convolutions"], names, _CONVOLUTION),
                _fields(_CONVOLUTION_NUMBERS, columns["convolution_numbers"]),
                _fields(_SHAPES, columns["convolution_shapes"]),
            )
        ),
    )


def _reduction_numbers(reduction: Reduction) -> list[int]:
    return [int(getattr(reduction, field)) for field in _REDUCTION_NUMBERS]


def _reduction(is_staging: int, *numbers: int) -> Reduction:
    fields: dict[str, Any] = dict(zip(_REDUCTION_NUMBERS, numbers, strict=True))
    fields["is_along_inputs"] = bool(fields["is_along_inputs"])
    return Reduction(part="staging" if is_staging else "semaphores", **fields)


def _numbers(records: Sequence[Any], field: str, number: Any) -> list[int]:
    return [number(getattr(record, field)) for record in records]


def _fields(fields: Sequence[str], columns: list[list[Any]]) -> list[Any]:
    return [
        {
            field: tuple(value) if isinstance(value, list) else value
            for field, value in zip(fields, row, strict=True)
        }
        for row in zip(*columns, strict=True)
    ]


def _merged(*parts: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in parts for name, value in part.items()}


def _rows(columns: list[list[int]], names: list[str], fields: Sequence[str]) -> list[Any]:
    return [
        {field: names[place] for field, place in zip(fields, row, strict=True)}
        for row in zip(*columns, strict=True)
    ]
