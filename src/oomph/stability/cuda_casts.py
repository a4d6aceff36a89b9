"""torch.autocast("cuda") for tensors of the CPU: the same ops are cast, to the same dtypes.

The CPU has an autocast of its own with other lists of ops (there softmax and norms are not in
fp32). CUDA's lists are read from torch's own header, and their casts are registered under CUDA's
key, which is switched on for every tensor. Patches torch for good: for a process of its own.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.amp import autocast_mode

LOW = (torch.float16, torch.bfloat16)
_kept_alive: list[Any] = []  # a library that is collected takes its kernels with it
_cast_weights: dict[int, tuple[Any, Any]] = {}  # id of a weight -> the weight, and its copy


def install() -> None:
    """Register the casts. A second time does nothing."""
    if _kept_alive:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels are overridden, as they are
        library = torch.library.Library("aten", "IMPL")
        _kept_alive.append(library)
        text = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()
        for macro, kernel in _KERNELS.items():
            for name in _ops(text, macro):
                _register(library, name, kernel)
        for name in ("norm.Scalar", "norm.ScalarOpt_dim"):
            _register(library, name, _in_fp32)
    _patch()


def switched_on() -> Any:
    """Within this, tensors of the CPU obey torch.autocast("cuda")."""
    return torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.AutocastCUDA)


def _ops(header: str, macro: str) -> list[str]:
    """The ops that a macro of the header lists: `_(conv1d)`, `_(conv1d, padding)`."""
    body = re.search(rf"#define {macro}\(_\)((?:.*\\\n)*.*\n)", header)
    if body is None:
        raise LookupError(f"this torch's autocast_mode.h has no {macro}")
    found = re.findall(r"_\((\w+)(?:,\s*(\w+))?\)", body.group(1))
    return [".".join(part for part in parts if part) for parts in found]


def _register(library: Any, name: str, kernel: Callable[[Any, Any, Any], Any]) -> None:
    base, _, overload = name.partition(".")
    packet = getattr(torch.ops.aten, base, None)
    if packet is None or (overload or "default") not in packet.overloads():
        return  # an op that this build does not have
    op = getattr(packet, overload or "default")
    key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)

    def casting(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(key):
            return kernel(op, args, kwargs)

    library.impl(name, casting, "AutocastCUDA", allow_override=True)


# ---- what each list does -----------------------------------------------------------------------


def _in_low(op: Any, args: Any, kwargs: Any) -> Any:
    return _called(op, args, kwargs, torch.get_autocast_dtype("cuda"))


def _in_fp32(op: Any, args: Any, kwargs: Any) -> Any:
    return _called(op, args, kwargs, torch.float32)


def _to_fp32(op: Any, args: Any, kwargs: Any) -> Any:
    """Sums and the like: their result is in fp32, unless the caller says otherwise."""
    place = [argument.name for argument in op._schema.arguments].index("dtype")
    is_given = kwargs.get("dtype") is not None or args[place : place + 1] not in ((), (None,))
    if isinstance(args[0], torch.Tensor) and args[0].dtype in LOW and not is_given:
        args, kwargs = args[:place], {**kwargs, "dtype": torch.float32}
    return op(*args, **kwargs)


def _in_widest(op: Any, args: Any, kwargs: Any) -> Any:
    has_fp32 = any(t.dtype == torch.float32 for t in _tensors((*args, *kwargs.values())))
    return _called(
        op, args, kwargs, torch.float32 if has_fp32 else torch.get_autocast_dtype("cuda")
    )


_KERNELS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "AT_FORALL_LOWER_PRECISION_FP": _in_low,
    "AT_FORALL_FP32": _in_fp32,
    "AT_FORALL_FP32_SET_OPT_DTYPE": _to_fp32,
    "AT_FORALL_PROMOTE": _in_widest,
}


def _called(op: Any, args: Any, kwargs: Any, dtype: Any) -> Any:
    return op(
        *[_cast(value, dtype) for value in args],
        **{name: _cast(value, dtype) for name, value in kwargs.items()},
    )


def _cast(value: Any, dtype: Any) -> Any:
    """A floating tensor in `dtype`, as autocast does it, with its cache of weights."""
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    if value.dtype in (dtype, torch.float64):
        return value
    if not _is_cached(value, dtype):
        return value.to(dtype)
    if id(value) not in _cast_weights:
        _cast_weights[id(value)] = (value, value.to(dtype))
    return _cast_weights[id(value)][1]


def _is_cached(tensor: Any, dtype: Any) -> bool:
    is_weight = tensor.is_leaf and tensor.requires_grad and not tensor._is_view()
    goes_down = tensor.dtype == torch.float32 and dtype in LOW
    return bool(is_weight and goes_down and torch.is_autocast_cache_enabled())


def _tensors(values: Any) -> list[Any]:
    found = []
    for value in values:
        if isinstance(value, list | tuple):
            found += _tensors(value)
        elif isinstance(value, torch.Tensor):
            found.append(value)
    return found


# ---- what models ask torch about autocast --------------------------------------------------------


def _patch() -> None:
    """Autocast for "cpu" is autocast for "cuda": models ask with the device of their tensors."""
    any_torch: Any = torch
    mode: Any = autocast_mode
    any_torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    any_torch.cuda.is_bf16_supported = lambda *_, **__: True
    started, cleared, cast = mode.autocast.__init__, torch.clear_autocast_cache, mode._cast

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        started(self, "cuda" if device_type == "cpu" else device_type, *args, **kwargs)

    def clear() -> None:
        _cast_weights.clear()
        cleared()

    mode.autocast.__init__ = start
    mode._cast = lambda value, _, dtype: cast(value, "cpu", dtype)  # of custom_fwd
    any_torch.clear_autocast_cache = clear
    for name in ("is_autocast_enabled", "get_autocast_dtype"):
        setattr(torch, name, _asked_for_cuda(getattr(torch, name)))


def _asked_for_cuda(ask: Any) -> Any:
    def asked(device_type: str = "cuda") -> Any:
        return ask("cuda" if device_type == "cpu" else device_type)

    return asked
