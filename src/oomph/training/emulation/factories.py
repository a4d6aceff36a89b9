"""Every function that makes a tensor: device="cuda" makes it on the card.

Torch's C++ never sees the device, for a build without CUDA has none. Not by a TorchFunctionMode:
that is switched off inside functions which are themselves written in Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import DeviceContext, _device_constructors

from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import HOST, Places, place_of

_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def patch_factories(patches: Patches, places: Places) -> None:
    constructors = _device_constructors()
    table = torch.jit._builtins._get_builtin_table()  # of the originals, if it is not there yet
    wrapped_of: dict[Any, Callable[..., Any]] = {}
    for name, function in list(vars(torch).items()):
        is_constructor = callable(function) and _is_one_of(function, constructors)
        if is_constructor or (name.endswith("_like") and callable(function)):
            wrapped_of[function] = _wrapped(function, places)
            patches.set(torch, name, wrapped_of[function])
    for name in _METHODS:
        patches.set(torch.Tensor, name, _wrapped(getattr(torch.Tensor, name), places))
    _patch_scripting(patches, table, wrapped_of)
    _patch_default_device(patches, wrapped_of)
    _patch_legacy(patches, places)


def _is_one_of(function: Any, constructors: Any) -> bool:
    try:
        return function in constructors
    except TypeError:  # not hashable, so no function
        return False


def _wrapped(function: Callable[..., Any], places: Places) -> Callable[..., Any]:
    def make(*args: Any, **kwargs: Any) -> Any:
        place = place_of(kwargs.get("device"))
        if kwargs.get("pin_memory"):
            if place == "card":
                raise RuntimeError("Only dense CPU tensors can be pinned")
            kwargs["pin_memory"] = False  # a build without CUDA cannot
            made = make(*args, **kwargs)
            places.pin(made)
            return made
        if place is None:
            return function(*args, **kwargs)
        kwargs["device"] = HOST
        with places.asking(place):
            return function(*args, **kwargs)

    # Not functools.wraps: `__wrapped__` makes inspect and torch.jit.script fail.
    make.__name__, make.__doc__ = function.__name__, function.__doc__
    return make


def _patch_scripting(patches: Patches, table: Any, wrapped_of: dict[Any, Any]) -> None:
    """torch.jit.script knows the originals by their id."""
    added = {id(new): table[id(old)] for old, new in wrapped_of.items() if id(old) in table}
    patches.set(torch.jit._builtins, "_builtin_table", {**table, **added})


def _patch_default_device(patches: Patches, wrapped_of: dict[Any, Any]) -> None:
    """`with torch.device("cuda")` and torch.set_default_device("cuda")."""
    original = DeviceContext.__torch_function__

    def torch_function(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        make = wrapped_of.get(func)
        if make is None or kwargs.get("device") is not None or self.device.type != "cuda":
            return original(self, func, types, args, kwargs)
        return make(*args, **{**kwargs, "device": self.device})

    patches.set(DeviceContext, "__torch_function__", torch_function)


# ---- types of tensors, as old scripts name them --------------------------------------------------

_LEGACY = {
    "FloatTensor": torch.float32,
    "DoubleTensor": torch.float64,
    "HalfTensor": torch.float16,
    "BFloat16Tensor": torch.bfloat16,
    "LongTensor": torch.int64,
    "IntTensor": torch.int32,
    "ShortTensor": torch.int16,
    "CharTensor": torch.int8,
    "ByteTensor": torch.uint8,
    "BoolTensor": torch.bool,
}


class _LegacyType(type):
    """The type of torch.cuda.FloatTensor and its like."""

    dtype: Any

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype


def _patch_legacy(patches: Patches, places: Places) -> None:
    """`torch.cuda.FloatTensor(...)`, `x.type(...)`, and such a type as the default."""
    for name, dtype in _LEGACY.items():
        patches.set(torch.cuda, name, _legacy(name, dtype, places))
    original: Any = torch.Tensor.type

    def as_type(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            said = original(tensor)
            return said.replace("torch.", "torch.cuda.", 1) if tensor.is_cuda else said
        if isinstance(dtype, torch.dtype):
            return original(tensor, dtype, *args, **kwargs)
        name = dtype if isinstance(dtype, str) else f"{dtype.__module__}.{dtype.__name__}"
        place = "cuda" if name.startswith("torch.cuda.") else "cpu"
        return tensor.to(place, _LEGACY[name.rpartition(".")[2]])

    patches.set(torch.Tensor, "type", as_type)
    _patch_default_type(patches, places)


def _legacy(name: str, dtype: Any, places: Places) -> type:
    of_host = getattr(torch, name)

    def made(_: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs.pop("device", None)
        with places.asking("card"):
            return of_host(*args, **kwargs)

    told = {"dtype": dtype, "layout": torch.strided, "is_cuda": True, "__module__": "torch.cuda"}
    return _LegacyType(name, (), {"__new__": made, **told})


def _patch_default_type(patches: Patches, places: Places) -> None:
    original, new = torch.set_default_tensor_type, torch.Tensor.__new__
    is_card = [False]

    def made(kind: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor(...)` follows the default type, and not the default device."""
        if not is_card[0] or kind is not torch.Tensor or kwargs.get("device") is not None:
            return new(kind, *args, **kwargs)
        with places.asking("card"):
            return new(kind, *args, **kwargs)

    def set_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if name.startswith("torch.cuda."):
            torch.set_default_dtype(_LEGACY[name.rpartition(".")[2]])
            torch.set_default_device("cuda")
            patches.set(torch.Tensor, "__new__", staticmethod(made))
        else:
            if is_card[0]:
                torch.set_default_device(None)
            original(kind)
        is_card[0] = name.startswith("torch.cuda.")

    patches.set(torch, "set_default_tensor_type", set_type)
