"""Find and wrap the torch functions that create and move tensors; support legacy tensor types.

Both kinds of pretended GPU use this; their wrappers treat `device="cuda"` differently.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

from oomph.pretending.patches import Patches

Function = Callable[..., Any]
Wrap = Callable[[Function], Function]
_METHODS = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


@functools.cache
def _names() -> tuple[str, ...]:
    """Return the names of all torch functions that take a device. Call it before patching."""
    constructors = _device_constructors()
    return tuple(
        name
        for name, function in vars(torch).items()
        if callable(function) and (name.endswith("_like") or _is_one_of(function, constructors))
    )


def _is_one_of(function: Function, constructors: set[Function]) -> bool:
    try:
        return function in constructors
    except TypeError:  # not hashable, so not a function
        return False


def patch_factories(
    patches: Patches, wrap: Wrap, wrap_method: Wrap | None = None
) -> dict[Function, Function]:
    """Wrap every torch function that creates a tensor -> originals and their replacements.

    A TorchFunctionMode would not do: it is switched off inside functions that are written in
    Python, so nested factories would escape it.
    """
    table = torch.jit._builtins._get_builtin_table()  # torch.jit.script finds originals by id
    wrapped = {getattr(torch, name): named(wrap, getattr(torch, name)) for name in _names()}
    patches.put(torch, **{name: wrapped[getattr(torch, name)] for name in _names()})
    wrap_method = wrap_method or wrap
    methods = {name: named(wrap_method, getattr(torch.Tensor, name)) for name in _METHODS}
    patches.put(torch.Tensor, **methods)
    added = {id(new): table[id(old)] for old, new in wrapped.items() if id(old) in table}
    patches.put(torch.jit._builtins, _builtin_table={**table, **added})
    return wrapped


def named(wrap: Wrap, function: Function) -> Function:
    """Wrap a function and keep its name.

    functools.wraps would not do: `__wrapped__` makes inspect and torch.jit.script fail.
    """
    made = wrap(function)
    made.__name__, made.__doc__ = function.__name__, function.__doc__
    return made


def move_of(args: Any, kwargs: Any) -> tuple[Any, torch.dtype | None, dict[str, Any]]:
    """Return the device, the dtype and the other arguments of a `Tensor.to` call."""
    kwargs = dict(kwargs)
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    other = kwargs.pop("other", None)
    names = ["copy", "non_blocking"]
    for arg in args:
        if isinstance(arg, torch.Tensor):
            other = arg
        elif isinstance(arg, torch.dtype | type):  # also `bool`, `int` and `float`
            dtype = arg
        elif isinstance(arg, bool) and names:
            kwargs[names.pop()] = arg
        elif isinstance(arg, str | int | torch.device) and not isinstance(arg, bool):
            device = arg
        elif arg is not None:
            raise TypeError(f"to() received an invalid combination of arguments: {arg!r:.80}")
    if other is not None:
        device, dtype = other.device, other.dtype
    return device, dtype, {name: value for name, value in kwargs.items() if value is not None}


def patch_generator(patches: Patches) -> None:
    """Make `torch.Generator("cuda")` a CPU generator that reports the GPU as its device.

    It stays a class, because annotations use it, and earlier generators are instances of it.
    """
    original = torch.Generator

    class OfEitherDevice(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, original)

    class Generator(original, metaclass=OfEitherDevice):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            make: Function = original.__new__
            made = make(cls, "cpu")
            made.place = torch.device("cuda", device) if type(device) is int else device
            return made

        @property
        def device(self) -> torch.device:
            return torch.device(self.place)

    patches.put(torch, Generator=Generator)


# ---- legacy tensor types, as old scripts use them ------------------------------------------------

LEGACY = {
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
_NAMES = {dtype: name for name, dtype in LEGACY.items()}


class _LegacyType(type):
    """The metaclass of torch.cuda.FloatTensor and similar types."""

    dtype: torch.dtype

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype


def patch_legacy_types(patches: Patches) -> None:
    """Support `torch.cuda.FloatTensor(...)`, `x.type(...)` and such a type as the default."""
    for name, dtype in LEGACY.items():
        patches.put(torch.cuda, **{name: _legacy(name, dtype)})
    original: Function = torch.Tensor.type

    def as_type(tensor: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None:
            is_plain = tensor.layout is torch.strided and tensor.dtype in _NAMES
            name = f"torch.{_NAMES[tensor.dtype]}" if is_plain else original(tensor)
            return name.replace("torch.", "torch.cuda.", 1) if tensor.is_cuda else name
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype)
        place, its_dtype = _parsed(dtype)
        if its_dtype is None:
            return original(tensor, dtype, *args, **kwargs)
        return tensor.to(place, its_dtype)

    patches.put(torch.Tensor, type=as_type)
    _patch_default_type(patches)


def _parsed(kind: Any) -> tuple[str, torch.dtype | None]:
    """Parse a type or its name -> device and dtype; None for a dtype without such a type."""
    name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
    module, _, short = name.rpartition(".")
    place = "cuda" if name.startswith("torch.cuda.") else "cpu"
    return place, LEGACY.get(short) if module in ("torch", "torch.cuda") else None


def _legacy(name: str, dtype: torch.dtype) -> type:
    def made(_: type, *args: Any, **__: Any) -> torch.Tensor:
        return _made_on_gpu(dtype, args)

    attributes = {
        "dtype": dtype,
        "layout": torch.strided,
        "is_cuda": True,
        "__module__": "torch.cuda",
    }
    return _LegacyType(name, (), {"__new__": made, **attributes})


def _made_on_gpu(dtype: torch.dtype, args: tuple[Any, ...]) -> torch.Tensor:
    """Create a tensor from data, or from a shape with arbitrary contents."""
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        return args[0].to("cuda", dtype).view_as(args[0])  # another tensor that shares the memory
    if len(args) == 1 and not isinstance(args[0], int | torch.Size):
        return torch.tensor(args[0], dtype=dtype, device="cuda")
    shape = args[0] if args and isinstance(args[0], torch.Size) else args
    return torch.empty(shape or (0,), dtype=dtype, device="cuda")


def _patch_default_type(patches: Patches) -> None:
    """Support `torch.set_default_tensor_type("torch.cuda.FloatTensor")` in old scripts."""
    new = torch.Tensor.__new__
    is_gpus = [False]

    def made(kind: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Create a tensor: `torch.Tensor(...)` follows the default type, not the default device."""
        if not is_gpus[0] or kind is not torch.Tensor or kwargs:
            return new(kind, *args, **kwargs)
        return _made_on_gpu(torch.get_default_dtype(), args)

    def set_type(kind: Any) -> None:
        place, dtype = _parsed(kind)
        if dtype is None:
            raise TypeError(f"invalid type object: {kind} is no type of tensors")
        torch.set_default_dtype(dtype)
        if place == "cuda":
            torch.set_default_device("cuda")
            patches.put(torch.Tensor, __new__=staticmethod(made))
        elif is_gpus[0]:
            torch.set_default_device(None)
        is_gpus[0] = place == "cuda"

    patches.put(torch, set_default_tensor_type=set_type)
