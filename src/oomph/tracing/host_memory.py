"""Tensors that stand for memory of the host: they have left the GPU, and say so.

To C++ they are on `meta`, too. They are told by their storage. What is computed of them is the
host's work, and its results are the host's; a copy between one of them and a tensor of the GPU
goes over the bus.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch

from oomph.records.trace import Op
from oomph.tracing.known_outputs import leaves_of, tensors_in
from oomph.tracing.pretend import Lie, is_pretended, suspended

_META = torch.device("meta")
_empty = torch._C._VariableFunctions.empty
_COPIES = ("copy_", "_foreach_copy_")


class _Live(weakref.ref):  # type: ignore[type-arg]
    __slots__ = ("address", "place", "size_bytes")
    address: int
    place: str
    size_bytes: int


class HostMemory:
    """What of the host is taken by tensors that left the GPU."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = 0
        self._live: dict[int, _Live] = {}
        Lie.hosted = self._live

    def hold(self, tensor: Any) -> None:
        """Note the storage of a tensor as the host's."""
        if tensor.untyped_storage()._cdata in self._live:
            return
        live = self.stand(tensor, "cpu")
        live.size_bytes = tensor.untyped_storage().nbytes()
        self.live_bytes += live.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def stand(self, tensor: Any, place: str) -> Any:
        """Note that a storage is elsewhere than on the GPU, whoever's memory it is."""
        storage = tensor.untyped_storage()
        live: Any = _Live(storage, self._on_death)
        live.address, live.size_bytes, live.place = storage._cdata, 0, place
        self._live[live.address] = live
        return live

    def _on_death(self, live: Any) -> None:
        address, size_bytes = live.address, live.size_bytes
        if self._live.get(address) is live:
            del self._live[address]
            self.live_bytes -= size_bytes

    def has(self, tensor: Any) -> bool:
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._live

    def has_any(self, args: Any, kwargs: Any) -> bool:
        return bool(self._live) and any(map(self.has, tensors_in((args, kwargs))))


def run_on_host(recorder: Any, behaviour: Any, function: Any, args: Any, kwargs: Any) -> Any:
    """An op that has tensors of the host among its arguments."""
    if behaviour.kind == "view":
        return function(*args, **kwargs)
    if behaviour.name in _COPIES and _crosses(recorder, args):
        name = "copy_to_host" if recorder.host.has(_first(args[0])) else "copy_from_host"
        note_on_host(recorder, name, tensors_in((args[0],)))
        return args[0] if behaviour.returns else None
    if behaviour.updated or behaviour.name in _COPIES or behaviour.name.endswith("_"):
        note_on_host(recorder, "on_host", tensors_in((args, kwargs)), tensors_in((args[0],)))
        return args[0] if behaviour.returns else None
    with suspended():
        out = function(*args, **kwargs)
    made = [tensor for tensor in leaves_of(out) if isinstance(tensor, torch.Tensor)]
    for tensor in made:
        recorder.host.hold(tensor)
    note_on_host(recorder, "on_host", tensors_in((args, kwargs)), made)
    return out


def _crosses(recorder: Any, args: Any) -> bool:
    """Is one side on the host and the other on the GPU?"""
    to, source = _first(args[0]), _first(args[1])
    return is_pretended(to) and recorder.host.has(to) != recorder.host.has(source)


def _first(tensors: Any) -> Any:
    return tensors[0] if isinstance(tensors, list | tuple) else tensors


def note_on_host(recorder: Any, name: str, *tensors: Any) -> None:
    """Note the work of the host, or of the bus, if work is noted at all."""
    if not recorder.computes:
        return
    moved = [tensor for some in tensors for tensor in some]
    recorder.ops.append(
        Op(
            name=name,
            phase=recorder.phase,
            flops=0,
            moved_bytes=sum(tensor.numel() * tensor.element_size() for tensor in moved),
            dtype=str(moved[0].dtype).removeprefix("torch."),
            module=recorder.current_module(),
        )
    )


def _empty_on_host(recorder: Any, _: Any, __: Any, args: Any, ___: Any) -> Any:
    like = args[0]
    if not is_pretended(like):
        return NotImplemented
    out = _empty(like.shape, dtype=like.dtype, device=_META)
    recorder.host.hold(out)
    return out


RULES = {"empty_on_host": _empty_on_host}
