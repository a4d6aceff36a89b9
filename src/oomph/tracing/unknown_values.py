"""Values that do not exist: what a pretended tensor answers when its contents are asked for.

Each answer is the cautious one for memory (every row of a mask is true), and is noted, so that
the user learns where the prediction rests on it.
"""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.known_outputs import leaves_of, tensors_in
from oomph.tracing.pretend import Lie, is_pretended

_META, _HOST = torch.device("meta"), torch.device("cpu")
_empty = torch._C._VariableFunctions.empty
_empty_strided = torch._C._VariableFunctions.empty_strided
_empty_like = torch.ops.aten.empty_like.default
_MASKS = (torch.bool, torch.uint8)


_BY_VALUE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)


def is_by_value(function: Any) -> bool:
    """Do values decide what it returns, or the shape of that?"""
    return any(tag in function.tags for tag in _BY_VALUE)


def decided_by_values(recorder: Any, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """`unique`, `bincount`, `allclose`, ... where the values are known."""
    if not any(map(is_pretended, tensors_in((args, kwargs)))):
        return NotImplemented
    if recorder.shadows.knows(args, kwargs):
        return made_like(recorder, behaviour, recorder.shadows.computed(function, args, kwargs))
    if behaviour.name == "allclose":
        recorder.note_unknown(
            "torch.allclose(...) of values on the GPU: taken as true", "allclose: True"
        )
        return True
    return NotImplemented


def made_like(recorder: Any, behaviour: Any, value: Any) -> Any:
    """Pretended tensors for results that are known."""
    if not isinstance(value, torch.Tensor | tuple | list):
        return value
    made = [pretended_like(recorder, one, behaviour.label) for one in leaves_of(value)]
    return made[0] if isinstance(value, torch.Tensor) else type(value)(made)


def pretended_like(recorder: Any, value: Any, label: str) -> Any:
    """A pretended tensor of known values."""
    out = _empty_strided(value.size(), value.stride(), dtype=value.dtype, device=_META)
    recorder.track(out, label)
    recorder.shadows.carry(out, value)
    return out


def _scalar(recorder: Any, _: Any, __: Any, args: Any, ___: Any) -> Any:
    tensor = args[0]
    if not is_pretended(tensor):
        return NotImplemented
    known = recorder.shadows.of(tensor)
    if known is not None:
        return known.item()
    if getattr(tensor, "_oomph_is_true", False):
        recorder.note_unknown("all(...) was asked of values on the GPU: taken as true", "True")
        return True
    value = torch.zeros((), dtype=tensor.dtype, device=_HOST).item()
    recorder.note_unknown(
        f"a value was read from the GPU (.item(), if loss > ...): taken as {value}", repr(value)
    )
    return value


def _all(recorder: Any, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    out = recorder.fresh(behaviour, function, args, kwargs)
    out._oomph_is_true = True
    return out


def _equal(recorder: Any, _: Any, __: Any, args: Any, ___: Any) -> Any:
    if not is_pretended(args[0]):
        return NotImplemented
    if recorder.shadows.knows(args, {}):
        return recorder.shadows.computed(torch.ops.aten.equal.default, args, {})
    recorder.note_unknown("torch.equal(...) of values on the GPU: taken as true", "equal: True")
    return True


def _nonzero(recorder: Any, behaviour: Any, _: Any, args: Any, __: Any) -> Any:
    return _positions(recorder, behaviour, args[0]) if is_pretended(args[0]) else NotImplemented


def _positions(recorder: Any, behaviour: Any, mask: Any) -> Any:
    recorder.note_unknown(
        "the size of nonzero() or of a mask: taken as the most it can be", "every element of a mask"
    )
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
    recorder.note_unknown(
        "the size of masked_select(): taken as the most it can be", "every element of a mask"
    )
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
