"""cuDNN's recurrent networks, one call each, as torch makes them on CUDA.

After aten/src/ATen/native/cudnn/RNN.cpp: weights are views of one buffer, an input that comes
with the batch first is copied, backward returns views of one buffer of gradients. What cuDNN
keeps for backward (its reserve) is known to cuDNN alone: its size here is invented, and noted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oomph.tracing.pretend import Lie, is_pretended

aten = torch.ops.aten
_META = torch.device("meta")
_empty = torch._C._VariableFunctions.empty

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_GATES = (1, 1, 4, 3)
_LSTM = 2
_SIZE_IS_INVENTED = "cuDNN's reserve of a recurrent network is of an invented size"


def install(library: Any) -> None:
    """Let nn.LSTM, nn.GRU and nn.RNN on pretended tensors be cuDNN's."""
    for name in _MODES:
        library.impl(f"{name}.input", _of_input(name), "AutogradMeta", allow_override=True)
        library.impl(f"{name}.data", _of_packed(name), "AutogradMeta", allow_override=True)
    library.impl("_cudnn_rnn", _forward, "Meta", allow_override=True)
    library.impl("_cudnn_rnn_backward", _backward, "Meta", allow_override=True)
    torch.nn.RNNBase.flatten_parameters = _flatten_parameters  # type: ignore[method-assign, assignment]


# ---- one buffer of weights -------------------------------------------------------------------


def _flatten_parameters(module: Any) -> None:
    """Make the weights of a module views of one buffer, as its own method does on CUDA."""
    weights = module._flat_weights
    if Lie.suspended:  # it is being built, on the host
        return
    if not all(isinstance(w, torch.Tensor) and is_pretended(w) for w in weights):
        return
    if len({id(weight) for weight in weights}) != len(weights):
        return
    with torch.no_grad():
        missing = 0 if module.bias else _num_biases(module)
        count = sum(weight.numel() for weight in weights) + missing
        buffer = torch.zeros(count, dtype=weights[0].dtype, device="cuda")
        for weight, view in zip(weights, _views(buffer, weights), strict=True):
            weight.data = view


def _num_biases(module: Any) -> int:
    """cuDNN keeps room for biases, whether or not a module has them."""
    gates = _GATES[_MODES.get(module.mode.lower(), 0)]
    directions = 1 + bool(module.bidirectional)
    return 2 * gates * int(module.hidden_size) * int(module.num_layers) * directions


def _views(buffer: Any, weights: Sequence[Any]) -> Iterator[Any]:
    """Parts of a buffer in the shapes of weights. To autograd they are not views of it."""
    start = 0
    for weight in weights:
        part = _empty(0, dtype=buffer.dtype, device=_META)
        stride = torch._prims_common.make_contiguous_strides_for(weight.shape)
        yield part.set_(buffer.untyped_storage(), start, weight.shape, stride)
        start += weight.numel()


def _buffer_of(weights: Sequence[Any]) -> Any:
    """The buffer that all weights are views of, if they are."""
    storage = weights[0].untyped_storage()
    if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
        return None
    with torch.no_grad():
        return _empty(0, dtype=weights[0].dtype, device=_META).set_(storage)


# ---- what torch calls ------------------------------------------------------------------------


def _of_input(name: str) -> Any:
    def run(
        data: Any,
        hidden: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        options = (num_layers, batch_first, dropout, train, bidirectional)
        return _called(name, data, [], hidden, weights, has_biases, options)

    return run


def _of_packed(name: str) -> Any:
    def run(
        data: Any,
        batch_sizes: Any,
        hidden: Any,
        weights: Any,
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        options = (num_layers, False, dropout, train, bidirectional)
        return _called(name, data, batch_sizes.tolist(), hidden, weights, has_biases, options)

    return run


def _called(
    name: str,
    data: Any,
    batch_sizes: Any,
    hidden: Any,
    weights: Any,
    has_biases: bool,
    options: Any,
) -> Any:
    is_lstm = name == "lstm"
    hx: Any = hidden[0] if is_lstm else hidden
    cx: Any = hidden[1] if is_lstm else None
    is_projected = is_lstm and hx.size(2) != cx.size(2)
    width, projected = (cx.size(2), hx.size(2)) if is_projected else (hx.size(2), 0)
    per_layer = (4 if has_biases else 2) + is_projected
    shapes = (_MODES[name], width, projected)
    buffer = _buffer_of(weights)
    outputs = aten._cudnn_rnn(
        data, weights, per_layer, buffer, hx, cx, *shapes, *options, batch_sizes, None
    )
    return outputs[:3] if is_lstm else outputs[:2]


def cast_and_flattened(half: Any, cast: Any) -> Any:
    """Under autocast the weights are cast into a new buffer at each call (AutocastRNN.cpp)."""

    def run(
        data: Any, weights: Any, per_layer: int, buffer: Any, hx: Any, cx: Any, *rest: Any
    ) -> Any:
        if weights[0].dtype == torch.float32:
            flat = buffer if buffer is not None else sum(weight.numel() for weight in weights)
            count = flat if isinstance(flat, int) else flat.numel()
            buffer = torch.zeros(count, dtype=half, device="cuda")
            views = list(_views(buffer, weights))
            weights = [view.copy_(weight) for view, weight in zip(views, weights, strict=True)]
        hx, cx = cast(hx, half), cast(cx, half)
        return aten._cudnn_rnn(cast(data, half), weights, per_layer, buffer, hx, cx, *rest)

    return run


# ---- kernels ---------------------------------------------------------------------------------


# The arguments of _cudnn_rnn: 0 input, 1 weights, 3 their buffer, 4 hx, 5 cx, 6 mode, 7 hidden
# size, 8 projection, 9 layers, 10 batch first, 12 train, 13 bidirectional, 14 batch sizes.


def _forward(*args: Any) -> Any:
    data, weights, _, buffer, hx, cx, mode, width, projected, num_layers, batch_first = args[:11]
    _, train, bidirectional, batch_sizes, _ = args[11:]
    directions = 1 + bidirectional
    is_turned = batch_first and not batch_sizes
    rows = data.shape[:2][::-1] if is_turned else data.shape[:-1]
    output = data.new_empty((*rows, (projected or width) * directions))
    cells = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    # Of each step, layer and direction: the gates, and of an LSTM also the cell and its tanh.
    kept = _GATES[mode] + (2 if mode == _LSTM else 1)
    count = math.prod(rows) * width * num_layers * directions * kept * data.element_size()
    reserve = data.new_empty(count if train else 0, dtype=torch.uint8)
    if buffer is None:
        buffer = data.new_empty(sum(weight.numel() for weight in weights))
    output = output.transpose(0, 1) if is_turned else output
    return output, torch.empty_like(hx), cells, reserve, buffer


# The arguments of _cudnn_rnn_backward: 0 to 5 the same, 6 output, 7 to 9 the gradients of
# output, hy and cy, 14 batch first, the last which gradients are wanted.


def _backward(*args: Any) -> Any:
    data, weights, _, buffer, hx, cx = args[:6]
    batch_first, wanted = args[14], args[-1]
    if args[7] is None and args[8] is None and args[9] is None:
        return None, None, None, [None] * len(weights)
    of_data = data.transpose(0, 1) if batch_first else data
    of_data = torch.empty_like(of_data, memory_format=torch.contiguous_format)
    of_data = of_data.transpose(0, 1) if batch_first else of_data
    of_cells = None if cx is None else torch.empty_like(cx)
    of_weights = list(_views(torch.empty_like(buffer), weights)) if wanted[3] else []
    return of_data, torch.empty_like(hx), of_cells, of_weights


def forward_temporaries(args: Any) -> list[int]:
    """The input with the time first, where it came with the batch first."""
    return [_num_bytes(args[0])] if args[10] or not args[0].is_contiguous() else []


def backward_temporaries(args: Any) -> list[int]:
    """The same of the input and of the output's gradient; and zeros for gradients that lack."""
    data, hx, cx, of_output, of_hy, of_cy = (args[place] for place in (0, 4, 5, 7, 8, 9))
    blocks = [_num_bytes(args[6])] if of_output is None or args[14] else []
    blocks += [_num_bytes(data)] if args[14] else []
    blocks += [_num_bytes(hx)] if of_hy is None else []
    return blocks + ([_num_bytes(cx)] if cx is not None and of_cy is None else [])


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _noted(recorder: Any, *_: Any) -> Any:
    recorder.notes.add(_SIZE_IS_INVENTED)
    return NotImplemented


RULES = {"_cudnn_rnn": _noted}
