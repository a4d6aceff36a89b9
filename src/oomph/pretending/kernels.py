"""The memory that kernels on a real GPU take beyond their tensors: temporaries and workspaces.

Each rule names its source. Convolutions are not included: cuDNN's workspace depends on the
algorithm that it chooses, so the prediction gives an interval for it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any

import torch

from oomph.pretending import recurrent
from oomph.pretending.layouts import layout_of_convolution
from oomph.pretending.streams import Now
from oomph.pretending.tensors import Recorder, is_pretended
from oomph.records.trace import Convolution, Direction

# Embedding.cu: up to this many indices the kernel needs no sorting.
_INDICES_WITHOUT_SORTING = 3072

NOT_REDUCED = 0  # at::Reduction::None

# kernel_backward.h, kOutputInRF: in half precision, heads up to the size of a query block.
_WIDEST_HEAD_IN_REGISTERS = 128


CUBLAS_WORKSPACE = "cublas workspace"  # the op of its allocations
GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "addmv", "mv"})


def cublas_handle() -> tuple[str, int]:
    """Return the handle and stream of a matrix product now; each pair has a workspace of its own.

    A thread has a handle of its own, and threads that come and go share a pool of them
    (CublasHandlePool.cpp). Autograd runs the backward of a GPU in a thread of its own (engine.cpp,
    Engine::thread_init), which here is the caller's.
    """
    if torch._C._current_autograd_node() is not None:
        return "autograd", Now.stream
    is_main = threading.current_thread() is threading.main_thread()
    return "main" if is_main else "others", Now.stream


def _flash_backward(args: Any) -> list[int]:
    """Return the bytes of the softmax sums and the padded fp32 dq (flash_api.cpp, mha_bwd)."""
    query, key = args[1], args[2]
    batch, heads, rows, head = query.shape
    padded = batch * heads * _up(rows, 128)
    blocks = [4 * padded, 4 * padded * _up(head, 32 if head <= 128 else 64)]
    if key.shape[1] != heads:  # the gradients of k and v are made per query head
        expanded = batch * heads * key.shape[2] * head * query.element_size()
        blocks += [expanded, expanded]
    return blocks


def _efficient_backward(args: Any) -> list[int]:
    """Return bytes by attention_backward.cu and mem_eff_attention/kernel_backward.h.

    dq is summed in fp32. So are dk and dv if a half-precision head is too wide for the registers.
    With fp32 inputs, delta is computed before, from a product as large as dq that is freed by then.
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
    """Return the bytes of gradient times output (SoftMax.cu: `Tensor tmp = grad * output`)."""
    gradient, output = args[0], args[1]
    return [gradient.numel() * max(gradient.element_size(), output.element_size())]


def _embedding_backward(args: Any) -> list[int]:
    """Return the bytes of sorted indices, segment offsets and fp32 sums (Embedding.cu)."""
    gradient, indices, num_weights = args[0], args[1], args[2]
    count, width = indices.numel(), gradient.shape[-1]
    if count <= _INDICES_WITHOUT_SORTING:
        return []
    rows = min(count, num_weights)
    parts = count // 10 + rows
    sorting = [8 * count, 8 * count, _sort_bytes(count, num_weights), 8 * count]
    return [*sorting, 8, 8 * rows, 8 * rows, 8 * parts, 4 * parts * width]


def _ctc_backward(args: Any) -> list[int]:
    """Return the bytes of log_beta: log_alpha's (LossCTC.cu, ctc_loss_backward_gpu_template)."""
    log_alpha = args[6]
    return [log_alpha.numel() * log_alpha.element_size()]


def _unreduced(args: Any) -> list[int]:
    """Return the bytes of the unreduced loss (Loss.cpp, TORCH_IMPL_FUNC(mse_loss_out))."""
    return [args[0].numel() * args[0].element_size()]


def _before_the_mean(args: Any) -> list[int]:
    """Return the bytes of the loss of each element (Loss.cpp, huber_loss)."""
    return [] if len(args) > 2 and args[2] == NOT_REDUCED else _unreduced(args)


def _binary_cross_entropy(args: Any) -> list[int]:
    """Return log_sigmoid and the loss of each element (Loss.cpp, ..._cross_entropy_with_logits).

    With a weight for positive examples, `pos_weight - 1` and its product with the target are added.
    """
    pos_weight = args[3] if len(args) > 3 else None
    each = _unreduced(args)[0]
    is_result = len(args) > 4 and args[4] == NOT_REDUCED
    weights = []
    if pos_weight is not None:
        weights = [pos_weight.numel() * pos_weight.element_size(), each]
    return [each, *weights, *([] if is_result else [each])]


def _logsumexp(args: Any) -> list[int]:
    """Return the maxima, where they are infinite, and all differences (ReduceOps.cpp)."""
    given, dims = args[0], args[1]
    chosen = {dim % max(given.dim(), 1) for dim in ([dims] if isinstance(dims, int) else dims)}
    num = math.prod(size for dim, size in enumerate(given.shape) if dim not in chosen)
    size = given.element_size()
    return [num * size, num * size, num, -3, -2, given.numel() * size]


def _count_nonzero(args: Any) -> list[int]:
    """Return what is compared with 0, and its copy in 64-bit integers (count_nonzero_cuda)."""
    given = args[0]
    compared = [] if given.dtype == torch.bool else [given.numel()]
    return [*compared, 8 * given.numel()]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _num_taken(blocks: list[int]) -> int:
    return sum(block > 0 for block in blocks)


def _sorted_index(args: Any) -> list[int]:
    """Return what adding up under an index sorts (Indexing.cu, index_put_with_sort_kernel).

    The indices are wrapped and turned into one linear index. It is sorted together with its places.
    """
    given, indices, values = args[:3]
    found = [index for index in indices if index is not None]
    if len(args) < 4 or not args[3] or not found:  # nothing is added up
        return []
    shape = torch.broadcast_shapes(*(index.shape for index in found))
    count = math.prod(shape)
    if not count or any(index.dtype in (torch.bool, torch.uint8) for index in found):
        return []
    blocks: list[int] = []
    for number, index in enumerate(found):
        if not is_pretended(index):  # wrapped and multiplied on the host
            blocks.append(8 * count)
        else:  # wrapped, then times the stride
            blocks += [8 * count, 8 * count]
            blocks.append(-(_num_taken(blocks) - 1))
        if number:  # added to the linear index so far, in place
            blocks.append(-_num_taken(blocks))
    rows = math.prod(
        size for size, index in zip(given.shape, indices, strict=False) if index is not None
    )
    dense = [] if values.is_contiguous() else [values.numel() * values.element_size()]
    return [*blocks, *dense, 8 * count, 8 * count, 8 * count, _sort_bytes(count, rows)]


# cub's radix sort of pairs of 8 bytes each (dispatch_radix_sort.cuh, tuning of compute capability
# 8.0): one block sorts up to 256 x 9 of them alone, more go through passes of 8 bits in tiles of
# 384 x 10.
_SORTED_ALONE, _SORTED_AT_ONCE, _BITS, _ALIGNED_BYTES = 256 * 9, 384 * 10, 8, 256


def _sort_bytes(count: int, num_values: int) -> int:
    """Return what cub's radix sort takes for keys below `num_values` and their places."""
    if count <= _SORTED_ALONE:
        return 1
    num_passes = -(-max((num_values - 1).bit_length(), 1) // _BITS)
    num_bins = 1 << _BITS
    parts = [num_passes * num_bins * 8, -(-count // _SORTED_AT_ONCE) * num_bins * 4]
    if num_passes > 1:
        parts += [8 * count, 8 * count]
    parts.append(num_passes * 4)
    return sum(_up(part, _ALIGNED_BYTES) for part in parts) + _ALIGNED_BYTES - 1


# op -> (arguments) -> bytes of the blocks that its kernel takes, in this order; -n frees the n-th,
# and all that is left is freed before it returns
TEMPORARIES = {
    "_scaled_dot_product_flash_attention_backward": _flash_backward,
    "_scaled_dot_product_efficient_attention_backward": _efficient_backward,
    "embedding_dense_backward": _embedding_backward,
    "_softmax_backward_data": _softmax_backward,
    "_ctc_loss_backward": _ctc_backward,
    **dict.fromkeys(("index_put", "index_put_", "_index_put_impl_"), _sorted_index),
    "_cudnn_rnn": recurrent.forward_temporaries,
    "_cudnn_rnn_backward": recurrent.backward_temporaries,
    "binary_cross_entropy_with_logits": _binary_cross_entropy,
    "count_nonzero": _count_nonzero,
    "huber_loss": _before_the_mean,
    "logsumexp": _logsumexp,
    "mse_loss": _unreduced,
    "smooth_l1_loss": _unreduced,
}


# A convolution call -> its runs of cuDNN kernels, each with what it reads and writes.
# aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding,
# groups) is one run. aten::convolution_backward(gradient, input, weight, bias sizes, stride,
# padding, dilation, transposed, output_padding, groups, mask) is two runs, each once its own result
# is allocated: first the data gradient, then the filter gradient (Convolution.cpp,
# convolution_backward; ConvShared.cpp, cudnn_convolution_backward).

_BACKWARD: tuple[Direction, Direction] = ("data gradient", "filter gradient")
_OF_TRANSPOSED: dict[Direction, Direction] = {
    "forward": "data gradient",
    "data gradient": "forward",
    "filter gradient": "filter gradient",
}


def note_convolution(recorder: Recorder, name: str, args: Any, outputs: Any, output: Any) -> None:
    """Note the run whose result is `output`. Biases have no cuDNN run."""
    if not isinstance(output, torch.Tensor) or not is_pretended(output):
        return
    direction: Direction = "forward"
    if name == "convolution":
        source, weight, result = args[0], args[1], outputs[0]
        stride, _, dilation, is_transposed, _, groups = args[3:9]
    else:
        place = next(place for place, each in enumerate(outputs) if each is output)
        if place >= len(_BACKWARD):
            return
        direction = _BACKWARD[place]
        result, source, weight = args[:3]
        stride, _, dilation, is_transposed, _, groups = args[4:10]
    given = source
    if is_transposed:
        direction, source, result = _OF_TRANSPOSED[direction], result, source
    num_edges = source.dim() - 2
    recorder.convolutions.append(
        Convolution(
            at_event=len(recorder.events),
            direction=direction,
            dtype=str(source.dtype).removeprefix("torch."),
            input_shape=tuple(source.shape),
            weight_shape=tuple(weight.shape),
            output_shape=tuple(result.shape),
            stride=_of_each_edge(stride, num_edges),
            dilation=_of_each_edge(dilation, num_edges),
            groups=groups,
            is_channels_last=layout_of_convolution(given, weight) is not torch.contiguous_format,
        )
    )


def allows_tf32() -> bool:
    """Return whether convolutions in fp32 may use TF32."""
    ours = getattr(torch.backends.cudnn, "conv", None)  # since torch 2.9
    if ours is None:
        return bool(torch.backends.cudnn.allow_tf32)
    return bool(ours.fp32_precision == "tf32")


def _of_each_edge(numbers: Sequence[int], num_edges: int) -> tuple[int, ...]:
    """Return a number per edge; torch's functions take one for all."""
    return tuple(numbers) if len(numbers) == num_edges else (*numbers,) * num_edges
