"""Where a pretended tensor says that it is: on the GPU, on the host, or on `meta` by request.

To C++ all three are on `meta`, so that a parameter can move between them and stay the same
object. They are told apart by their storages: one that is not known here is on the GPU, and is
counted.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Literal

import torch

from oomph.tracing.host_memory import HostMemory
from oomph.tracing.pretend import Lie, is_pretended

functorch: Any = torch._C._functorch
Name = Literal["cuda", "cpu", "meta"]

META, HOST, GPU = torch.device("meta"), torch.device("cpu"), torch.device("cuda", 0)
_DEVICES = {"cuda": GPU, "cpu": HOST, "meta": META}
_true_device = torch._C.TensorBase.device.__get__


# Held while tensors tell the truth. A script's other threads wait, or are told the usual lie.
ONE_AT_A_TIME: Any = threading.RLock()


def is_suspended() -> bool:
    """Do tensors tell the truth to this thread at the moment?"""
    return bool(Lie.suspended) and bool(ONE_AT_A_TIME._is_owned())


class _Wanted(threading.local):
    """Where the tensor is to be that the running factory or move makes. None: on the GPU."""

    place: Name | None = None
    loading: Name | None = None  # what is read from a file without its memory goes there


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

    def of(self, tensor: Any) -> Name:
        """The place of a pretended tensor."""
        if not self._live or tensor.layout is not torch.strided:
            return "cuda"
        tensor = unwrapped(tensor)
        live: Any = self._live.get(tensor.untyped_storage()._cdata)
        return "cuda" if live is None else live.place

    def named(self, tensor: Any) -> Name:
        """The place of any tensor."""
        return self.of(tensor) if is_pretended(tensor) else "cpu"


def unwrapped(tensor: Any) -> Any:
    """What torch.func has around a tensor taken off: a wrapper has no storage to be known by."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def place_named(device: Any) -> Name:
    """What a device, or whatever names one, is here."""
    if isinstance(device, int):
        return "cuda"
    name = device.type if isinstance(device, torch.device) else str(device).partition(":")[0]
    return name if name in _DEVICES else "cpu"  # type: ignore[return-value]


class Said:
    """An attribute of tensors that says something else than C++ has.

    Under any TorchFunctionMode, C++'s own getter asks this attribute, too, and then calls it
    without the class: that is told the truth.
    """

    def __init__(self, name: str, say: Any, write: Any = None) -> None:
        self._say, self._write = say, write
        self._truth = getattr(torch._C.TensorBase, name).__get__

    def __get__(self, tensor: Any, owner: Any = None) -> Any:
        if tensor is None:
            return self
        return self._truth(tensor) if owner is None else self._say(tensor)

    def __set__(self, tensor: Any, value: Any) -> None:
        if self._write is None:
            raise AttributeError("this attribute cannot be set")
        self._write(tensor, value)


def install(places: Places) -> None:
    """Let tensors say where they are."""

    def device(tensor: Any) -> Any:
        true = _true_device(tensor)
        if true.type != "meta" or is_suspended():
            return true
        return _DEVICES[places.of(tensor)]

    def is_at(place: Name) -> Any:
        return lambda it: is_pretended(it) and not is_suspended() and places.of(it) == place

    def is_cpu(tensor: Any) -> bool:
        return not is_pretended(tensor) or is_at("cpu")(tensor)

    def is_meta(tensor: Any) -> bool:
        return is_pretended(tensor) and (is_suspended() or places.of(tensor) == "meta")

    tensor: Any = torch.Tensor
    tensor.device = Said("device", device)
    tensor.is_cuda = Said("is_cuda", is_at("cuda"))
    tensor.is_cpu = Said("is_cpu", is_cpu)
    tensor.is_meta = Said("is_meta", is_meta)
    tensor.get_device = lambda it: 0 if is_at("cuda")(it) else -1
