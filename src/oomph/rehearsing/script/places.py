"""Where a pretended tensor claims to be: on the GPU, on the host, or on `meta` if asked for.

To C++ all three are on `meta`, so a parameter can move between them and stay the same object. Their
storages tell them apart: a storage that is not listed here is on the GPU and is counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch

from oomph.pretending.patches import put
from oomph.pretending.tensors import (
    GPU,
    HOST,
    META,
    Disguise,
    HostMemory,
    is_pretended,
    true_device,
)

functorch: Any = torch._C._functorch
Name = Literal["cuda", "cpu", "meta"]

_DEVICES = {"cuda": GPU, "cpu": HOST, "meta": META}

# Held while tensors report their true device; other threads wait or see the pretended one.
ONE_AT_A_TIME: Any = threading.RLock()


def is_suspended() -> bool:
    """Return whether tensors report their true device to this thread right now."""
    return bool(Disguise.suspended) and bool(ONE_AT_A_TIME._is_owned())


class _Wanted(threading.local):
    """Where the running factory or move should put its tensor. None: on the GPU."""

    place: Name | None = None
    loading: Name | None = None  # where tensors loaded from a file without memory go


Wanted = _Wanted()


@contextlib.contextmanager
def wanted(place: Name | None) -> Iterator[None]:
    before = Wanted.place
    Wanted.place = place
    try:
        yield
    finally:
        Wanted.place = before


class Places(HostMemory):
    """The storages that are not on the GPU."""

    def of(self, tensor: torch.Tensor) -> Name:
        """Return the place of a pretended tensor."""
        if not self._live or tensor.layout is not torch.strided:
            return "cuda"
        tensor = unwrapped(tensor)
        live: Any = self._live.get(tensor.untyped_storage()._cdata)
        return "cuda" if live is None else live.place

    def named(self, tensor: torch.Tensor) -> Name:
        """Return the place of any tensor."""
        return self.of(tensor) if is_pretended(tensor) else "cpu"


def unwrapped(tensor: torch.Tensor) -> torch.Tensor:
    """Remove torch.func's wrappers from a tensor: a wrapper has no storage to recognise."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def place_named(device: Any) -> Name:
    """Return the place for a device or for anything that names one."""
    if isinstance(device, int):
        return "cuda"
    name = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return name if name in _DEVICES else "cpu"  # type: ignore[return-value]


class Reported:
    """A tensor attribute that reports another value than C++ holds.

    Under any TorchFunctionMode, C++'s own getter also reads this attribute and then calls it
    without the class; that call returns the true value.
    """

    def __init__(self, name: str, report: Any, write: Any = None) -> None:
        self._report, self._write = report, write
        self._truth = getattr(torch._C.TensorBase, name).__get__

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self
        return self._truth(tensor) if owner is None else self._report(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        if self._write is None:
            raise AttributeError("this attribute cannot be set")
        self._write(tensor, value)


def install(places: Places) -> None:
    """Patch tensors to report their pretended place."""

    def device(tensor: torch.Tensor) -> torch.device:
        true = true_device(tensor)
        if true.type != "meta" or is_suspended():
            return true
        return _DEVICES[places.of(tensor)]

    def is_at(place: Name) -> Callable[[torch.Tensor], bool]:
        return lambda it: is_pretended(it) and not is_suspended() and places.of(it) == place

    def is_cpu(tensor: torch.Tensor) -> bool:
        return not is_pretended(tensor) or is_at("cpu")(tensor)

    def is_meta(tensor: torch.Tensor) -> bool:
        return is_pretended(tensor) and (is_suspended() or places.of(tensor) == "meta")

    put(
        torch.Tensor,
        device=Reported("device", device),
        is_cuda=Reported("is_cuda", is_at("cuda")),
        is_cpu=Reported("is_cpu", is_cpu),
        is_meta=Reported("is_meta", is_meta),
        get_device=lambda it: 0 if is_at("cuda")(it) else -1,
    )
