"""A call -> the bytes of the storages that it will make, before it is made.

Asked of torch's meta kernels once for each kind of call, then remembered; where the real kernel
made others, those are remembered instead. None where nobody knows before: the values decide
(nonzero), or there is no meta kernel.
"""

from __future__ import annotations

from typing import Any

import torch

_META = torch.device("meta")
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
_NOT_ASKED = object()
# What a meta kernel may raise where it cannot know: it is written by many, and for many reasons.
_UNKNOWN = (RuntimeError, NotImplementedError, TypeError, ValueError, AssertionError, KeyError)


class Sizes:
    """What calls make."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, ...] | None] = {}

    def key_of(self, op: Any, args: Any, kwargs: Any) -> Any:
        """What decides the shapes that a call returns, the values of tensors apart."""
        dtype = torch.get_default_dtype()
        if kwargs:
            return (op, dtype, _parts(args), _parts(kwargs.values()), *kwargs)
        return (op, dtype, _parts(args))

    def of(self, key: Any, function: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
        """The bytes of each new storage, in order."""
        sizes: Any = self._known.get(key, _NOT_ASKED)
        if sizes is _NOT_ASKED:
            sizes = self._known[key] = _asked(function, args, kwargs)
        return sizes  # type: ignore[no-any-return]

    def correct(self, key: Any, sizes: tuple[int, ...]) -> None:
        """A call made other storages than its meta kernel said."""
        self._known[key] = sizes


def _parts(values: Any) -> tuple[Any, ...]:
    parts: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout is torch.strided:
                parts.append((value.shape, value.stride(), value.dtype))
            else:
                parts.append((value.shape, value.layout, value.dtype))
        elif value.__class__ in _PLAIN:
            parts.append((value.__class__, value))  # 1, 1.0 and True are different calls
        elif isinstance(value, list | tuple):
            parts.append(_parts(value))
        else:  # a generator or a storage, which must not stay alive because of a key
            parts.append(value.__class__)
    return tuple(parts)


def _asked(function: Any, args: Any, kwargs: Any) -> tuple[int, ...] | None:
    if torch.Tag.dynamic_output_shape in function.tags:
        return None
    given: set[int] = set()
    try:
        with torch.no_grad():
            out = function(*_as_meta(args, given), **_keywords(kwargs, given))
        return tuple(_new_sizes(out, given))
    except _UNKNOWN:
        return None


def _keywords(kwargs: Any, given: set[int]) -> dict[str, Any]:
    keywords = {
        name: value
        for (name, _), value in zip(kwargs.items(), _as_meta(kwargs.values(), given), strict=True)
        if name not in ("pin_memory", "generator")
    }
    if not given or keywords.get("device") is not None:
        keywords["device"] = _META
    return keywords


def _as_meta(values: Any, given: set[int]) -> list[Any]:
    made: list[Any] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            twin = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=_META)
            given.add(twin.untyped_storage()._cdata)
            made.append(twin)
        elif isinstance(value, list | tuple):
            made.append(_as_meta(value, given))
        else:
            made.append(value)
    return made


def _new_sizes(out: Any, given: set[int]) -> list[int]:
    sizes: list[int] = []
    for leaf in leaves_of(out):
        if isinstance(leaf, torch.Tensor):
            storage = leaf.untyped_storage()
            if storage._cdata not in given and storage.nbytes():
                given.add(storage._cdata)
                sizes.append(storage.nbytes())
    return sizes


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
