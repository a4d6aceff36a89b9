"""Trace, a rule -> its requests with the workspaces that cuDNN's convolutions may take.

Which kernel cuDNN chooses depends on its version, the card and the shape, and cannot be known
from the model. What is known is what a workspace holds: tensor cores read channels last, torch's
tensors have them first, and so cuDNN copies what a kernel reads, or also what it writes, into its
workspace (its nchwToNhwc and nhwcToNchw kernels stand in many published profiles). Each rule here
is one such choice; together they are an interval.

torch takes a workspace from its allocator for one call, and where there is no room it runs the
next kernel of cuDNN's list, down to those without a workspace (Conv_v8.cpp, try_plans; before
torch 2.1 Conv_v7.cpp, AlgoIterator::try_all). So a workspace alone is never why memory runs out.
Not here are Winograd's and FFT's workspaces, which cuDNN tries where it measures
(torch.backends.cudnn.benchmark): they can be many times as large, as far as there is room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from oomph.records.trace import Convolution, ConvolutionKind, Direction, Trace

Copied = Literal["nothing", "what is read", "what is read and written"]

_ALL: tuple[Direction, ...] = ("forward", "data gradient", "filter gradient")
_BACKWARD: tuple[Direction, ...] = ("data gradient", "filter gradient")
_DENSE: tuple[ConvolutionKind, ...] = ("dense",)
_PRODUCTS: tuple[ConvolutionKind, ...] = ("dense", "pointwise")
_EVERY: tuple[ConvolutionKind, ...] = ("dense", "pointwise", "depthwise")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRule:
    """What cuDNN copies in its workspace, in which convolutions."""

    copied: Copied
    directions: tuple[Direction, ...] = _ALL
    kinds: tuple[ConvolutionKind, ...] = _DENSE

    def workspace_bytes(self, convolution: Convolution) -> int:
        each = convolution
        if each.kind not in self.kinds or each.direction not in self.directions:
            return 0
        if self.copied == "nothing":
            return 0
        tensors = {
            "forward": (each.input_bytes, each.weight_bytes, each.output_bytes),
            "data gradient": (each.output_bytes, each.weight_bytes, each.input_bytes),
            "filter gradient": (each.input_bytes, each.output_bytes, each.weight_bytes),
        }[each.direction]  # the last one is written
        return sum(tensors if self.copied == "what is read and written" else tensors[:2])


# A product with a 1 x 1 filter is a matrix product of the tensors as they are, and a depthwise
# convolution has nothing for tensor cores to do: copies are likely for neither.
NO_COPIES = WorkspaceRule(copied="nothing")
COPIED_FOR_TENSOR_CORES = WorkspaceRule(copied="what is read")

RULES: tuple[WorkspaceRule, ...] = (
    NO_COPIES,
    COPIED_FOR_TENSOR_CORES,
    WorkspaceRule(copied="what is read", directions=_BACKWARD),
    WorkspaceRule(copied="what is read and written"),
    WorkspaceRule(copied="what is read", kinds=_PRODUCTS),
    WorkspaceRule(copied="what is read", directions=_BACKWARD, kinds=_PRODUCTS),
    WorkspaceRule(copied="what is read and written", kinds=_PRODUCTS),
    WorkspaceRule(copied="what is read and written", kinds=_EVERY),
)


def likely_rule(convolutions: Sequence[Convolution], *, has_fast_tf32: bool) -> WorkspaceRule:
    """Whether tensor cores pay: always in half precision, in fp32 only where TF32 is faster.

    On GeForce cards of compute capability 8 TF32 runs no faster than fp32 (NVIDIA's GA102 paper).
    """
    is_low = any(each.dtype in ("float16", "bfloat16") for each in convolutions)
    return COPIED_FOR_TENSOR_CORES if is_low or has_fast_tf32 else NO_COPIES


@dataclass(frozen=True, slots=True)
class Requests:
    """What is asked of the allocator: sizes, events, and which events it may refuse."""

    sizes: Sequence[int]
    events: Sequence[int]
    streams: Sequence[int] | None  # None: all on one
    dispensable: frozenset[int]


def requests(trace: Trace, rule: WorkspaceRule = NO_COPIES) -> Requests:
    """The requests of a trace, with the workspaces that a rule says."""
    # torch asks for nothing where a tensor is empty
    is_empty = [not allocation.size_bytes for allocation in trace.allocations]
    sizes = [allocation.size_bytes or 1 for allocation in trace.allocations]
    events: list[int] = []
    done = 0
    for each in trace.convolutions:
        taken = rule.workspace_bytes(each)
        if taken:
            events += trace.events[done : each.at_event]
            done = each.at_event
            sizes.append(taken)
            events += (len(sizes), -len(sizes))
    events += trace.events[done:]
    num_own = len(trace.allocations)
    streams = [allocation.stream for allocation in trace.allocations]
    return Requests(
        sizes,
        [event for event in events if abs(event) > num_own or not is_empty[abs(event) - 1]],
        [*streams, *[0] * (len(sizes) - num_own)] if any(streams) else None,
        frozenset(range(num_own + 1, len(sizes) + 1)),
    )
