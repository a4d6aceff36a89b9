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
            # A build without CUDA cannot pin; where nothing is copied, nothing is slower for it.
            kwargs["pin_memory"] = False
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
