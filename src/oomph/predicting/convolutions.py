"""A convolution's run -> the bytes that cuDNN takes for it as a workspace, under each rule.

Which kernel cuDNN chooses is its own secret. What its kernels need is known: many published
profiles show which of them run, and a recording shows how much they take. Each rule here is one
choice of kernels. The likely rules are those that the profiles show for such a card and precision;
all rules together give an interval.

torch takes a workspace from its allocator for one call. If there is no room, it tries the next
kernel of cuDNN's list, down to those without a workspace (Conv_v8.cpp, try_plans; before torch 2.1
Conv_v7.cpp, AlgoIterator::try_all). So a workspace alone never causes an out-of-memory error.
Buffers of indices (up to 0.6 MB in the recording) are not counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod
from typing import Literal

from oomph.records.gpu_model import Tf32
from oomph.records.trace import Convolution, Direction

Tensor = Literal["input", "weight", "output"]
Tensors = tuple[Tensor, ...]

_ELEMENT_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
_HALF = ("float16", "bfloat16")

# Tensor cores read 16 bytes at a time (cuDNN developer guide, "Tensor Core Operations": channels
# are padded to a multiple of 8 in half precision, of 4 in TF32).
_READ_AT_ONCE_BYTES = 16


def tensor_bytes(convolution: Convolution) -> dict[Tensor, int]:
    """Return the bytes of each tensor's copy, its channels padded to what is read at once."""
    size = _ELEMENT_BYTES.get(convolution.dtype, 4)
    at_once = max(_READ_AT_ONCE_BYTES // size, 1)

    def copied(shape: Sequence[int]) -> int:
        examples, channels, *edges = shape
        return size * examples * ceil(channels / at_once) * at_once * prod(edges)

    return {
        "input": copied(convolution.input_shape),
        "weight": size * prod(convolution.weight_shape),
        "output": copied(convolution.output_shape),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkspaceRule:
    """Which tensors cuDNN copies into its workspace, by direction."""

    forward: Tensors = ()
    data_gradient: Tensors = ()
    filter_gradient: Tensors = ()
    copies_odd_maps: bool = False  # of 1 x 1 convolutions, see `_is_read_as_it_is`
    transforms_tiles: bool = False  # Winograd, where it can

    def workspace_bytes(self, convolution: Convolution) -> int:
        if self.transforms_tiles and can_transform_tiles(convolution):
            return winograd_bytes(convolution)
        # A depthwise convolution has a kernel of its own: of torch's in fp32 (Convolution.cpp,
        # use_cudnn_depthwise), which takes nothing in the recorded snapshots.
        if convolution.is_channels_last or convolution.kind == "depthwise":
            return 0
        if convolution.kind == "pointwise" and not (
            self.copies_odd_maps and not _is_read_as_it_is(convolution)
        ):
            return 0
        sizes = tensor_bytes(convolution)
        return sum(sizes[tensor] for tensor in self._copied(convolution.direction))

    def _copied(self, direction: Direction) -> Tensors:
        if direction == "forward":
            return self.forward
        return self.data_gradient if direction == "data gradient" else self.filter_gradient


def _is_read_as_it_is(convolution: Convolution) -> bool:
    """Return whether a 1 x 1 convolution is a matrix product of its tensors without a copy.

    A channel's map is then a row of the matrix, and each row has to begin where tensor cores can
    read. In a profile of ResNet-50 on an A100 (fp16, NCHW) half of the inputs are transposed: about
    as many as those of the larger filters and of the 7 x 7 maps.
    """
    size = _ELEMENT_BYTES.get(convolution.dtype, 4)
    shapes = (convolution.input_shape, convolution.output_shape)
    return all(prod(shape[2:]) * size % _READ_AT_ONCE_BYTES == 0 for shape in shapes)


# ---- Winograd's algorithm, tiles transformed in memory
# winogradForwardData4x4 and its like: each 4 x 4 tile of a map, with its border, becomes 6 x 6
# numbers, and so does each filter. In a recording (ResNet-50 on a V100, torch 1.9, cudnn.benchmark;
# pytorch/kineto) this is the workspace to the byte in three of four shapes, and 1.1 % below it in
# the fourth.

_TILE, _TRANSFORMED = 4, 36
_WINOGRADS_FILTER = (3, 3)


def can_transform_tiles(convolution: Convolution) -> bool:
    """Return whether Winograd's algorithm exists: fp32, 3 x 3, without strides and dilation."""
    return (
        convolution.dtype == "float32"
        and convolution.weight_shape[2:] == _WINOGRADS_FILTER
        and set(convolution.stride) == set(convolution.dilation) == {1}
        and convolution.groups == 1
        and not convolution.is_channels_last
    )


def winograd_bytes(convolution: Convolution) -> int:
    """Return the bytes of all transformed tiles and filters."""
    examples, inputs, *_ = convolution.input_shape
    _, outputs, *edges = convolution.output_shape
    tiles = examples * prod(ceil(edge / _TILE) for edge in edges)
    return 4 * _TRANSFORMED * (inputs * outputs + tiles * (inputs + outputs))


# ---- the rules
# Tensor cores read channels last and torch's tensors have channels first. The kernels are called
# nhwckrsc_nchw (forward, which mostly writes channels first) and nhwckrsc_nhwc (backward). A
# profile of AlexNet on an A100 (fp32, cuDNN's own choice) has a nchwToNhwc for each tensor that
# such a kernel reads, 18, and a nhwcToNchw for each that it writes channels last, 8. ResNet-18 on a
# Blackwell GPU (fp32, cudnn.benchmark) is the same: 16 of 20 convolutions copy both that they read,
# 12 of them what they write, and those of 1 x 1 nothing.

NOTHING = WorkspaceRule()
WHAT_IS_READ = WorkspaceRule(
    forward=("input", "weight"),
    data_gradient=("output", "weight"),
    filter_gradient=("input", "output", "weight"),
    copies_odd_maps=True,
)
WHAT_BACKWARD_READS = WorkspaceRule(
    data_gradient=("output", "weight"),
    filter_gradient=("input", "output", "weight"),
    copies_odd_maps=True,
)
WHAT_IS_READ_AND_WRITTEN = WorkspaceRule(
    forward=("input", "weight", "output"),
    data_gradient=("output", "weight", "input"),
    filter_gradient=("input", "output", "weight"),
    copies_odd_maps=True,
)
# Kernels without tensor cores read channels first. Their data gradient (scudnn ... stridedB) takes
# its result and the filter: so in the recording, there for 1 x 1. That the likely rule has it for
# larger filters, and not for 1 x 1, was chosen after seeing VGG-16 and ResNet-101 on an RTX 3060.
RESULT_OF_DATA_GRADIENTS = WorkspaceRule(data_gradient=("input", "weight"))
TRANSFORMED_TILES = WorkspaceRule(data_gradient=("input", "weight"), transforms_tiles=True)


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules of one model on one card: those that are likely, and all that are possible."""

    likely: tuple[WorkspaceRule, ...]
    possible: tuple[WorkspaceRule, ...]


_WITH_TENSOR_CORES = Rules(
    likely=(WHAT_IS_READ, WHAT_BACKWARD_READS),
    possible=(WHAT_IS_READ, WHAT_BACKWARD_READS, WHAT_IS_READ_AND_WRITTEN, NOTHING),
)
# TF32 exists and is no faster than fp32: which of both cuDNN takes differs from shape to shape.
_WITH_EITHER = Rules(
    likely=(NOTHING, RESULT_OF_DATA_GRADIENTS),
    possible=(NOTHING, RESULT_OF_DATA_GRADIENTS, WHAT_IS_READ, WHAT_IS_READ_AND_WRITTEN),
)
_WITHOUT_TENSOR_CORES = Rules(
    likely=(NOTHING, RESULT_OF_DATA_GRADIENTS),
    possible=(NOTHING, RESULT_OF_DATA_GRADIENTS, TRANSFORMED_TILES),
)
_MEASURED_WITHOUT_TENSOR_CORES = Rules(
    likely=(TRANSFORMED_TILES,),
    possible=_WITHOUT_TENSOR_CORES.possible,
)


def rules_for(
    convolutions: Sequence[Convolution],
    *,
    tf32: Tf32,
    are_measured: bool = False,
) -> Rules:
    """Return the rules of a model's convolutions.

    Tensor cores pay in half precision, and in fp32 if TF32 is allowed and faster. On GeForce cards
    of compute capability 8 it is not (NVIDIA's GA102 paper). `are_measured`: cuDNN times its
    kernels and takes the fastest (torch.backends.cudnn.benchmark).
    """
    is_half = any(each.dtype in _HALF for each in convolutions)
    if is_half or tf32 == "faster than fp32":
        return _WITH_TENSOR_CORES
    if tf32 == "as fast as fp32":
        return _WITH_EITHER
    return _MEASURED_WITHOUT_TENSOR_CORES if are_measured else _WITHOUT_TENSOR_CORES
