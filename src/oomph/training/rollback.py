"""The state of training before a step -> the same again, after a step that could not be finished.

Kept are gradients that were there, torch's generators, and buffers (running statistics). Weights
and the optimizer's state change only in the update, which has its own guard (rollback_update.py).
When nothing fails this is a few microseconds: a buffer is copied only if it has changed since it
was copied last, gradients only if there are any, and after an optimizer step there are none.

Not kept: what a model keeps in plain attributes, and generators that the user made. Those of
Python and numpy are kept if asked for: reading them takes longer than all the rest.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

_Restore = Callable[[Any], Any]
Rngs = list[tuple[_Restore, Any]]  # how to restore each generator, and what to


class Rollback:
    """One point to go back to; `take` makes it, `undo` goes there, as often as is needed."""

    def __init__(self, model: Any, optimizers: Iterable[Any], *, keeps_other_rngs: bool) -> None:
        self._model, self._optimizers = model, tuple(optimizers)
        self._keeps_other_rngs = keeps_other_rngs
        self._parameters: list[Any] = []
        self._shape: list[int] = []
        self._gradients: list[tuple[Any, Any]] = []
        self._buffers = _Buffers(model)
        self._rngs: Rngs = []

    def take(self, *, keeps_gradients: bool = True) -> None:
        """keeps_gradients=False: those that are there have been used."""
        self._find_parameters()
        kept = [p for p in self._parameters if keeps_gradients and p.grad is not None]
        self._gradients = [(p, _on_host(p.grad)) for p in kept]
        self._rngs = rng_states(self._device_kind(), self._keeps_other_rngs)
        self._buffers.take()

    @property
    def parameters(self) -> list[Any]:
        """Every parameter that a gradient may be added to."""
        return self._parameters

    def undo(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, gradient in self._gradients:
            parameter.grad = gradient.to(parameter.device, copy=True)
        restore_rngs(self._rngs)
        self._buffers.undo()
        torch.clear_autocast_cache()  # weights that were cast, and the graph that they are in

    def _device_kind(self) -> str:
        kind: str = self._parameters[0].device.type if self._parameters else "cpu"
        return kind

    def _find_parameters(self) -> None:
        """Every parameter that a gradient may be added to; found again when groups are added."""
        groups = [group["params"] for each in self._optimizers for group in each.param_groups]
        shape = [len(group) for group in groups]
        if shape == self._shape:
            return
        self._shape = shape
        both = [*self._model.parameters(), *(p for group in groups for p in group)]
        self._parameters = list({id(parameter): parameter for parameter in both}.values())


def _on_host(tensor: Any) -> Any:
    """A copy that takes no memory of the GPU."""
    return tensor.detach().to("cpu", copy=True)


# ---- generators --------------------------------------------------------------------------------


def rng_states(device_kind: str, keeps_other_rngs: bool) -> Rngs:
    states: Rngs = [(torch.set_rng_state, torch.get_rng_state())]
    device: Any = getattr(torch, device_kind, None)  # torch.cuda, torch.mps, torch.xpu
    if device_kind != "cpu" and hasattr(device, "get_rng_state"):
        states.append((device.set_rng_state, device.get_rng_state()))
    if keeps_other_rngs:
        states.append((random.setstate, random.getstate()))
        if numpy := sys.modules.get("numpy"):
            states.append((numpy.random.set_state, numpy.random.get_state()))
    return states


def restore_rngs(states: Rngs) -> None:
    for restore, state in states:
        restore(state)


# ---- buffers -----------------------------------------------------------------------------------


@dataclass(slots=True)
class _Kept:
    """A buffer as it was: the tensor itself, what was in it, and how often it had been written."""

    tensor: Any
    copy: Any
    version: int
    moves: bool  # has been seen to change: it is copied on its own device, which is quick


class _Buffers:
    """The buffers of a model at one point."""

    def __init__(self, model: Any) -> None:
        self._places = [(m, name) for m in model.modules() for name in m._buffers]
        self._kept: dict[tuple[int, str], _Kept] = {}

    def take(self) -> None:
        for module, name in self._places:
            tensor = module._buffers.get(name)
            key = (id(module), name)
            kept = self._kept.get(key)
            if tensor is None:
                self._kept.pop(key, None)
            elif kept is None:
                # On the host: most never change, and some are large (masks, tables).
                self._kept[key] = _Kept(tensor, _on_host(tensor), tensor._version, moves=False)
            elif kept.tensor is not tensor:
                self._kept[key] = _Kept(tensor, _copied(tensor), tensor._version, moves=True)
            elif kept.version != tensor._version or _is_written_unseen(module, name):
                _copy_again(kept)

    def undo(self) -> None:
        with torch.no_grad():
            for module, name in self._places:
                if name in module._buffers:
                    self._undo_one(module, name)

    def _undo_one(self, module: Any, name: str) -> None:
        kept = self._kept.get((id(module), name))
        if kept is None:
            module._buffers[name] = None  # it was none
            return
        module._buffers[name] = kept.tensor
        if kept.version != kept.tensor._version or _is_written_unseen(module, name):
            kept.tensor.copy_(kept.copy)
            kept.version = kept.tensor._version


def _copied(tensor: Any) -> Any:
    return tensor.detach().clone()


def _copy_again(kept: _Kept) -> None:
    with torch.no_grad():
        if kept.moves:
            kept.copy.copy_(kept.tensor)
        else:
            kept.copy, kept.moves = _copied(kept.tensor), True
    kept.version = kept.tensor._version


def _is_written_unseen(module: Any, name: str) -> bool:
    """batch_norm writes running statistics without counting it as a change (torch 2.13)."""
    is_norm = isinstance(module, _NormBase) or name.startswith("running_")
    return bool(is_norm and module.training)
