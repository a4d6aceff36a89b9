"""Ops on the GPU whose results, or the shapes of them, are decided by values.

Where the values are known, they decide. Where they are not, `unknown_values` takes the most that it
can be, and it is noted under the script's own line.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from oomph.tracing.behaviour import Behaviour
from oomph.tracing.pretend import is_pretended
from oomph.tracing.unknown_values import is_by_value, made_like, pretended_like

_META, _HOST = torch.device("meta"), torch.device("cpu")
_empty_strided = torch._C._VariableFunctions.empty_strided
_empty = torch._C._VariableFunctions.empty
_full = torch._C._VariableFunctions.full
_MASKS = (torch.bool, torch.uint8)
_JOINS = frozenset({"mul", "logical_and", "bitwise_and", "__and__"})
_TURNS = frozenset({"logical_not", "bitwise_not"})
_REFUSED = frozenset({"bincount", "unique_dim", "repeat_interleave", "nonzero_static"})


def decided(recorder: Any, behaviour: Behaviour, function: Any, args: Any, kwargs: Any) -> Any:
    """The result of such an op; NotImplemented for all others."""
    name = behaviour.name
    if name == "equal":
        return _equal(recorder, args)
    if name == "copy_" and not is_pretended(args[0]):
        return _copied_to_host(recorder, args)
    if name == "index" and any(_is_mask(index) for index in args[1]):
        return _index(recorder, behaviour, function, args)
    if name == "masked_select":
        return _masked_select(recorder, behaviour, function, args)
    if not is_by_value(function):
        return NotImplemented
    if recorder.shadows.knows(args, kwargs):
        return made_like(recorder, behaviour, recorder.shadows.computed(function, args, kwargs))
    return _at_most(recorder, behaviour, args, kwargs)


def _equal(recorder: Any, args: Any) -> bool:
    if recorder.shadows.knows(args, {}):
        return bool(recorder.shadows.computed(torch.ops.aten.equal.default, args, {}))
    recorder.inventions.note("equal: True")
    return True


def _copied_to_host(recorder: Any, args: Any) -> Any:
    source = recorder.shadows.of(args[1])
    if source is None:
        value = recorder.inventions.value_of(args[1])
        source = _full((), value, dtype=args[1].dtype, device=_HOST)
    return args[0].copy_(source)


def _at_most(recorder: Any, behaviour: Behaviour, args: Any, kwargs: Any) -> Any:
    """Counts and distinct values of what is unknown: every value is one of its own."""
    given = args[0]
    if behaviour.rule is not None or not is_pretended(given):
        return NotImplemented
    minlength = args[2] if len(args) > 2 else kwargs.get("minlength", 0)
    if behaviour.name == "bincount" and minlength:
        recorder.inventions.note("bincount: no value beyond minlength")
        return _made(recorder, behaviour, (minlength,), torch.int64)
    if behaviour.name in ("_unique2", "unique_consecutive"):
        recorder.inventions.note("unique: every value is one of its own")
        shapes = ((given.numel(),), tuple(given.shape), (given.numel(),))
        dtypes = (given.dtype, torch.int64, torch.int64)
        return tuple(
            _made(recorder, behaviour, shape, dtype)
            for shape, dtype in zip(shapes, dtypes, strict=True)
        )
    if behaviour.name not in _REFUSED:
        return NotImplemented
    raise NotImplementedError(
        f"values of the model, which do not exist here, decide the shape of {behaviour.label}"
    )


def _made(recorder: Any, behaviour: Behaviour, shape: tuple[int, ...], dtype: Any) -> Any:
    out = _empty(shape, dtype=dtype, device=_META)
    recorder.track(out, behaviour.label)
    return out


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in _MASKS


def _index(recorder: Any, behaviour: Behaviour, function: Any, args: Any) -> Any:
    """Indexing by a mask whose values are known: so many rows as there are."""
    if not is_pretended(args[0]):
        return NotImplemented
    positions: list[Any] = []
    for index in args[1]:
        if not _is_mask(index):
            positions.append(index)
            continue
        known = recorder.shadows.of(index) if is_pretended(index) else index
        if known is None:
            return NotImplemented
        chosen = known.nonzero()
        if is_pretended(index):
            chosen = pretended_like(recorder, chosen, behaviour.label)
        positions += chosen.unbind(1)
    out = recorder.fresh(behaviour, function, (args[0], positions), {})
    recorder.shadows.follow(function, args, {}, out)
    return out


def _masked_select(recorder: Any, behaviour: Behaviour, function: Any, args: Any) -> Any:
    known = recorder.shadows.of(args[1]) if is_pretended(args[1]) else args[1]
    if known is None or not is_pretended(args[0]):
        return NotImplemented
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    num_chosen = int(known.expand(shape).sum())
    out = _empty_strided((num_chosen,), (1,), dtype=args[0].dtype, device=_META)
    recorder.track(out, behaviour.label)
    recorder.shadows.follow(function, args, {}, out)
    return out


def note_truth(name: str, args: Any, out: Any) -> None:
    """Only what says that all is well is true: `isfinite(x)` is (x == x) * (|x| != inf)."""
    if not isinstance(out, torch.Tensor) or out.dtype != torch.bool:
        return
    if name in _JOINS:
        is_true = all(_is_true(arg) for arg in args[:2])
    elif name == "eq":
        is_true = args[0] is args[1]
    elif name == "ne":
        is_true = isinstance(args[1], float) and math.isinf(args[1])
    elif name in _TURNS:
        is_true = not _is_true(args[0])
    else:
        is_true = name == "all"
    if is_true:
        out._oomph_is_true = True  # type: ignore[attr-defined]


def _is_true(arg: Any) -> bool:
    return bool(getattr(arg, "_oomph_is_true", False))
