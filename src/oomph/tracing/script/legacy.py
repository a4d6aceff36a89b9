"""Types of tensors as old scripts name them: `torch.cuda.FloatTensor(3, 4)`, `x.type(...)`."""

from __future__ import annotations

from typing import Any

import torch

from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.factories import of_data

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
    dtype: Any

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, torch.Tensor) and one.is_cuda and one.dtype == cls.dtype


def _legacy(name: str, dtype: Any) -> Any:
    def made(_: Any, *args: Any) -> Any:
        return _made_on_gpu(dtype, args)

    return _LegacyType(name, (), {"__new__": made, "dtype": dtype, "__module__": "torch.cuda"})


def _made_on_gpu(dtype: Any, args: tuple[Any, ...]) -> Any:
    """Of data, or of a shape whose contents are nobody's."""
    if len(args) == 1 and isinstance(args[0], torch.Tensor):
        return args[0].to("cuda", dtype).view_as(args[0])  # another tensor with the same memory
    if len(args) == 1 and not isinstance(args[0], int | torch.Size):
        return torch.tensor(args[0], dtype=dtype, device="cuda")
    shape = args[0] if args and isinstance(args[0], torch.Size) else args
    return torch.empty(shape or (0,), dtype=dtype, device="cuda")


class _HostType(type):
    true: Any  # torch's own, which is no class and cannot be patched

    def __instancecheck__(cls, one: Any) -> bool:
        if not isinstance(one, torch.Tensor) or not is_pretended(one):
            return isinstance(one, cls.true)
        return one.device.type == "cpu" and one.dtype == cls.true.dtype


def _of_host(name: str, true: Any) -> Any:
    """`torch.LongTensor(...)`, which may be given a list of figures of the GPU."""

    def made(_: Any, *args: Any, **kwargs: Any) -> Any:
        return of_data(true, args, kwargs)

    told = {"dtype": true.dtype, "layout": true.layout, "is_cuda": False}
    return _HostType(name, (), {"__new__": made, "true": true, "__module__": "torch", **told})


def install() -> None:
    """Patch them."""
    cuda: Any = torch.cuda
    for name, dtype in _LEGACY.items():
        setattr(cuda, name, _legacy(name, dtype))
        setattr(torch, name, _of_host(name, getattr(torch, name)))
    original: Any = torch.Tensor.type

    def as_type(tensor: Any, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(dtype, str) and dtype.startswith("torch.cuda."):
            dtype = getattr(cuda, dtype.rpartition(".")[2])
        if isinstance(dtype, _LegacyType):
            return tensor.to("cuda", dtype.dtype)
        if isinstance(dtype, _HostType):
            dtype = dtype.true
        if dtype is None and is_pretended(tensor):
            kind = next(name for name, its in _LEGACY.items() if its == tensor.dtype)
            return f"torch.cuda.{kind}" if tensor.is_cuda else f"torch.{kind}"
        if isinstance(dtype, torch.dtype):
            return tensor.to(dtype)
        return original(tensor, dtype, *args, **kwargs)

    methods: Any = torch.Tensor
    methods.type = as_type
    _patch_defaults()


def _patch_defaults() -> None:
    """`torch.set_default_tensor_type("torch.cuda.FloatTensor")`, as old scripts have."""
    original, new = torch.set_default_tensor_type, torch.Tensor.__new__
    is_gpus = [False]
    module: Any = torch

    def made(kind: Any, *args: Any, **kwargs: Any) -> Any:
        """`torch.Tensor(...)` follows the default type, and not the default device."""
        if not is_gpus[0] or kind is not torch.Tensor or kwargs:
            return new(kind, *args, **kwargs)
        return _made_on_gpu(torch.get_default_dtype(), args)

    def set_type(kind: Any) -> None:
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__name__}"
        if name.startswith("torch.cuda."):
            torch.set_default_dtype(getattr(torch.cuda, name.rpartition(".")[2]).dtype)
            torch.set_default_device("cuda")
            module.Tensor.__new__ = staticmethod(made)
        else:
            if is_gpus[0]:
                torch.set_default_device(None)
            original(kind.true if isinstance(kind, _HostType) else kind)
        is_gpus[0] = name.startswith("torch.cuda.")

    module.set_default_tensor_type = set_type
