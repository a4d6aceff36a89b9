"""autocast("cuda") for pretended tensors, and for those of the emulated GPU.

Meta tensors have no autocast of their own, and CPU tensors have another. CUDA's lists of ops are
read from torch's own header, and their casts are registered under CUDA's key, which the recorder
switches on.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from oomph.tracing import recurrent
from oomph.tracing.pretend import is_pretended

_kept_alive: list[Any] = []  # a library that is collected takes its kernels with it
_cast_weights: dict[
    int, tuple[Any, Any]
] = {}  # id of a leaf -> the leaf, and its low-precision copy


class _Cast:
    """Which tensors are cast."""

    is_on_gpu: Callable[[Any], bool] = staticmethod(is_pretended)


def install() -> None:
    """Register the casts. Once per process, before anything is traced."""
    _kept_alive.append(_registered())
    _patch_cache_clearing()


@contextlib.contextmanager
def installed(is_on_gpu: Callable[[Any], bool]) -> Iterator[None]:
    """For a while, with another measure of what is on the GPU. Each thread enters `guard`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: that its own casts are overridden
        library = _registered()
    clear, before = torch.clear_autocast_cache, _Cast.is_on_gpu
    _Cast.is_on_gpu = staticmethod(is_on_gpu)
    _patch_cache_clearing()
    try:
        yield
    finally:
        library._destroy()
        _Cast.is_on_gpu = staticmethod(before)
        torch.clear_autocast_cache = clear
        _cast_weights.clear()


def _registered() -> Any:
    """The library that holds the casts, as long as it is alive."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    library = torch.library.Library("aten", "IMPL")
    wrappers: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("AT_FORALL_LOWER_PRECISION_FP", _to_low),
        ("AT_FORALL_FP32", _to_fp32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", _with_fp32_dtype),
        ("AT_FORALL_PROMOTE", _promoted),
    )
    for macro, wrapper in wrappers:
        for name in _ops(text, macro):
            _register(library, name, wrapper)
    for name in ("norm.Scalar", "norm.ScalarOpt_dim"):
        _register(library, name, _to_fp32)
    library.impl("_cudnn_rnn", _recurrent, "AutocastCUDA", allow_override=True)
    return library


def _recurrent(*args: Any) -> Any:
    """Weights and input in half precision, whatever autocast's dtype is (AutocastRNN.cpp)."""
    with _without_autocast():
        return recurrent.cast_and_flattened(torch.float16, cast)(*args)


def _ops(header: str, macro: str) -> list[str]:
    """The ops that a macro of the header lists: `_(conv1d)`, `_(conv1d, padding)`."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", header)
    if body is None:
        raise LookupError(f"this torch's autocast_mode.h has no {macro}")
    found = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return [".".join(part for part in parts if part) for parts in found]


def _register(library: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return  # an op that this build does not have
    op = getattr(packet, overload or "default")
    library.impl(name, wrapper(op), "AutocastCUDA", allow_override=True)


def _without_autocast() -> Any:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return torch._C._ExcludeDispatchKeyGuard(key)


def guard() -> Any:
    """Entered while recording: pretended tensors then obey torch.autocast("cuda")."""
    return torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA)


def _low_dtype() -> Any:
    return torch.get_autocast_dtype("cuda")


def _called(op: Any, args: Any, kwargs: Any, dtype: Any) -> Any:
    # From right to left, as compiled calls evaluate their arguments: bias, weight, input.
    keywords = {name: cast(value, dtype) for name, value in kwargs.items()}
    return op(*[cast(value, dtype) for value in args[::-1]][::-1], **keywords)


def _to_low(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return _called(op, args, kwargs, _low_dtype())

    return kernel


def _to_fp32(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return _called(op, args, kwargs, torch.float32)

    return kernel


def _with_fp32_dtype(op: Any) -> Any:
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            first = args[0] if args else None
            is_low = isinstance(first, torch.Tensor) and first.dtype in _low_dtypes()
            is_given = kwargs.get("dtype") is not None or args[place : place + 1] not in (
                (),
                (None,),
            )
            if is_low and not is_given:
                args, kwargs["dtype"] = args[:place], torch.float32
            return op(*args, **kwargs)

    return kernel


def _promoted(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            widest = torch.float32 if _any_fp32((*args, *kwargs.values())) else _low_dtype()
            return _called(op, args, kwargs, widest)

    return kernel


def _any_fp32(values: Any) -> bool:
    for value in values:
        if isinstance(value, list | tuple) and _any_fp32(value):
            return True
        if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
            return True
    return False


def _low_dtypes() -> tuple[Any, ...]:
    return (torch.float16, torch.bfloat16)


def cast(value: Any, dtype: Any) -> Any:
    """A floating tensor in `dtype`, as autocast does it, with its cache of weights."""
    if isinstance(value, list | tuple):
        return type(value)(cast(item, dtype) for item in value)
    if not isinstance(value, torch.Tensor) or not _Cast.is_on_gpu(value):
        return value
    if not value.is_floating_point() or value.dtype in (dtype, torch.float64):
        return value
    if not _is_cached(value, dtype):
        return value.to(dtype)
    if id(value) not in _cast_weights:
        _cast_weights[id(value)] = (value, value.to(dtype))
    return _cast_weights[id(value)][1]


def _is_cached(tensor: Any, dtype: Any) -> bool:
    is_weight = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    goes_down = tensor.dtype == torch.float32 and dtype == _low_dtype()
    return bool(is_weight and goes_down and torch.is_autocast_cache_enabled())


def _patch_cache_clearing() -> None:
    original = torch.clear_autocast_cache

    def clear() -> None:
        _cast_weights.clear()
        original()

    torch.clear_autocast_cache = clear
