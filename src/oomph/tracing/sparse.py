"""Sparse gradients, as of nn.Embedding(sparse=True): their copies keep their entries.

The meta kernels return copies without entries.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.pretend import is_pretended

_META = torch.device("meta")
_assemble = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default
_clone_dense = torch.ops.aten.clone.default


def _clone(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    tensor = args[0]
    if tensor.layout is not torch.sparse_coo or not is_pretended(tensor):
        return NotImplemented
    values = tensor._values()
    out = _assemble(
        tensor.sparse_dim(),
        tensor.dense_dim(),
        tensor.shape,
        _clone_dense(tensor._indices()),
        _clone_dense(values),
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=_META,
    )
    recorder.track(out, behaviour.label)
    return out


def _coalesce(recorder: Any, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """How many entries share a place is unknown: as if none did."""
    out = _clone(recorder, behaviour, function, args, kwargs)
    return out if out is NotImplemented else out._coalesced_(True)


RULES = {"clone": _clone, "_coalesce": _coalesce}
