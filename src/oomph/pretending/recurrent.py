"""Run nn.LSTM, nn.GRU and nn.RNN as single cuDNN calls, as torch does on CUDA.

Follows aten/src/ATen/native/cudnn/RNN.cpp: weights are views of one buffer, a batch-first input is
copied, backward returns views of one gradient buffer. Only cuDNN knows the size of what it keeps
for backward (its reserve); the size here is an assumption, and a note says so.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from oomph.pretending.tensors import (
    META,
    Disguise,
    Recorder,
    empty,
    is_pretended,
    with_named_arguments,
)

aten = torch.ops.aten

_MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # cudnnRNNMode_t
_GATES = (1, 1, 4, 3)
_LSTM = 2
_SIZE_IS_ASSUMED = "the size of cuDNN's reserve for recurrent layers is assumed, not known"


def install(library: Any) -> None:
    """Make nn.LSTM, nn.GRU and nn.RNN use cuDNN's ops on pretended tensors."""
    for name in _MODES:
        for overload in ("input", "data"):  # of a tensor, and of a packed sequence
            op = getattr(getattr(aten, name), overload)
            run = with_named_arguments(op, functools.partial(_called, name))
            library.impl(f"{name}.{overload}", run, "AutogradMeta", allow_override=True)
    for name, kernel in (("_cudnn_rnn", _forward), ("_cudnn_rnn_backward", _backward)):
        run = with_named_arguments(getattr(aten, name).default, kernel)
        library.impl(name, run, "Meta", allow_override=True)
    torch.nn.RNNBase.flatten_parameters = _flatten_parameters  # type: ignore[method-assign, assignment]


# ---- one buffer of weights -------------------------------------------------------------------


def _flatten_parameters(module: Any) -> None:
    """Make a module's weights views of one buffer, as its own method does on CUDA."""
    weights = module._flat_weights
    if Disguise.suspended:  # the module is being built, on the host
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
    """Count the biases; cuDNN reserves room for them even if a module has none."""
    gates = _GATES[_MODES.get(module.mode.lower(), 0)]
    directions = 1 + bool(module.bidirectional)
    return 2 * gates * int(module.hidden_size) * int(module.num_layers) * directions


def _views(buffer: Any, weights: Sequence[Any]) -> Iterator[Any]:
    """Yield slices of a buffer in the weights' shapes. To autograd they are not views of it."""
    start = 0
    for weight in weights:
        part = empty(0, dtype=buffer.dtype, device=META)
        stride = torch._prims_common.make_contiguous_strides_for(weight.shape)
        yield part.set_(buffer.untyped_storage(), start, weight.shape, stride)
        start += weight.numel()


def _buffer_of(weights: Sequence[Any]) -> Any:
    """Return the buffer that all weights are views of, if there is one."""
    storage = weights[0].untyped_storage()
    if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
        return None
    with torch.no_grad():
        return empty(0, dtype=weights[0].dtype, device=META).set_(storage)


# ---- the functions that torch calls ----------------------------------------------------------


def _called(name: str, call: Any) -> Any:
    """Run one of these functions, on a tensor or on a packed sequence, as cuDNN's op."""
    is_lstm, is_packed = name == "lstm", hasattr(call, "batch_sizes")
    hx: Any = call.hx[0] if is_lstm else call.hx
    cx: Any = call.hx[1] if is_lstm else None
    is_projected = is_lstm and hx.size(2) != cx.size(2)
    width, projected = (cx.size(2), hx.size(2)) if is_projected else (hx.size(2), 0)
    per_layer = (4 if call.has_biases else 2) + is_projected
    outputs = aten._cudnn_rnn(
        call.data if is_packed else call.input,
        call.params,
        per_layer,
        _buffer_of(call.params),
        hx,
        cx,
        *(_MODES[name], width, projected, call.num_layers),
        False if is_packed else call.batch_first,
        *(call.dropout, call.train, call.bidirectional),
        call.batch_sizes.tolist() if is_packed else [],
        None,
    )
    return outputs[:3] if is_lstm else outputs[:2]


def cast_and_flattened(half: Any, cast: Any) -> Any:
    """Cast the weights into a new buffer at each call under autocast (AutocastRNN.cpp)."""

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


def _forward(call: Any) -> Any:
    data, width, hx, cx = call.input, call.hidden_size, call.hx, call.cx
    directions = 1 + call.bidirectional
    is_turned = call.batch_first and not call.batch_sizes
    rows = data.shape[:2][::-1] if is_turned else data.shape[:-1]
    output = data.new_empty((*rows, (call.proj_size or width) * directions))
    cells = hx.new_empty(0) if cx is None else torch.empty_like(cx)
    # Per step, layer and direction: the gates, and for an LSTM also the cell and its tanh.
    kept = _GATES[call.mode] + (2 if call.mode == _LSTM else 1)
    count = math.prod(rows) * width * call.num_layers * directions * kept * data.element_size()
    reserve = data.new_empty(count if call.train else 0, dtype=torch.uint8)
    buffer = call.weight_buf
    if buffer is None:
        buffer = data.new_empty(sum(weight.numel() for weight in call.weight))
    output = output.transpose(0, 1) if is_turned else output
    return output, torch.empty_like(hx), cells, reserve, buffer


def _backward(call: Any) -> Any:
    if call.grad_output is None and call.grad_hy is None and call.grad_cy is None:
        return None, None, None, [None] * len(call.weight)
    of_data = call.input.transpose(0, 1) if call.batch_first else call.input
    of_data = torch.empty_like(of_data, memory_format=torch.contiguous_format)
    of_data = of_data.transpose(0, 1) if call.batch_first else of_data
    of_cells = None if call.cx is None else torch.empty_like(call.cx)
    of_weights: list[Any] = []
    if call.output_mask[3]:
        of_weights += _views(torch.empty_like(call.weight_buf), call.weight)
    return of_data, torch.empty_like(call.hx), of_cells, of_weights


# Positions in _cudnn_rnn: 0 input, 10 batch first. In its backward: 0 input, 4 hx, 5 cx, 6 output,
# 7 to 9 the gradients of output, hy and cy, 14 batch first.


def forward_temporaries(args: Any) -> list[int]:
    """Return the bytes of the time-first copy of a batch-first input."""
    return [_num_bytes(args[0])] if args[10] or not args[0].is_contiguous() else []


def backward_temporaries(args: Any) -> list[int]:
    """Return the bytes of time-first copies, and of zeros for missing gradients."""
    data, hx, cx, of_output, of_hy, of_cy = (args[place] for place in (0, 4, 5, 7, 8, 9))
    blocks = [_num_bytes(args[6])] if of_output is None or args[14] else []
    blocks += [_num_bytes(data)] if args[14] else []
    blocks += [_num_bytes(hx)] if of_hy is None else []
    return blocks + ([_num_bytes(cx)] if cx is not None and of_cy is None else [])


def _num_bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())


def _noted(recorder: Recorder, *_: Any) -> Any:
    recorder.notes.add(_SIZE_IS_ASSUMED)
    return NotImplemented


RULES = {"_cudnn_rnn": _noted}
