"""A call of a convolution -> the runs of cuDNN's kernels in it, each with what it reads and writes.

aten::convolution(input, weight, bias, stride, padding, dilation, transposed, output_padding,
groups) is one run. Its backward is two, each when its own result has its memory: the gradient of
the data and then that of the filter (Convolution.cpp, convolution_backward; ConvShared.cpp,
cudnn_convolution_backward).
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.records.trace import Convolution, ConvolutionKind, Direction
from oomph.tracing.pretend import is_pretended

_GROUPS = {"convolution": 8, "convolution_backward": 9}  # the place of this argument
_TENSORS = {"convolution": (0, 1), "convolution_backward": (1, 2)}  # of input and weight
_BACKWARD: tuple[Direction, Direction] = ("data gradient", "filter gradient")

# Tensor cores read channels 16 bytes at a time (cuDNN developer guide, "Tensor Core Operations":
# channels are padded to a multiple of 8 in half precision, of 4 in TF32).
_READ_AT_ONCE_BYTES = 16


def note_convolution(recorder: Any, name: str, args: Any, outputs: Any, output: Any) -> None:
    """Note the run whose result is `output`. Biases have no run of cuDNN's."""
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
