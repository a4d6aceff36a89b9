"""How tensors lie in memory: which layout a convolution writes, and which operands kernels copy.

A kernel that cannot read an operand as it lies makes a contiguous copy and drops it before it
returns. That happens below the dispatcher, where neither a mode nor a meta kernel sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._meta_registrations import meta_conv
from torch._prims_common import suggest_memory_format

from oomph.pretending.tensors import is_pretended

_CHANNELS_LAST = (torch.channels_last, torch.channels_last_3d)


def layout_of_convolution(source: torch.Tensor, weight: torch.Tensor) -> torch.memory_format:
    """Return the layout of a convolution's results on a GPU.

    cuDNN works channels last if its input or its filter lies so, but not in fp64 (ConvUtils.h,
    cudnn_conv_suggest_memory_format). Without cuDNN, torch's own kernels write channels first
    (Convolution.cpp, determine_backend_memory_format).
    """
    is_double = torch.float64 in (source.dtype, weight.dtype)
    if torch.backends.cudnn.enabled and not is_double and source.dim() == weight.dim() > 3:
        for tensor in (source, weight):
            suggested: torch.memory_format = suggest_memory_format(tensor)
            if suggested in _CHANNELS_LAST:
                return suggested
    return torch.contiguous_format


def convolution(source: Any, weight: Any, *arguments: Any) -> Any:
    """Return a convolution's result; torch's meta kernel leaves it channels first."""
    shape = meta_conv(source, weight, *arguments).shape
    layout = layout_of_convolution(source, weight)
    return torch.empty(shape, dtype=source.dtype, device="meta", memory_format=layout)


# ---- operands that are copied


@dataclass(frozen=True, slots=True)
class Copies:
    """Which operands an op copies, and whether before its results exist or after."""

    of: Callable[[Any], Sequence[torch.Tensor]]
    are_first: bool

    def sizes(self, args: Any) -> tuple[int, ...]:
        """Return the bytes of the copies."""
        return tuple(
            tensor.numel() * tensor.element_size()
            for tensor in self.of(args)
            if is_pretended(tensor) and tensor.layout is torch.strided
        )


def _unless_contiguous(*places: int) -> Callable[[Any], list[torch.Tensor]]:
    def copied(args: Any) -> list[torch.Tensor]:
        return [args[place] for place in places if not args[place].is_contiguous()]

    return copied


def _unless_in_its_layout(*places: int, like: int) -> Callable[[Any], list[torch.Tensor]]:
    """Copy what does not lie in the layout of an operand: channels last, or contiguous."""

    def copied(args: Any) -> list[torch.Tensor]:
        layout = suggest_memory_format(args[like])
        return [args[place] for place in places if not _lies_in(args[place], layout)]

    return copied


def _lies_in(tensor: torch.Tensor, layout: torch.memory_format) -> bool:
    if layout is torch.channels_last and tensor.dim() != 4:
        return True
    return tensor.is_contiguous(memory_format=layout)


def _of_convolution(*places: int, source: int) -> Callable[[Any], list[torch.Tensor]]:
    def copied(args: Any) -> list[torch.Tensor]:
        layout = layout_of_convolution(args[source], args[source + 1])
        return [
            args[place] for place in places if not args[place].is_contiguous(memory_format=layout)
        ]

    return copied


def _of_product(first: int) -> Callable[[Any], list[torch.Tensor]]:
    """Copy the matrices that BLAS cannot read (Blas.cpp, prepare_matrix_for_cublas)."""

    def copied(args: Any) -> list[torch.Tensor]:
        return [matrix for matrix in args[first : first + 2] if not _is_readable(matrix)]

    return copied


def _is_readable(matrix: torch.Tensor) -> bool:
    rows, columns = matrix.shape
    down, across = matrix.stride()
    if torch.ops.aten.is_non_overlapping_and_dense.default(matrix):
        return True
    return (down == 1 and across >= max(1, rows)) or (across == 1 and down >= max(1, columns))


def _of_batched_product(first: int) -> Callable[[Any], list[torch.Tensor]]:
    """Copy the batches that BLAS cannot read (Blas.cpp, prepare_batch_matrix_for_cublas).

    BLAS wants columns, so it computes the transposed product, with the operands exchanged.
    """

    def copied(args: Any) -> list[torch.Tensor]:
        one, other = args[first : first + 2]
        rows, inner, columns = one.shape[1], one.shape[2], other.shape[2]
        if columns == 1 and rows > 1:  # the result can be read as columns: nothing is exchanged
            lies = ((one, 1, 2, rows, inner), (other, 1, 2, inner, columns))
        else:
            lies = ((other, 2, 1, columns, inner), (one, 2, 1, inner, rows))
        return [batch for batch, *how in lies if not _is_batch_readable(batch, *how)]

    return copied


def _is_batch_readable(batch: torch.Tensor, fast: int, leading: int, m: int, n: int) -> bool:
    strides = batch.stride()
    if strides[fast] == 1 and strides[leading] >= max(1, m):
        return True
    if strides[leading] == 1 and strides[fast] >= max(1, n):
        return True
    return batch.is_contiguous() and strides[1] != 0 and strides[2] != 0


# op -> its copies: structured kernels have their results first, the others last. Sources: Blas.cpp;
# layer_norm_kernel.cu (expect_contiguous); SoftMax.cu (host_softmax, host_softmax_backward);
# ReflectionPad.cu and ReplicationPadding.cu; DilatedMaxPool2d.cu; BatchNorm.cpp in cudnn/;
# Convolution.cpp (`input.contiguous(backend_memory_format)` and the same of the filter).
_SOFTMAX = Copies(_unless_contiguous(0), are_first=False)
_SOFTMAX_BACKWARD = Copies(_unless_contiguous(0, 1), are_first=False)
COPIES: dict[str, Copies] = {
    "mm": Copies(_of_product(0), are_first=False),
    "addmm": Copies(_of_product(1), are_first=False),
    "bmm": Copies(_of_batched_product(0), are_first=False),
    "baddbmm": Copies(_of_batched_product(1), are_first=False),
    "native_layer_norm": Copies(_unless_contiguous(0), are_first=True),
    "native_layer_norm_backward": Copies(_unless_contiguous(0, 1), are_first=True),
    **dict.fromkeys(("_softmax", "_log_softmax"), _SOFTMAX),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), _SOFTMAX_BACKWARD),
    **dict.fromkeys(
        [f"{kind}_pad{edges}d" for kind in ("reflection", "replication") for edges in (1, 2, 3)],
        Copies(_unless_contiguous(0), are_first=False),
    ),
    "max_pool2d_with_indices": Copies(_unless_in_its_layout(0, like=0), are_first=False),
    "max_pool2d_with_indices_backward": Copies(
        _unless_in_its_layout(0, 1, like=1), are_first=False
    ),
    "cudnn_batch_norm_backward": Copies(_unless_in_its_layout(1, like=0), are_first=True),
    "convolution": Copies(_of_convolution(0, 1, source=0), are_first=True),
    "convolution_backward": Copies(_of_convolution(0, 1, 2, source=1), are_first=True),
}
