"""Trace: what whole training steps allocate, free and compute, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "inputs", "temporaries", "workspace"
]
Direction = Literal["forward", "data gradient", "filter gradient"]
ConvolutionKind = Literal["depthwise", "pointwise", "dense"]  # pointwise: 1 x 1, a product
Phase = Literal["build", "input", "forward", "backward", "clip", "step", "zero_grad"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One block that torch asks of the allocator, from its request to its free."""

    size_bytes: int
    op: str  # "aten::mm", or "build" for what is there before the first step
    module: str  # "encoder.layer.3.attention"; "" is the model itself
    phase: Phase
    category: Category
    stream: int = 0  # blocks of different streams come from different pools
    is_output: bool = False  # the model returned it to the training loop


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One kernel, for the time that it takes.

    "copy_to_host" and "copy_from_host" go over the bus, "on_host" is the host's own work.
    """

    name: str
    phase: Phase
    flops: int
    moved_bytes: int  # read and written
    dtype: str  # of the arithmetic: "float32", "bfloat16"
    module: str = ""  # as of an allocation
    # Communication is "all_gather", "reduce_scatter" or "all_reduce": moved_bytes is what this GPU
    # sends. At a "wait" the GPU waits for all but the last `num_pending` of what was begun.
    num_pending: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """One run of a convolution's kernel: where it stands among the events, and what it reads.

    cuDNN takes its workspace when the result has its memory, and gives it back before it returns.
    """

    at_event: int  # so many events come before it
    direction: Direction
    kind: ConvolutionKind
    dtype: str  # "float16"
    input_bytes: int  # channels filled up to what tensor cores read at once
    weight_bytes: int
    output_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """The events of a rehearsal: `i + 1` requests allocation i, `-(i + 1)` frees it."""

    allocations: Sequence[Allocation]
    events: Sequence[int]
    step_starts: Sequence[int]  # index of the first event of each training step
    phase_starts: Sequence[tuple[int, Phase]]  # index of an event, and what begins there
    ops: Sequence[Op]  # of the last step
    micro_batch: int
    torch_version: str
    compute_capability: tuple[int, int]
    notes: tuple[str, ...] = ()  # what was assumed where a value does not exist
    doubt: str | None = None  # what the self-test of rehearsals found wrong on this torch
    host_peak_bytes: int = 0  # the most of the host's memory that what left the GPU takes
    convolutions: Sequence[Convolution] = ()
    measures_convolutions: bool = False  # torch.backends.cudnn.benchmark
    # In the tensors of a batch, for one example: what longer ones have more of; None if not seen.
    example_elements: int | None = None
