"""`torch.device(0)`: a bare number, of which C++ asks the driver what it means, and finds none.

A device stays what it is to C++; only the name `torch.device` is another class, of which every
device is an instance.
"""

from __future__ import annotations

from typing import Any

import torch

_Device = torch.device


class _Kind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int:
            return _Device("cuda", args[0])
        return _Device(*args, **kwargs)

    def __instancecheck__(cls, one: Any) -> bool:
        return isinstance(one, _Device)

    def __subclasscheck__(cls, kind: Any) -> bool:
        return issubclass(kind, _Device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Device

    def __hash__(cls) -> int:
        return hash(_Device)


def install() -> None:
    """Patch the name, and `Module.to`, whose arguments C++ reads."""
    named: Any = _Kind("device", (), {"__module__": "torch", "__doc__": _Device.__doc__})
    vars(torch)["device"] = named
    kind: Any = torch.nn.Module
    original = kind.to

    def to(module: Any, *args: Any, **kwargs: Any) -> Any:
        if args and type(args[0]) is int:
            args = (named(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = named(kwargs["device"])
        return original(module, *args, **kwargs)

    kind.to = to
