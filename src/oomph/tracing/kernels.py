"""What a kernel takes on a real GPU that no tensor shows: its temporaries and workspaces.

Each rule has its source. Convolutions are not here: what cuDNN takes depends on the algorithm
that it chooses, and is an interval of the prediction.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing import recurrent
from oomph.units import KIB

# at::cuda::getChosenWorkspaceSize (CUDABlas.cpp) since torch 2.0: ":4096:2:16:8" KiB below
# compute capability 9, 32 MiB from there on. One per handle and stream, from the caching
# allocator, at the first GEMM, for good.
_CUBLAS_WORKSPACE_BYTES = 8_519_680
_CUBLAS_WORKSPACE_BYTES_FROM_9 = 32 * KIB * KIB

# Embedding.cu: up to so many indices the kernel needs no sorting.
_INDICES_WITHOUT_SORTING = 3072

# kernel_backward.h, kOutputInRF: heads up to the size of a block of queries, in half precision.
_WIDEST_HEAD_IN_REGISTERS = 128

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "addmv", "mv"})


def cublas_workspace_bytes(capability: tuple[int, int]) -> int:
    return _CUBLAS_WORKSPACE_BYTES if capability < (9, 0) else _CUBLAS_WORKSPACE_BYTES_FROM_9


def _flash_backward(args: Any) -> list[int]:
    """A softmax sum, and dq accumulated in fp32, padded (flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, rows, head = query.shape
    padded = batch * heads * _up(rows, 128)
    blocks = [4 * padded, 4 * padded * _up(head, 32 if head <= 128 else 64)]
    if key.shape[1] != heads:  # the gradients of k and v, per query head
        expanded = batch * heads * key.shape[2] * head * query.element_size()
        blocks += [expanded, expanded]
    return blocks


def _efficient_backward(args: Any) -> list[int]:
    """attention_backward.cu and mem_eff_attention/kernel_backward.h.

    dq is added up in fp32, and dk and dv, too, where a head of half precision is too wide for the
    registers. In fp32 delta is made before, of a product that is as large and gone by then.
    """
    query, key = args[1], args[2]
    delta_bytes = 4 * query.shape[0] * query.shape[1] * query.shape[2]
    if query.dtype == torch.float32:
        return [4 * query.numel(), delta_bytes]
    blocks = [delta_bytes, 4 * query.numel()]
    if query.shape[-1] > _WIDEST_HEAD_IN_REGISTERS:
        blocks += [4 * key.numel(), 4 * key.numel()]
    return blocks


def _softmax_backward(args: Any) -> list[int]:
    """The product of gradient and output (SoftMax.cu: `Tensor tmp = grad * output`)."""
    gradient, output = args[0], args[1]
    return [gradient.numel() * max(gradient.element_size(), output.element_size())]


def _embedding_backward(args: Any) -> list[int]:
    """Sorted indices, offsets of their segments, and fp32 partial sums (Embedding.cu)."""
    gradient, indices, num_weights = args[0], args[1], args[2]
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _INDICES_WITHOUT_SORTING:
        return []
    rows = min(count, num_weights)
    parts = count // 10 + rows
    sorting = [8 * count, 8 * count, 16 * count + 65536, 8 * count]
    return [*sorting, 8, 8 * rows, 8 * rows, 8 * parts, 4 * parts * width]


def _ctc_backward(args: Any) -> list[int]:
    """log_beta, of the size of log_alpha (LossCTC.cu, ctc_loss_backward_gpu_template)."""
    log_alpha = args[6]
    return [log_alpha.numel() * log_alpha.element_size()]


def _unreduced(args: Any) -> list[int]:
    """The loss of each element, before it is reduced (Loss.cpp, TORCH_IMPL_FUNC(mse_loss_out))."""
    return [args[0].numel() * args[0].element_size()]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# op -> (arguments) -> bytes of the blocks that its kernel takes and gives back before it returns
TEMPORARIES = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    "_softmax_backward_data": _softmax_backward,
    "_ctc_loss_backward": _ctc_backward,
    "_cudnn_rnn": recurrent.forward_temporaries,
    "_cudnn_rnn_backward": recurrent.backward_temporaries,
    "mse_loss": _unreduced,
    "smooth_l1_loss": _unreduced,
}
