"""Moves of tensors between the host and the GPU, and parameters, which never have memory.

A parameter is without memory from the start and stands on the host until it is moved. To C++ it
is on `meta` before and after, so that `Module.to` changes it in place: an optimizer that was made
before, tied weights and weak references go on.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from oomph.tracing.pretend import is_pretended
from oomph.tracing.script.places import (
    GPU,
    META,
    Name,
    Said,
    Wanted,
    is_suspended,
    place_named,
    wanted,
)

_empty_strided = torch._C._VariableFunctions.empty_strided


def install(recorder: Any, parameters: dict[int, Any], on_input: Callable[[Any], Any]) -> None:
    """Patch them. The parameters that are alive will be in `parameters`, as weak references."""
    _patch_to(recorder, on_input)
    _patch_parameter(recorder, parameters)
    _patch_data(recorder)
    _patch_deepcopy()


def _patch_to(recorder: Any, on_input: Callable[[Any], Any]) -> None:
    original = torch._C.TensorBase.to  # not the one of pretend.py, which knows of one place only

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        device, dtype, options = _parsed(args, kwargs)
        # Under a TorchFunctionMode, C++'s own method comes back to this one: it has its place.
        if is_suspended() or (device is META and Wanted.place is not None):
            return original(tensor, *args, **kwargs)
        here = recorder.host.named(tensor)
        there: Name = here if device is None else place_named(device)
        if here == "cuda" and there == "meta":  # C++ groups tensors by their true device
            there = here
        if device is not None and there == "cuda" and not is_pretended(tensor):
            tensor = on_input(tensor)
        if here == "meta" and there != "meta":
            raise NotImplementedError("Cannot copy out of meta tensor; no data!")
        if here == there:
            return original(tensor, dtype or tensor.dtype, **options)
        with wanted(there):
            if not is_pretended(tensor):
                dtype = dtype or tensor.dtype
                if tensor.requires_grad and torch.is_grad_enabled():
                    return _Arrival.apply(tensor, dtype, options, original, recorder)
                return original(tensor, META, dtype, **options)
            return _copied(tensor, dtype, options, there)

    def cuda(tensor: Any, device: Any = None, *_: Any, **__: Any) -> Any:
        return to(tensor, GPU if device is None else device)

    methods: Any = torch.Tensor
    methods.to, methods.cuda = to, cuda
    methods.cpu = lambda tensor, *_, **__: to(tensor, "cpu")
    methods.type_as = lambda tensor, other: to(tensor, other)
    methods.pin_memory = lambda tensor, *_, **__: tensor
    methods.is_pinned = lambda *_, **__: False
    methods.share_memory_ = lambda tensor: tensor


def _copied(tensor: Any, dtype: Any, options: Any, there: Name) -> Any:
    """From one place without memory to another: C++ sees no move, so that a copy is asked for."""
    return _Move.apply(tensor, dtype or tensor.dtype, there, options.get("memory_format"))


class _Move(torch.autograd.Function):
    """Differentiable, as moves are: the gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(context: Any, tensor: Any, dtype: Any, there: Name, memory_format: Any) -> Any:
        context.back = tensor.dtype, place_named(tensor.device)
        device = META if there != "cpu" else torch.device("cpu")
        with wanted(there):
            return torch.ops.aten._to_copy.default(
                tensor, dtype=dtype, device=device, memory_format=memory_format
            )

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        dtype, place = context.back
        return gradients[0].to(place, dtype), None, None, None


class _Arrival(torch.autograd.Function):
    """A real tensor of the host that wants a gradient: C++ would not take one without memory."""

    @staticmethod
    def forward(
        context: Any, tensor: Any, dtype: Any, options: Any, move: Any, recorder: Any
    ) -> Any:
        context.back, context.recorder = tensor.dtype, recorder
        return move(tensor, META, dtype, **options)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = context.recorder.real(gradients[0]).to(context.back)
        return gradient, None, None, None, None


def _parsed(args: Any, kwargs: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Device and dtype of a call of `Tensor.to`, and the rest of it."""
    kwargs = dict(kwargs)
    device, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
    other = kwargs.pop("other", None)
    names = iter(("non_blocking", "copy"))
    for arg in args:
        if isinstance(arg, torch.Tensor):
            other = arg
        elif isinstance(arg, torch.dtype):
            dtype = arg
        elif isinstance(arg, bool):
            kwargs[next(names)] = arg
        elif isinstance(arg, str | int | torch.device):
            device = arg
    if other is not None:
        device, dtype = other.device, other.dtype
    return device, dtype, {name: value for name, value in kwargs.items() if value is not None}


# ---- parameters ------------------------------------------------------------------------------


def _patch_parameter(recorder: Any, alive: dict[int, Any]) -> None:
    kind: Any = torch.nn.Parameter
    original = kind.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0, device="cpu")
        if type(data) in (torch.Tensor, kind) and not is_pretended(data) and not is_suspended():
            data = hosted(recorder, data)
        made = original(cls, data, requires_grad)
        key = id(made)
        alive[key] = weakref.ref(made, lambda _: alive.pop(key, None))
        return made

    kind.__new__ = new


def hosted(recorder: Any, tensor: Any) -> Any:
    """The same tensor of the host without its memory."""
    with wanted("cpu"):
        out = _empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META)
    recorder.shadows.give(out, tensor.detach())
    return out


def _patch_data(recorder: Any) -> None:
    """`parameter.data = ...`, where one of the two has memory and the other has not."""
    base: Any = torch._C.TensorBase.data
    read, write = base.__get__, base.__set__

    def assign(tensor: Any, value: Any) -> None:
        if is_pretended(tensor) and not is_pretended(value):
            value = hosted(recorder, value)
        elif is_pretended(value) and not is_pretended(tensor):
            requires_grad = tensor.requires_grad
            torch._C._swap_tensor_impl(tensor, value.detach().requires_grad_(requires_grad))
            return
        write(tensor, value)

    methods: Any = torch.Tensor
    methods.data = Said("data", lambda tensor: read(tensor), assign)


def _patch_deepcopy() -> None:
    """A copy of a storage without memory would not be seen: no op makes it."""
    methods: Any = torch.Tensor
    original = methods.__deepcopy__

    def copied(tensor: Any, memo: Any) -> Any:
        if not is_pretended(tensor) or not tensor.is_leaf or type(tensor) is not torch.Tensor:
            return original(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    methods.__deepcopy__ = copied
