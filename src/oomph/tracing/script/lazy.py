"""Parameters of lazy modules, which get their shape from the first batch, without memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import parameter

from oomph.tracing.script.moves import hosted


def install(recorder: Any) -> None:
    """Let them be made without memory, and moved: torch knows the methods that may by identity."""
    blank: Any = parameter.UninitializedParameter

    def new(cls: Any, requires_grad: bool = True, device: Any = None, dtype: Any = None) -> Any:
        data = torch.empty(0, device=device, dtype=dtype)
        if data.is_cpu:
            data = hosted(recorder, data)
        cls.cls_to_become = torch.nn.Parameter
        return torch.Tensor._make_subclass(cls, data, requires_grad)

    def function_of(_: Any, function: Any, __: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    blank.__new__ = new
    blank.__torch_function__ = classmethod(function_of)
    for name in ("to", "cuda", "cpu", "half", "bfloat16", "float", "double"):
        setattr(blank, name, _of_data(name))


def _of_data(name: str) -> Any:
    """A move of what it holds, which has a shape: none of its own is ever asked for."""
    return lambda lazy, *args, **kwargs: getattr(lazy.data, name)(*args, **kwargs)


def is_blank(tensor: Any) -> bool:
    """Has it no shape yet?"""
    return isinstance(tensor, parameter.UninitializedParameter)
