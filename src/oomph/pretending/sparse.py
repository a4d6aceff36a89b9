"""Support sparse gradients, as of nn.Embedding(sparse=True), and their optimizers.

The meta kernels return copies without entries, or do not exist. Repeated tokens are unknown here: a
gradient has as many rows as there are tokens, but at most as many as the table.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from oomph.pretending.tensors import META, Recorder, is_pretended

_assemble = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_clone_dense = torch.ops.aten.clone.default
_empty = torch.ops.aten.empty.memory_format
_write_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_INDEX_BYTES = 8  # int64
GROWS = (
    "sparse gradients grow with every micro-step, and their momentum with every step:"
    " only two are counted"
)
ROWS = "rows of sparse gradients are counted as if no token occurred twice: the most there can be"


def _clone(recorder: Recorder, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    tensor = args[0]
    if tensor.layout is not torch.sparse_coo:
        return NotImplemented
    if _is_taken_over(tensor):
        return _with(tensor, tensor._indices(), tensor._values())
    if not is_pretended(tensor):
        return NotImplemented
    out = _with(tensor, _clone_dense(tensor._indices()), _clone_dense(tensor._values()))
    recorder.track(out, behaviour.label)
    return out


def _is_taken_over(gradient: Any) -> bool:
    """Return whether a gradient becomes a parameter's first gradient without a copy.

    A dispatch mode prevents that, because it holds its arguments and AccumulateGrad copies what
    others hold (torch/csrc/autograd/functions/accumulate_grad.h, accumulateGrad).
    """
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled() or "AccumulateGrad" not in node.name():
        return False
    return bool(gradient._indices().is_contiguous() and gradient._values().is_contiguous())


def _with(tensor: Any, indices: Any, values: Any) -> Any:
    """Return a tensor of the same shape with other entries."""
    return _assemble(
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=META if is_pretended(values) else values.device,  # it would say cuda
    )


def _coalesce(recorder: Recorder, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    """Merge entries with equal indices, as in SparseCUDATensor.cu, _coalesce_sparse_cuda.

    How much more its sort takes is unknown; that is freed before the new values are allocated.
    """
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    num_entries = tensor._nnz()
    num_rows = min(num_entries, math.prod(tensor.shape[: tensor.sparse_dim()]))
    recorder.notes.add(ROWS)
    indices = _empty([tensor.sparse_dim(), num_entries], dtype=torch.int64, device=META)
    recorder.track(indices, behaviour.label)
    sorted_by = [recorder.allocate(num_entries * _INDEX_BYTES, behaviour.label) for _ in range(2)]
    values = tensor._values()
    values = _empty([num_rows, *values.shape[1:]], dtype=values.dtype, device=META)
    recorder.track(values, behaviour.label)
    for number in reversed(sorted_by):
        recorder.free(number)
    return _with(tensor, indices[:, :num_rows], values)._coalesced_(True)


def _sparse_mask(recorder: Recorder, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    """Select a table's rows at a gradient's indices, as in SparseTensor.cpp, sparse_mask.

    It multiplies the table by a sparse tensor: this takes a scalar 1, the rows, a copy of the
    indices and the product.
    """
    table, mask = args[:2]
    if not is_pretended(mask) or table.layout is not torch.strided:
        return NotImplemented
    values = mask._values()
    size_bytes = values.numel() * table.element_size()
    taken = [recorder.allocate(bytes_, behaviour.label) for bytes_ in (values.itemsize, size_bytes)]
    product = _empty(list(values.shape), dtype=table.dtype, device=META)
    out = _with(mask, _clone_dense(mask._indices()), product)
    recorder.track(out, behaviour.label)
    for number in reversed(taken):
        recorder.free(number)
    return out._coalesced_(mask.is_coalesced())


def change(recorder: Recorder, behaviour: Any, function: Any, args: Any, kwargs: Any) -> None:
    """Change a sparse tensor in place, which may give it another storage.

    Adding appends the entries, even at equal indices (SparseCUDATensorMath.cu,
    add_out_sparse_cuda).
    """
    tensor = args[0]
    if not is_pretended(tensor):
        function(*args, **kwargs)
        recorder.track(tensor, behaviour.label)
        return
    recorder.note_work(behaviour, args, kwargs, ())
    other = args[1] if len(args) > 1 else None
    if behaviour.name == "zero_":
        _set_entries(recorder, behaviour, tensor, 0)
    elif behaviour.name == "add_" and isinstance(other, torch.Tensor) and other.is_sparse:
        recorder.notes.add(GROWS)
        _set_entries(recorder, behaviour, tensor, tensor._nnz() + other._nnz())
        if tensor._nnz() > tensor.numel():
            fewer = _coalesce(recorder, behaviour, function, args, kwargs)
            _write_data(tensor, _with(tensor, fewer._indices(), fewer._values()))


def _set_entries(recorder: Recorder, behaviour: Any, tensor: Any, num_entries: int) -> None:
    values = tensor._values()
    indices = _empty([tensor.sparse_dim(), num_entries], dtype=torch.int64, device=META)
    values = _empty([num_entries, *values.shape[1:]], dtype=values.dtype, device=META)
    changed = _with(tensor, indices, values)
    recorder.track(changed, behaviour.label)
    _write_data(tensor, changed)


RULES = {"clone": _clone, "_coalesce": _coalesce, "sparse_mask": _sparse_mask}
