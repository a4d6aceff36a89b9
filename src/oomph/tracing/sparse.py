"""Sparse gradients, as of nn.Embedding(sparse=True), and what optimizers for them ask of them.

The meta kernels return copies without entries, or do not exist. How many tokens are the same is
not asked: a gradient has as many rows as there are tokens, and no more than the table has.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from oomph.tracing.pretend import is_pretended

_META = torch.device("meta")
_assemble = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_clone_dense = torch.ops.aten.clone.default
_empty = torch.ops.aten.empty.memory_format
_write_data = torch._C.TensorBase.data.__set__  # type: ignore[attr-defined]
_INDEX_BYTES = 8  # of int64
GROWS = (
    "sparse gradients grow with every micro-step, and a momentum of them with every step:"
    " only two are counted"
)
ROWS = "rows of sparse gradients are taken as the most there can be: as if no token came twice"


def _clone(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
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
    """Whether it becomes a parameter's first gradient as it is, which a dispatch mode prevents.

    A mode holds what it is asked about, and AccumulateGrad copies what others hold
    (torch/csrc/autograd/functions/accumulate_grad.h, accumulateGrad).
    """
    node = torch._C._current_autograd_node()
    if node is None or torch.is_grad_enabled() or "AccumulateGrad" not in node.name():
        return False
    return bool(gradient._indices().is_contiguous() and gradient._values().is_contiguous())


def _with(tensor: Any, indices: Any, values: Any) -> Any:
    """A tensor of the same shape with other entries."""
    return _assemble(
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=_META if is_pretended(values) else values.device,  # it would say cuda
    )


def _coalesce(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    """Equal places put together: SparseCUDATensor.cu, _coalesce_sparse_cuda.

    What its sort takes beside is not known, and is given back before the new values are there.
    """
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    num_entries = tensor._nnz()
    num_rows = min(num_entries, math.prod(tensor.shape[: tensor.sparse_dim()]))
    recorder.notes.add(ROWS)
    indices = _empty([tensor.sparse_dim(), num_entries], dtype=torch.int64, device=_META)
    recorder.track(indices, behaviour.label)
    sorted_by = [recorder.allocate(num_entries * _INDEX_BYTES, behaviour.label) for _ in range(2)]
    values = tensor._values()
    values = _empty([num_rows, *values.shape[1:]], dtype=values.dtype, device=_META)
    recorder.track(values, behaviour.label)
    for number in reversed(sorted_by):
        recorder.free(number)
    return _with(tensor, indices[:, :num_rows], values)._coalesced_(True)


def _sparse_mask(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    """The rows of a table at the places of a gradient: SparseTensor.cpp, sparse_mask.

    It is the table times a sparse one: a figure 1, the rows, a copy of the places, the product.
    """
    table, mask = args[:2]
    if not is_pretended(mask) or table.layout is not torch.strided:
        return NotImplemented
    values = mask._values()
    size_bytes = values.numel() * table.element_size()
    taken = [recorder.allocate(bytes_, behaviour.label) for bytes_ in (values.itemsize, size_bytes)]
    product = _empty(list(values.shape), dtype=table.dtype, device=_META)
    out = _with(mask, _clone_dense(mask._indices()), product)
    recorder.track(out, behaviour.label)
    for number in reversed(taken):
        recorder.free(number)
    return out._coalesced_(mask.is_coalesced())


def change(recorder: Any, behaviour: Any, function: Any, args: Any, kwargs: Any) -> None:
    """Change a sparse tensor in place, which may be another storage.

    What is added is appended, equal places or not: SparseCUDATensorMath.cu, add_out_sparse_cuda.
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


def _set_entries(recorder: Any, behaviour: Any, tensor: Any, num_entries: int) -> None:
    values = tensor._values()
    indices = _empty([tensor.sparse_dim(), num_entries], dtype=torch.int64, device=_META)
    values = _empty([num_entries, *values.shape[1:]], dtype=values.dtype, device=_META)
    changed = _with(tensor, indices, values)
    recorder.track(changed, behaviour.label)
    _write_data(tensor, changed)


RULES = {"clone": _clone, "_coalesce": _coalesce, "sparse_mask": _sparse_mask}
