"""A function that makes a model -> the model on pretended tensors, of any size and at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from oomph.tracing.behaviour import Behaviour
from oomph.tracing.pretend import is_pretended, suspended

_META = torch.device("meta")


class _WithoutValues(TorchDispatchMode):
    """Initialisation writes values that do not exist; reading one gives 0."""

    def __init__(self) -> None:
        super().__init__()
        self._behaviours: dict[Any, Behaviour] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and is_pretended(first):
            behaviour = self._behaviours.get(function)
            if behaviour is None:
                behaviour = self._behaviours[function] = Behaviour(function)
            if behaviour.kind == "in place" and behaviour.returns:
                return first
            if behaviour.name == "_local_scalar_dense":
                return 0.0 if first.is_floating_point() else 0
        return function(*args, **(kwargs or {}))


def build(make: Any) -> Any:
    """The user's model, without its memory. A module that is built already is taken as it is."""
    if isinstance(make, torch.nn.Module):
        return make
    with without_memory():
        return make()


@contextlib.contextmanager
def without_memory() -> Iterator[None]:
    """What is made in here is on the meta device, and says so.

    Nothing of it is recorded: a user builds on the host, and then moves the model.
    """
    with _disable_current_modes(), suspended(), torch.device(_META), _WithoutValues():
        yield


def materialise(model: Any, dtype: Any = None) -> None:
    """Give every parameter and buffer a fresh pretended tensor, in the order of Module.to.

    `dtype` is that of floating tensors where the whole model is to be in it.
    """
    made: dict[int, Any] = {}  # tied weights stay tied

    def fresh(tensor: Any) -> Any:
        if id(tensor) not in made:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=wanted, device="cuda")
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            made[id(tensor)] = (
                torch.nn.Parameter(like, requires_grad=tensor.requires_grad)
                if is_parameter
                else like
            )
        return made[id(tensor)]

    for module in _children_first(model):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    table[name] = fresh(tensor)
        if isinstance(module, torch.nn.RNNBase):
            module._init_flat_weights()  # it keeps its weights in a list of its own, too


def _children_first(module: Any) -> list[Any]:
    seen: dict[int, Any] = {}

    def visit(one: Any) -> None:
        if id(one) in seen:
            return
        for child in one.children():
            visit(child)
        seen.setdefault(id(one), one)

    visit(module)
    return list(seen.values())
