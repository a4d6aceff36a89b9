"""Values that do not exist: what a pretended tensor answers when its contents are asked for.

Each answer is the cautious one for memory (every row of a mask is true), and is noted, so that
the user learns where the prediction rests on it.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.pretend import Lie, is_pretended

_META, _HOST = torch.device("meta"), torch.device("cpu")
_empty = torch._C._VariableFunctions.empty
_empty_like = torch.ops.aten.empty_like.default
_MASKS = (torch.bool, torch.uint8)


def _scalar(recorder: Any, _: Any, __: Any, args: Any, ___: Any) -> Any:
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    if getattr(tensor, "_oomph_is_true", False):
        recorder.notes.add("all(...) was asked of values on the GPU: taken as true")
        return True
    recorder.notes.add(
        "a value was read from the GPU (.item(), if loss > ...): taken as 0 or False"
    )
    if tensor.dtype == torch.bool:
        return False
    if tensor.is_complex():
        return 0j
    return 0.0 if tensor.is_floating_point() else 0


def _all(recorder: Any, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    out = recorder.fresh(behaviour, function, args, kwargs)
    out._oomph_is_true = True
    return out


def _equal(recorder: Any, _: Any, __: Any, args: Any, ___: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    recorder.notes.add("torch.equal(...) was asked of values on the GPU: taken as true")
    return True


def _nonzero(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    return _positions(recorder, behaviour, args[0]) if is_pretended(args[0]) else NotImplemented


def _positions(recorder: Any, behaviour: Any, mask: Any) -> Any:
    recorder.notes.add("the size of nonzero() or of a mask is unknown: taken as the most it can be")
    out = _empty((mask.dim(), mask.numel()), dtype=torch.int64, device=_META)
    recorder.track(out, behaviour.label)
    return out.t()


def _index(recorder: Any, behaviour: Any, function: Any, args: Any, _: Any) -> Any:
    """Indexing by a mask: as if every element were chosen. A mask on the host is known."""
    tensor, indices = args[0], args[1]
    if not is_pretended(tensor) or all(i is None or i.dtype not in _MASKS for i in indices):
        return NotImplemented
    positions: list[Any] = []
    for index in indices:
        if index is None or index.dtype not in _MASKS:
            positions.append(index)
        elif is_pretended(index):
            positions += _positions(recorder, behaviour, index).unbind(1)
        else:
            positions += index.nonzero().unbind(1)
    return recorder.fresh(behaviour, function, (tensor, positions), {})


def _masked_select(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    recorder.notes.add("the size of masked_select() is unknown: taken as the most it can be")
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    out = _empty((shape.numel(),), dtype=args[0].dtype, device=_META)
    recorder.track(out, behaviour.label)
    return out


def _dropout(recorder: Any, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Two outputs, without the decomposition that the meta device has."""
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    out = _empty_like(tensor)
    mask = _empty_like(tensor, dtype=torch.bool)
    for made in (out, mask):
        recorder.track(made, behaviour.label)
    recorder.note_work(behaviour, args, kwargs, (out, mask))
    return out, mask


def _random_like(recorder: Any, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    """Of that shape: the Python decomposition takes seconds to import."""
    if not is_pretended(args[0]):
        return NotImplemented
    out = _empty_like(args[0], dtype=kwargs.get("dtype"))
    recorder.track(out, behaviour.label)
    return out


def _random(recorder: Any, behaviour: Any, _: Any, args: Any, kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "meta":
        return NotImplemented
    size = next((arg for arg in args if isinstance(arg, list | tuple)), (args[0],))
    is_whole = behaviour.name in ("randint", "randperm")
    dtype = kwargs.get("dtype") or (torch.int64 if is_whole else torch.get_default_dtype())
    out = _empty(size, dtype=dtype, device=_META)
    recorder.track(out, behaviour.label)
    return out


def _scalar_tensor(_: Any, __: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """The 3 of `x[i] = 3` stays on the host."""
    if not Lie.in_setitem:
        return NotImplemented
    return function(*args, **{**kwargs, "device": _HOST})


# What answers for an op, or returns NotImplemented where it is an ordinary one after all.
RULES = {
    "_local_scalar_dense": _scalar,
    "is_nonzero": _scalar,
    "all": _all,
    "equal": _equal,
    "nonzero": _nonzero,
    "index": _index,
    "masked_select": _masked_select,
    "native_dropout": _dropout,
    "scalar_tensor": _scalar_tensor,
    "rand": _random,
    "randn": _random,
    "randint": _random,
    "randperm": _random,
    "rand_like": _random_like,
    "randn_like": _random_like,
    "randint_like": _random_like,
}
