"""Which tensors are on the card, and where a call is asked to put its result.

To C++ everything is on the CPU. A tensor is on the card if its storage holds a block there; so
views are, too. `asked` is set by the functions that take a device: C++ never sees one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

import torch

from oomph.training.emulation.card import Card

Place = Literal["card", "host"]

HOST = torch.device("cpu")
GPU = torch.device("cuda", 0)

# Torch's own getters, which no patch reaches.
true_device: Callable[[Any], torch.device] = torch._C.TensorBase.device.__get__


class _PerThread(threading.local):
    asked: Place | None = None  # by a function that was told a device
    last: Place = "host"  # of the last op that had tensors: C++ goes on where it is


class Places:
    """What is where."""

    def __init__(self, card: Card) -> None:
        self.card = card
        self.now = _PerThread()
        self._live = card.live
        self._pinned: dict[int, weakref.ref[Any]] = {}  # by the address of the storage in C++

    def on_card(self, tensor: Any) -> bool:
        """Is a tensor on the card?"""
        if not self._live:
            return False
        if tensor.layout is not torch.strided:
            return self._parts_on_card(tensor)
        try:
            return tensor.untyped_storage()._cdata in self._live
        except (RuntimeError, NotImplementedError):  # a tensor without a storage of its own
            return False

    def _parts_on_card(self, tensor: Any) -> bool:
        if tensor.layout is torch.sparse_coo:
            return self.on_card(tensor._values())
        return False

    def pin(self, tensor: Any) -> None:
        """Call a tensor of the host pinned; it is plain memory."""
        storage = tensor.untyped_storage()
        key, pinned = storage._cdata, self._pinned

        def forget(dead: weakref.ref[Any]) -> None:
            if pinned.get(key) is dead:
                del pinned[key]

        pinned[key] = weakref.ref(storage, forget)

    def is_pinned(self, tensor: Any) -> bool:
        if tensor.layout is not torch.strided or not self._pinned:
            return False
        return tensor.untyped_storage()._cdata in self._pinned

    def any_on_card(self, values: Any) -> bool | None:
        """Is any tensor among arguments on the card? None where there is no tensor."""
        answer: bool | None = None
        for value in values:
            if isinstance(value, torch.Tensor):
                if self.on_card(value):
                    return True
                answer = False
            elif isinstance(value, list | tuple):
                found = self.any_on_card(value)
                if found:
                    return True
                answer = found if answer is None else answer
        return answer

    def asking(self, place: Place | None) -> Asking:
        return Asking(self.now, place)


class Asking:
    """Within it, results are put in a place."""

    __slots__ = ("_before", "_now", "_place")

    def __init__(self, now: _PerThread, place: Place | None) -> None:
        self._now, self._place = now, place

    def __enter__(self) -> None:
        self._before = self._now.asked
        self._now.asked = self._place

    def __exit__(self, *_: object) -> None:
        self._now.asked = self._before


def place_of(device: Any) -> Place | None:
    """What a device argument names: the card, the host, or neither (None, `meta`)."""
    if device is None:
        return None
    if isinstance(device, int):
        device = torch.device("cuda", device)
    elif isinstance(device, str):
        device = torch.device(device)
    if device.type == "cuda":
        if device.index not in (None, 0):
            raise RuntimeError(
                "CUDA error: invalid device ordinal\n"
                f"oomph emulates one GPU, cuda:0; there is no {device}"
            )
        return "card"
    return "host" if device.type == "cpu" else None
