"""A script's tensors: made on the device it names, with its values; moved and read as it asks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import parameter
from torch.utils import _device

from oomph.pretending.factories import (
    LEGACY,
    Function,
    move_of,
    named,
    patch_factories,
    patch_legacy_types,
)
from oomph.pretending.patches import Patches, put, wrap
from oomph.pretending.tensors import (
    GPU,
    HOST,
    META,
    OF_VALUES,
    empty_strided,
    factory,
    is_pretended,
    to_meta,
)
from oomph.rehearsing.script.places import (
    Name,
    Reported,
    Wanted,
    is_suspended,
    place_named,
    wanted,
)
from oomph.rehearsing.script.recorder import ScriptRecorder

# These take a device but are missing in torch's own list of such functions.
_UNLISTED = ((torch, ("normal",)), (torch.fft, ("fftfreq", "rfftfreq")))

# Called before a tensor is made: name, arguments, keywords.
Resize = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def install(
    recorder: ScriptRecorder,
    parameters: dict[int, weakref.ref[torch.Tensor]],
    on_input: Callable[[torch.Tensor], torch.Tensor],
    resize: Resize,
) -> None:
    """Patch how tensors are moved, read and made. `parameters` will hold the live ones."""
    _patch_to(recorder, on_input)
    _patch_parameter(recorder, parameters)
    _patch_data(recorder)
    _patch_deepcopy()
    _patch_lazy_parameters(recorder)
    patch_legacy_types(Patches())
    put(torch, **{name: _of_host(name) for name in LEGACY})
    _patch_bulk_reads(recorder)
    _patch_factories(recorder, resize)


def _patch_factories(recorder: ScriptRecorder, resize: Resize) -> None:
    """Wrap the factories of `pretending.tensors.install` again: those know only the GPU."""

    def placed(function: Function) -> Function:
        if function.__name__ in OF_VALUES:
            return _placed(named(partial(_with_values, recorder), function))
        return _placed(function, resize)

    patch_factories(Patches(), placed, _placed)
    for owner, names in _UNLISTED:
        for name in names:
            put(owner, **{name: named(_placed, named(factory, getattr(owner, name)))})
    _patch_new_tensor()
    _patch_context()


def _placed(function: Function, resize: Resize | None = None) -> Function:
    def made(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is None or is_suspended():
            return function(*args, **kwargs)
        place = place_named(device)
        if place == "meta":
            place = Wanted.loading or "meta"
        if resize is not None and place == "cuda":
            args, kwargs = resize(function.__name__, args, kwargs)
        with wanted(place):
            return function(*args, **kwargs)

    return made


def of_data(function: Function, args: Any, kwargs: Any) -> Any:
    """Make a tensor from a list of tensors and numbers, which torch reads without a visible op."""
    try:
        return function(*args, **kwargs)
    except RuntimeError:  # one of them may have no memory to read
        if not args or type(args[0]) not in (list, tuple) or is_suspended():
            raise
    return function(_numbers_of(args[0]), *args[1:], **kwargs)


def _numbers_of(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.tolist() if is_pretended(data) else data
    if type(data) in (list, tuple):
        return type(data)(map(_numbers_of, data))
    return data


def _with_values(recorder: ScriptRecorder, function: Function) -> Function:
    def made(*args: Any, **kwargs: Any) -> Any:
        data = args[0] if args else kwargs.get("data")
        out = of_data(function, args, kwargs)
        is_blank = is_pretended(out) and not isinstance(data, torch.Tensor) and not is_suspended()
        if is_blank:
            recorder.take_in(out, function.__name__)
            of_host = {name: value for name, value in kwargs.items() if name != "requires_grad"}
            value = of_data(function, args, {**of_host, "device": "cpu"})
            recorder.shadows.carry(out, value)
        return out

    return made


def _patch_new_tensor() -> None:
    """Patch it to `torch.tensor` with the tensor's own dtype and device, which torch documents."""

    def new_tensor(tensor: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        own: dict[str, Any] = {"dtype": tensor.dtype, "device": tensor.device}
        given = {name: value for name, value in kwargs.items() if value is not None}
        return torch.tensor(data, **(own | given))

    put(torch.Tensor, new_tensor=new_tensor)


def _patch_context() -> None:
    """Tell `with torch.device("meta")` and `with torch.device("cuda")` apart."""
    constructors = _device._device_constructors()

    def init(self: Any, device: Any) -> None:
        self.device, self.prev_mode = torch.device(device), None

    def function_of(self: Any, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in constructors or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        kwargs["device"] = to_meta(self.device)
        with wanted(place_named(self.device)):
            return function(*args, **kwargs)

    put(_device.DeviceContext, __init__=init, __torch_function__=function_of)


# ---- legacy types of host tensors ----------------------------------------------------------------


class _HostType(type):
    true: Any  # torch's own type, which is not a class and cannot be patched

    def __instancecheck__(cls, one: object) -> bool:
        if not isinstance(one, torch.Tensor) or not is_pretended(one):
            return isinstance(one, cls.true)
        return one.device.type == "cpu" and one.dtype == cls.true.dtype


def _of_host(name: str) -> type:
    """Return a class like `torch.LongTensor`, which also takes a list of GPU scalars."""
    true = getattr(torch, name)

    def made(_: type, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensor: torch.Tensor = of_data(true, args, kwargs)
        return tensor

    says = {"dtype": true.dtype, "layout": true.layout, "is_cuda": False}
    return _HostType(name, (), {"__new__": made, "true": true, "__module__": "torch", **says})


# ---- moves between host and GPU, and parameters, which never have memory -------------------------
# A parameter has no memory from the start and is on the host until it is moved. To C++ it is on
# `meta` before and after, so `Module.to` changes it in place. Optimizers made before the move, tied
# weights and weak references stay valid.


def _patch_to(recorder: ScriptRecorder, on_input: Callable[[torch.Tensor], torch.Tensor]) -> None:
    original: Function = torch._C.TensorBase.to  # the patch in `pretending` knows only the GPU

    def to(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        device, dtype, options = move_of(args, kwargs)
        # Under a TorchFunctionMode, C++'s own method calls this one again; the place is already
        # set.
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
            # C++ sees no move between two places without memory, so ask for a copy.
            return _Move.apply(tensor, dtype or tensor.dtype, there, options.get("memory_format"))

    def cuda(tensor: Any, device: Any = None, *_: Any, **__: Any) -> Any:
        return to(tensor, GPU if device is None else device)

    put(
        torch.Tensor,
        to=to,
        cuda=cuda,
        cpu=lambda tensor, *_, **__: to(tensor, "cpu"),
        type_as=lambda tensor, other: to(tensor, other),
        pin_memory=lambda tensor, *_, **__: tensor,
        is_pinned=lambda *_, **__: False,
        share_memory_=lambda tensor: tensor,
    )


class _Move(torch.autograd.Function):
    """A differentiable move: the gradient goes back to where the tensor came from."""

    @staticmethod
    def forward(context: Any, tensor: Any, dtype: Any, there: Name, memory_format: Any) -> Any:
        context.back = tensor.dtype, place_named(tensor.device)
        device = META if there != "cpu" else HOST
        with wanted(there):
            return torch.ops.aten._to_copy.default(
                tensor, dtype=dtype, device=device, memory_format=memory_format
            )

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        dtype, place = context.back
        return gradients[0].to(place, dtype), None, None, None


class _Arrival(torch.autograd.Function):
    """A real host tensor that needs a gradient moves in: C++ would reject one without memory."""

    @staticmethod
    def forward(
        context: Any, tensor: Any, dtype: Any, options: Any, move: Any, recorder: ScriptRecorder
    ) -> Any:
        context.back, context.recorder = tensor.dtype, recorder
        return move(tensor, META, dtype, **options)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = context.recorder.real(gradients[0]).to(context.back)
        return gradient, None, None, None, None


def _patch_parameter(recorder: ScriptRecorder, alive: dict[int, weakref.ref[torch.Tensor]]) -> None:
    @wrap("__new__", torch.nn.Parameter)
    def new(original: Any, cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if data is None:
            data = torch.empty(0, device="cpu")
        if (
            type(data) in (torch.Tensor, torch.nn.Parameter)
            and not is_pretended(data)
            and not is_suspended()
        ):
            data = hosted(recorder, data)
        made = original(cls, data, requires_grad)
        key = id(made)
        alive[key] = weakref.ref(made, lambda _: alive.pop(key, None))
        return made


def hosted(recorder: ScriptRecorder, tensor: torch.Tensor) -> torch.Tensor:
    """Return the host tensor without its memory."""
    with wanted("cpu"):
        out: torch.Tensor = empty_strided(
            tensor.size(), tensor.stride(), dtype=tensor.dtype, device=META
        )
    recorder.shadows.give(out, tensor.detach())
    return out


def _patch_data(recorder: ScriptRecorder) -> None:
    """Patch `parameter.data = ...` between tensors with and without memory."""
    base: Any = torch._C.TensorBase.data
    read, write = base.__get__, base.__set__

    def assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if is_pretended(tensor) and not is_pretended(value):
            value = hosted(recorder, value)
        elif is_pretended(value) and not is_pretended(tensor):
            requires_grad = tensor.requires_grad
            torch._C._swap_tensor_impl(tensor, value.detach().requires_grad_(requires_grad))
            return
        write(tensor, value)

    put(torch.Tensor, data=Reported("data", lambda tensor: read(tensor), assign))


def _patch_deepcopy() -> None:
    """Patch deepcopy, which copies a storage without memory without a visible op."""

    @wrap("__deepcopy__", torch.Tensor)
    def copied(original: Any, tensor: torch.Tensor, memo: Any) -> Any:
        if not is_pretended(tensor) or not tensor.is_leaf or type(tensor) is not torch.Tensor:
            return original(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


# ---- parameters of lazy modules, which get their shape from the first batch ----------------------


def _patch_lazy_parameters(recorder: ScriptRecorder) -> None:
    """Allow making and moving them without memory: torch lists allowed methods by identity."""
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


def _of_data(name: str) -> Function:
    """Move the data inside, which has a shape; a lazy parameter's own shape is never read."""
    return lambda lazy, *args, **kwargs: getattr(lazy.data, name)(*args, **kwargs)


def is_blank(tensor: torch.Tensor) -> bool:
    """Return whether the parameter has no shape yet."""
    return isinstance(tensor, parameter.UninitializedParameter)


# ---- bulk reads: `tolist`, `numpy`, `print` ------------------------------------------------------


def _patch_bulk_reads(recorder: ScriptRecorder) -> None:
    """Patch `tolist`, `numpy`, `print` and `one_hot`."""
    base: Any = torch._C.TensorBase  # its methods are not patched

    def numpy(tensor: Any, *, force: bool = False) -> Any:
        if not is_pretended(tensor) or is_suspended():
            recorder.deferred.flush(tensor)
            return base.numpy(tensor, force=force)
        if tensor.is_cuda and not force:
            raise TypeError(
                "can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the"
                " tensor to host memory first."
            )
        if tensor.requires_grad and not force:
            raise RuntimeError(
                "Can't call numpy() on Tensor that requires grad. Use tensor.detach().numpy()"
                " instead."
            )
        return base.numpy(recorder.real(tensor))

    def tolist(tensor: Any) -> Any:
        recorder.deferred.flush(tensor)
        return base.tolist(recorder.real(tensor) if is_pretended(tensor) else tensor)

    put(torch.Tensor, numpy=numpy, tolist=tolist)

    @wrap("__repr__", torch.Tensor)
    def represented(original: Any, tensor: Any, **options: Any) -> str:
        if is_suspended() or not is_pretended(tensor):
            return str(original(tensor, **options))
        device = ", device='cuda:0')" if tensor.is_cuda else ")"
        return str(original(_shown(recorder, tensor)))[:-1] + device

    @wrap("one_hot", torch.nn.functional)
    def one_hot(original: Any, tensor: Any, num_classes: int = -1) -> Any:
        """Read the number of classes from the labels if it is not given."""
        if num_classes < 0 and is_pretended(tensor):
            num_classes = int(tensor.max()) + 1
        return original(tensor, num_classes)


def _shown(recorder: ScriptRecorder, tensor: Any) -> Any:
    known = recorder.shadows.of(tensor)
    if known is not None:
        return known
    value = recorder.inventions.value_of(tensor)
    one = torch.full((), value, dtype=tensor.dtype, device="cpu")
    return one.expand(tensor.shape)  # takes no memory; torch prints a long tensor only in part
