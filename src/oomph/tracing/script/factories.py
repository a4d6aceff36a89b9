"""Functions that make tensors: where the script asks, with the values that it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _device

from oomph.tracing.pretend import _factory, is_pretended, to_meta
from oomph.tracing.script.places import Wanted, is_suspended, place_named, wanted

# They are given values, which torch writes where no op shows them.
_OF_VALUES = ("tensor", "as_tensor", "asarray", "scalar_tensor")
# They take a device, and torch's own list of such functions does not have them.
_UNLISTED = ("normal",)
_OF_FFT = ("fftfreq", "rfftfreq")
_NEW = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


# What is asked for, before it is made: name, arguments, keywords.
Resize = Callable[[str, tuple[Any, ...], dict[str, Any]], tuple[tuple[Any, ...], dict[str, Any]]]


def install(recorder: Any, resize: Resize) -> None:
    """Wrap what `pretend.install` has wrapped, which knows of one place only."""
    names = {function.__name__ for function in _device._device_constructors()}
    names |= {name for name in dir(torch) if name.endswith("_like")}
    for name in sorted(names):
        function = getattr(torch, name, None)
        if callable(function) and name not in _OF_VALUES:
            setattr(torch, name, _placed(function, resize))
    for owner, unlisted in ((torch, _UNLISTED), (torch.fft, _OF_FFT)):
        for name in unlisted:
            setattr(owner, name, _placed(_factory(torch, getattr(owner, name))))
    for name in _OF_VALUES:
        function = _with_values(recorder, getattr(torch, name))
        setattr(torch, name, _placed(function))
    methods: Any = torch.Tensor
    for name in _NEW:
        setattr(methods, name, _placed(getattr(methods, name)))
    _patch_new_tensor()
    _patch_context()
    _patch_generator()


def _placed(function: Callable[..., Any], resize: Resize | None = None) -> Callable[..., Any]:
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

    made.__name__, made.__doc__ = function.__name__, function.__doc__
    table = torch.jit._builtins._get_builtin_table()
    if id(function) in table:
        table[id(made)] = table[id(function)]
    return made


def of_data(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Of a list of tensors and numbers, too: torch reads them where no op shows it."""
    try:
        return function(*args, **kwargs)
    except RuntimeError:  # it may have come to one that has no memory to be read
        if not args or type(args[0]) not in (list, tuple) or is_suspended():
            raise
    return function(_numbers_of(args[0]), *args[1:], **kwargs)


def _numbers_of(data: Any) -> Any:
    if isinstance(data, torch.Tensor):
        return data.tolist() if is_pretended(data) else data
    if type(data) in (list, tuple):
        return type(data)(map(_numbers_of, data))
    return data


def _with_values(recorder: Any, function: Callable[..., Any]) -> Callable[..., Any]:
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

    made.__name__, made.__doc__ = function.__name__, function.__doc__
    return made


def _patch_new_tensor() -> None:
    """As `torch.tensor` with the tensor's own dtype and device, which torch says it is."""

    def new_tensor(tensor: Any, data: Any, **kwargs: Any) -> Any:
        own = {"dtype": tensor.dtype, "device": tensor.device}
        given = {name: value for name, value in kwargs.items() if value is not None}
        return torch.tensor(data, **(own | given))

    methods: Any = torch.Tensor
    methods.new_tensor = new_tensor


def _patch_context() -> None:
    """`with torch.device("meta")` and `with torch.device("cuda")` are two places."""
    kind: Any = _device.DeviceContext
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

    kind.__init__, kind.__torch_function__ = init, function_of


def _patch_generator() -> None:
    """A generator of the GPU says so. What it draws is nobody's."""
    kind: Any = torch.Generator
    plain = kind.__base__

    class Generator(plain):  # type: ignore[misc, valid-type]
        def __new__(cls, device: Any = "cpu") -> Any:
            made = plain.__new__(cls, "cpu")
            made.place = torch.device(device)
            return made

        @property
        def device(self) -> Any:
            return self.place

    module: Any = torch
    module.Generator = Generator
