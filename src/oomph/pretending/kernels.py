"""The memory that kernels on a real GPU take beyond their tensors: temporaries and workspaces.

Each rule names its source. Convolutions are not included: cuDNN's workspace depends on the
algorithm that it chooses, so the prediction gives an interval for it.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.pretending import recurrent
from oomph.pretending.tensors import Recorder, is_pretended
from oomph.records.trace import Convolution, ConvolutionKind, Direction

# Embedding.cu: up to this many indices the kernel needs no sorting.
_INDICES_WITHOUT_SORTING = 3072

# kernel_backward.h, kOutputInRF: in half precision, heads up to the size of a query block.
_WIDEST_HEAD_IN_REGISTERS = 128

GEMMS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "addmv", "mv"})


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
    sorting = [8 * count, 8 * count, 16 * count + 65536, 8 * count]
    return [*sorting, 8, 8 * rows, 8 * rows, 8 * parts, 4 * parts * width]


def _ctc_backward(args: Any) -> list[int]:
    """Return the bytes of log_beta: log_alpha's (LossCTC.cu, ctc_loss_backward_gpu_template)."""
    log_alpha = args[6]
    return [log_alpha.numel() * log_alpha.element_size()]


def _unreduced(args: Any) -> list[int]:
    """Return the bytes of the unreduced loss (Loss.cpp, TORCH_IMPL_FUNC(mse_loss_out))."""
    return [args[0].numel() * args[0].element_size()]


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


# op -> (arguments) -> bytes of the blocks that its kernel takes and frees before it returns
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


# A convolution call -> its runs of cuDNN kernels, each with what it reads and writes.
# aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding,
# groups) is one run. Its backward is two runs, each once its own result is allocated: first the
# data gradient, then the filter gradient (Convolution.cpp, convolution_backward; ConvShared.cpp,
# cudnn_convolution_backward).

_GROUPS = {"convolution": 8, "convolution_backward": 9}  # index of this argument
_TENSORS = {"convolution": (0, 1), "convolution_backward": (1, 2)}  # indices of input and weight
_IMAGES = 4  # dimensions: batch, channel, row, column
_BACKWARD: tuple[Direction, Direction] = ("data gradient", "filter gradient")

# Tensor cores read channels 16 bytes at a time (cuDNN developer guide, "Tensor Core Operations":
# channels are padded to a multiple of 8 in half precision, of 4 in TF32).
_READ_AT_ONCE_BYTES = 16


def laid_out_as_cudnn_does(name: str, args: Any, out: Any) -> Any:
    """Return a convolution's results in the layout that they have on CUDA.

    They are channels last if the input or the weight is (ConvUtils.h,
    cudnn_conv_suggest_memory_format); on the meta device they never are.
    """
    if not any(is_channels_last(args[place]) for place in _TENSORS[name]):
        return out
    if isinstance(out, torch.Tensor):
        return _channels_last(out)
    return tuple(_channels_last(each) if isinstance(each, torch.Tensor) else each for each in out)


def _channels_last(tensor: Any) -> Any:
    has_channels = tensor.dim() == _IMAGES
    return tensor.contiguous(memory_format=torch.channels_last) if has_channels else tensor


def is_channels_last(tensor: Any) -> bool:
    """Return whether a tensor says so itself: edges of 1 have strides, too."""
    if tensor.dim() != _IMAGES:
        return False
    channels, stride = tensor.shape[1], tensor.stride()
    return bool(stride[1] == 1 and stride[3] == channels and tensor.shape[1:].numel() > 1)


def note_convolution(recorder: Recorder, name: str, args: Any, outputs: Any, output: Any) -> None:
    """Note the run whose result is `output`. Biases have no cuDNN run."""
    if not isinstance(output, torch.Tensor) or not is_pretended(output):
        return
    place = next(place for place, each in enumerate(outputs) if each is output)
    if name == "convolution_backward" and place >= len(_BACKWARD):
        return
    source, weight = (args[place] for place in _TENSORS[name])
    result = outputs[0] if name == "convolution" else args[0]
    recorder.convolutions.append(
        Convolution(
            at_event=len(recorder.events),
            direction="forward" if name == "convolution" else _BACKWARD[place],
            kind=_kind(source, weight, args[_GROUPS[name]]),
            dtype=str(source.dtype).removeprefix("torch."),
            input_bytes=_padded_bytes(source),
            weight_bytes=weight.numel() * weight.element_size(),
            output_bytes=_padded_bytes(result),
        )
    )


def _kind(source: Any, weight: Any, groups: int) -> ConvolutionKind:
    if groups > 1 and groups == source.shape[1]:
        return "depthwise"
    return "pointwise" if all(edge == 1 for edge in weight.shape[2:]) else "dense"


def _padded_bytes(tensor: Any) -> int:
    batch, channels = tensor.shape[:2]
    at_once = max(_READ_AT_ONCE_BYTES // int(tensor.element_size()), 1)
    padded = -(-channels // at_once) * at_once
    return int(batch * padded * tensor.shape[2:].numel() * tensor.element_size())
