"""A function that makes a model -> the model on pretended tensors, of any size and at once."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from oomph.tracing.behaviour import Behaviour
from oomph.tracing.known_outputs import tensors_in
from oomph.tracing.pretend import is_pretended, suspended

_META = torch.device("meta")

# What constructors count with: `torch.linspace(0, drop_path_rate, depth)` decides which layers
# are built. Up to so many values they are real; larger ones are tables that nobody reads.
_COUNTED_WITH = frozenset({"linspace", "arange"})
_MOST_VALUES = 2**16


class _WithoutValues(TorchDispatchMode):
    """Initialisation writes values that do not exist; reading one gives 0.

    The values that constructors count with exist, on the host, and so does what is computed from
    nothing else. Where they meet a tensor without memory, they lose theirs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._behaviours: dict[Any, Behaviour] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        behaviour = self._behaviours.get(function)
        if behaviour is None:
            behaviour = self._behaviours[function] = Behaviour(function)
        first = args[0] if args else None
        if isinstance(first, torch.Tensor) and is_pretended(first):
            if behaviour.kind == "in place" and behaviour.returns:
                return first
            if behaviour.name == "_local_scalar_dense":
                return 0.0 if first.is_floating_point() else 0
        if behaviour.name in _COUNTED_WITH:
            out = function(*args, **kwargs)
            is_small = out.numel() <= _MOST_VALUES
            return function(*args, **{**kwargs, "device": "cpu"}) if is_small else out
        if any(is_pretended(tensor) for tensor in tensors_in((args, kwargs))):
            args, kwargs = tree_map_only(torch.Tensor, _without_memory, (args, kwargs))
        return function(*args, **kwargs)


def _without_memory(tensor: Any) -> Any:
    return tensor if is_pretended(tensor) else tensor.to(_META)


def build(make: Any) -> Any:
    """The user's model, without its memory. A module that is built already is taken as it is."""
    if isinstance(make, torch.nn.Module):
        return make
    with without_memory():
        made = make()
        if isinstance(made, torch.nn.Module):
            _forget_values(made)
        return made


def _forget_values(model: Any) -> None:
    """Parameters and buffers that were counted out on the host lose their memory, too."""
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and not is_pretended(tensor):
                    table[name] = _like(tensor, tensor.to(_META))


def _like(original: Any, tensor: Any) -> Any:
    """A parameter, if the original is one."""
    if not isinstance(original, torch.nn.Parameter):
        return tensor
    return torch.nn.Parameter(tensor, requires_grad=original.requires_grad)


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
            made[id(tensor)] = _like(tensor, like)
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
