"""Apply torch.autocast("cuda") to pretended tensors and to tensors on the emulated GPU.

Meta tensors have no autocast, and CPU tensors have a different one. oomph reads CUDA's op lists
from torch's own header and registers their casts under CUDA's dispatch key. The recorder switches
that key on.
"""

from __future__ import annotations

import contextlib
import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.amp import autocast_mode

from oomph.pretending import recurrent
from oomph.pretending.tensors import is_pretended, tensors_in

LOW = (torch.float16, torch.bfloat16)

_kept_alive: list[Any] = []  # a library that is garbage collected takes its kernels with it
# id of a leaf -> the leaf and its low-precision copy
_cast_weights: dict[int, tuple[Any, Any]] = {}


class _Cast:
    """Hold the test that decides which tensors are cast."""

    is_on_gpu: Callable[[Any], bool] = staticmethod(is_pretended)


def install() -> None:
    """Register the casts. Call this once per process, before anything is traced."""
    _kept_alive.append(_registered())
    _patch_cache_clearing()


@contextlib.contextmanager
def installed(is_on_gpu: Callable[[Any], bool]) -> Iterator[None]:
    """Register the casts for a while, with another test for what is on the GPU.

    Each thread has to enter `guard`.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that its own casts are overridden
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
    """Return the library that holds the casts; they are registered as long as it is alive."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "autocast_mode.h"
    text = header.read_text()
    library = torch.library.Library("aten", "IMPL")
    to_fp32 = _casting(lambda _: torch.float32)
    wrappers: tuple[tuple[str, Callable[[Any], Any]], ...] = (
        ("AT_FORALL_LOWER_PRECISION_FP", _casting(lambda _: _low_dtype())),
        ("AT_FORALL_FP32", to_fp32),
        ("AT_FORALL_FP32_SET_OPT_DTYPE", _with_fp32_dtype),
        ("AT_FORALL_PROMOTE", _casting(_widest)),
    )
    for macro, wrapper in wrappers:
        for name in _ops(text, macro):
            _register(library, name, wrapper)
    for name in ("norm.Scalar", "norm.ScalarOpt_dim"):
        _register(library, name, to_fp32)
    library.impl("_cudnn_rnn", _recurrent, "AutocastCUDA", allow_override=True)
    return library


def _recurrent(*args: Any) -> Any:
    """Cast weights and input to half precision, whatever autocast's dtype is (AutocastRNN.cpp)."""
    with _without_autocast():
        return recurrent.cast_and_flattened(torch.float16, cast)(*args)


def _ops(header: str, macro: str) -> list[str]:
    """Return the ops that a macro in the header lists: `_(conv1d)`, `_(conv1d, padding)`."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", header)
    if body is None:
        raise LookupError(f"this torch's autocast_mode.h has no {macro}")
    found = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return [".".join(part for part in parts if part) for parts in found]


def _register(library: Any, name: str, wrapper: Callable[[Any], Any]) -> None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return  # this build of torch does not have the op
    op = getattr(packet, overload or "default")
    library.impl(name, wrapper(op), "AutocastCUDA", allow_override=True)


def _without_autocast() -> AbstractContextManager[None]:
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)
    return torch._C._ExcludeDispatchKeyGuard(key)


def guard() -> AbstractContextManager[None]:
    """Return the guard that makes pretended tensors obey torch.autocast("cuda") while recording."""
    return torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA)


def _low_dtype() -> torch.dtype:
    return torch.get_autocast_dtype("cuda")


def _casting(dtype_for: Callable[[Any], torch.dtype]) -> Callable[[Any], Any]:
    """Return a wrapper that casts an op's floating-point arguments to a dtype chosen from them."""

    def wrapper(op: Any) -> Any:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            with _without_autocast():
                dtype = dtype_for((args, kwargs))
                # From right to left, as compiled code evaluates arguments: bias, weight, input.
                keywords = {name: cast(value, dtype) for name, value in kwargs.items()}
                return op(*[cast(value, dtype) for value in args[::-1]][::-1], **keywords)

        return kernel

    return wrapper


def _widest(values: Any) -> torch.dtype:
    has_fp32 = any(tensor.dtype == torch.float32 for tensor in tensors_in(values))
    return torch.float32 if has_fp32 else _low_dtype()


def _with_fp32_dtype(op: Any) -> Any:
    place = [argument.name for argument in op._schema.arguments].index("dtype")

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            first = args[0] if args else None
            is_low = isinstance(first, torch.Tensor) and first.dtype in LOW
            given = args[place] if len(args) > place else kwargs.get("dtype")
            if is_low and given is None:
                args, kwargs["dtype"] = args[:place], torch.float32
            return op(*args, **kwargs)

    return kernel


def cast(value: Any, dtype: Any) -> Any:
    """Cast a floating-point tensor to `dtype` as autocast does, using its cache of weights."""
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


# ---- torch.autocast("cuda") for CPU tensors ------------------------------------------------------
# The CPU's own autocast has different op lists: its softmax and norms are not in fp32. CUDA's casts
# are registered above; the code below makes torch treat them as the CPU's. These patches are never
# undone, so use them only in a separate process.


@contextlib.contextmanager
def known_to_models() -> Iterator[None]:
    """Make CPU tensors obey torch.autocast("cuda") while the casts are switched on.

    While they are off, a model's own autocast does nothing. The reference step relies on that.
    """
    _answer_for_cuda()
    with installed(lambda _: True):
        yield


@functools.cache
def _answer_for_cuda() -> None:
    """Answer questions about autocast for "cpu" with the state for "cuda".

    Models ask with the device type of their tensors, which is "cpu" here.
    """
    any_torch: Any = torch
    mode: Any = autocast_mode
    any_torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    any_torch.cuda.is_bf16_supported = lambda *_, **__: True
    started, cast = mode.autocast.__init__, mode._cast

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        started(self, "cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    mode.autocast.__init__ = start
    mode._cast = lambda value, _, dtype: cast(value, "cpu", dtype)  # custom_fwd calls this
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        setattr(torch, name, _asked_for_cuda(getattr(torch, name)))


def _asked_for_cuda(ask: Any) -> Any:
    def asked(device_type: str = "cuda") -> Any:
        return ask("cuda" if device_type == "cpu" else device_type)

    return asked
