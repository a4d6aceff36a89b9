"""Ops of CUDA that the meta device composes of others, refuses, or does not have.

Cells of recurrent networks, connectionist temporal classification, products of many experts.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.pretend import is_pretended


def install(library: Any) -> None:
    """Register them for pretended tensors."""
    branches = {"lstm_cell": _lstm_cell, "gru_cell": _gru_cell, "ctc_loss.Tensor": _ctc_loss}
    kernels = {
        "_thnn_fused_gru_cell": _fused_gru_cell,
        "_thnn_fused_gru_cell_backward": _fused_gru_cell_backward,
        "_ctc_loss_backward": _ctc_loss_backward,
        "_grouped_mm": _grouped_mm,
    }
    for name, function in branches.items():
        library.impl(name, function, "AutogradMeta", allow_override=True)
    for name, function in kernels.items():
        library.impl(name, function, "Meta", allow_override=True)


def _grouped_mm(
    one: Any, other: Any, offsets: Any = None, _: Any = None, out_dtype: Any = None
) -> Any:
    """Matrices of many experts at once. torch's own meta kernel refuses all but bfloat16.

    Rows start at multiples of 16 bytes (GroupedMMUtils.h, create_grouped_gemm_output_tensor).
    """
    rows, columns = one.shape[-2], other.shape[-1]
    if one.dim() == 2 and other.dim() == 2:
        shape = [offsets.shape[0], rows, columns]
    elif one.dim() == 3 and other.dim() == 3:
        shape = [one.shape[0], rows, columns]
    else:
        shape = [rows, columns]
    dtype = out_dtype or one.dtype
    per_row = 16 // dtype.itemsize
    width = -(-columns // per_row) * per_row
    return torch.empty(*shape[:-1], width, dtype=dtype, device="meta")[..., :columns]


# ---- cells (RNN.cpp: fused on CUDA) ----------------------------------------------------------


def _lstm_cell(
    tensor: Any,
    hidden: Any,
    of_input: Any,
    of_hidden: Any,
    b_input: Any = None,
    b_hidden: Any = None,
) -> Any:
    hx, cx = hidden
    gates = torch.matmul(tensor, of_input.t()), torch.matmul(hx, of_hidden.t())
    return torch.ops.aten._thnn_fused_lstm_cell(*gates, cx, b_input, b_hidden)[:2]


def _gru_cell(
    tensor: Any, hx: Any, of_input: Any, of_hidden: Any, b_input: Any = None, b_hidden: Any = None
) -> Any:
    gates = torch.matmul(tensor, of_input.t()), torch.matmul(hx, of_hidden.t())
    return torch.ops.aten._thnn_fused_gru_cell(*gates, hx, b_input, b_hidden)[0]


def _fused_gru_cell(gates: Any, _: Any, hx: Any, *__: Any) -> Any:
    workspace = gates.new_empty((hx.shape[0], hx.shape[1] * 5))  # GRU_WORKSPACE_MULTIPLIER
    return hx.new_empty(hx.shape), workspace


def _fused_gru_cell_backward(of_hy: Any, workspace: Any, has_bias: bool) -> Any:
    shape = (workspace.shape[0], of_hy.shape[1] * 3)
    of_input, of_hidden = workspace.new_empty(shape), workspace.new_empty(shape)
    biases = [workspace.new_empty(shape[1]) if has_bias else None for _ in range(2)]
    return of_input, of_hidden, of_hy.new_empty(of_hy.shape), *biases


# ---- connectionist temporal classification (LossCTC.cpp) -------------------------------------


def _ctc_loss(
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: int = 1,
    zero_infinity: bool = False,
) -> Any:
    """With lengths as lists. Those that are on the GPU are unknown: the longest."""
    inputs = _lengths(input_lengths, log_probs.shape[0])
    is_padded = targets.dim() > 1  # else the targets of all examples follow each other
    longest = targets.shape[-1] // (1 if is_padded else target_lengths.numel())
    outputs = _lengths(target_lengths, longest)
    return torch.ops.aten.ctc_loss.IntList(
        log_probs, targets, inputs, outputs, blank, reduction, zero_infinity
    )


def _lengths(lengths: Any, longest: int) -> list[int]:
    return [longest] * lengths.numel() if is_pretended(lengths) else lengths.tolist()


def _ctc_loss_backward(_: Any, log_probs: Any, *__: Any) -> Any:
    return torch.empty_like(log_probs, memory_format=torch.contiguous_format)
