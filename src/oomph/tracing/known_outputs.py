"""The outputs of calls that were seen, made again without the meta kernel, which is slow."""

from __future__ import annotations

import functools
from typing import Any

import torch

from oomph.tracing.pretend import is_pretended

_META = torch.device("meta")
_empty_strided = torch._C._VariableFunctions.empty_strided
_UNFIT = object()


class KnownOutputs:
    """Calls, and how to make what they returned."""

    def __init__(self) -> None:
        self._recipes: dict[Any, _Recipe] = {}

    def make(self, key: Any) -> tuple[Any, list[Any]] | None:
        """The result of a call and the tensors in it, if such a call was seen."""
        recipe = self._recipes.get(key)
        return None if recipe is None else recipe.make()

    def remember(self, key: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Remember a call, if all that it returns is fresh."""
        kind = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
        if kind not in (torch.Tensor, tuple, list):
            return
        taken = {
            tensor.untyped_storage()._cdata
            for tensor in tensors_in((args, kwargs))
            if tensor.layout is torch.strided
        }
        specs = [_spec_of(output, taken) for output in leaves_of(out)]
        if _UNFIT not in specs:
            self._recipes[key] = _Recipe(kind, specs)


@functools.cache
def shared(default_dtype: torch.dtype) -> KnownOutputs:  # noqa: ARG001 - one for each
    """What this process has seen. Calls that name no dtype depend on the default one."""
    return KnownOutputs()


class _Recipe:
    __slots__ = ("_kind", "_specs")

    def __init__(self, kind: type, specs: list[Any]) -> None:
        self._kind, self._specs = kind, specs

    def make(self) -> tuple[Any, list[Any]]:
        made = [
            None if spec is None else _empty_strided(spec[0], spec[1], dtype=spec[2], device=_META)
            for spec in self._specs
        ]
        if self._kind is torch.Tensor:
            return made[0], made
        return self._kind(made), made


def _spec_of(output: Any, taken: set[int]) -> Any:
    """Shape, strides and dtype of an output that is all of a storage of its own."""
    if output is None:
        return None
    if not isinstance(output, torch.Tensor) or not is_pretended(output):
        return _UNFIT
    if output.layout is not torch.strided or output.storage_offset():
        return _UNFIT
    storage = output.untyped_storage()
    if storage._cdata in taken:
        return _UNFIT
    taken.add(storage._cdata)
    spec = (tuple(output.shape), output.stride(), output.dtype)
    again = _empty_strided(spec[0], spec[1], dtype=spec[2], device=_META)
    return spec if again.untyped_storage().nbytes() == storage.nbytes() else _UNFIT


def key_of(function: Any, args: Any, kwargs: Any) -> Any:
    """What decides the shapes that a call returns; None if its shapes are not decided by it."""
    try:
        if kwargs:
            return (function, _parts(args), _parts(kwargs.values()), *kwargs)
        return (function, _parts(args))
    except _Undecided:
        return None


class _Undecided(Exception):
    """An argument is a tensor on the host, whose values may decide shapes, or no plain value.

    A storage or a generator must not stay alive because a call with it is remembered.
    """


_PLAIN = frozenset(
    {
        int,
        float,
        bool,
        complex,
        str,
        type(None),
        torch.dtype,
        torch.device,
        torch.layout,
        torch.memory_format,
    }
)


def _parts(values: Any) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            on_gpu = is_pretended(value)
            if not on_gpu and value.dim():
                raise _Undecided
            parts.append((value.shape, value.stride(), value.dtype, on_gpu))
        elif isinstance(value, list | tuple):
            parts.append(_parts(value))
        elif value.__class__ in _PLAIN:
            parts.append((value.__class__, value))  # 1, 1.0 and True are different calls
        else:
            raise _Undecided
    return tuple(parts)


def leaves_of(out: Any) -> list[Any]:
    """What an op returns, one by one. Some return a list among other things."""
    if not isinstance(out, list | tuple):
        return [out]
    leaves: list[Any] = []
    for item in out:
        if isinstance(item, list | tuple):
            leaves += item
        else:
            leaves.append(item)
    return leaves


def tensors_in(values: Any) -> list[Any]:
    """The tensors among arguments."""
    found: list[Any] = []
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple | dict):
            found += tensors_in(value)
    return found
