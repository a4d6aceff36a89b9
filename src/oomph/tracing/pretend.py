"""Meta tensors that say they are on a GPU.

To C++ a pretended tensor is on `meta`: it has a size and no memory, autograd needs no device
and runs backward in the calling thread. To Python it is on `cuda:0`, so that a script, a model
and torch's own Python take the branches that they take on a GPU. Tensors on the CPU stay real.

`install` patches torch for the whole process and cannot be undone.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch

from oomph.tracing import streams

GPU_NAME = "oomph's pretended GPU"

# Is a tensor on `meta` in truth? Torch's own getter, which no patch reaches.
is_pretended: Callable[[Any], bool] = torch._C.TensorBase.is_meta.__get__  # type: ignore[attr-defined]


class Lie:
    """Whether tensors tell the truth at the moment."""

    suspended = 0  # > 0 while a meta kernel or the building of a model runs, which must see `meta`
    building = 0  # > 0 while a model is built: as users do, on the host, whatever device is named
    in_setitem = 0  # > 0 inside `x[i] = 3`: on a GPU the scalar stays on the host
    hosted: dict[int, Any] = {}  # storages that stand for the host's memory # noqa: RUF012
    # A real copy of a pretended tensor, by whoever knows of values.
    real: Callable[[Any], Any] = staticmethod(lambda it: torch.zeros(it.shape, dtype=it.dtype))
    give: Callable[[Any, Any], None] | None = None  # told what values a pretended tensor has
    capability = (8, 0)
    total_bytes = 1 << 60


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Let tensors say the truth: for kernels of the meta device, and for building a model."""
    Lie.suspended += 1
    try:
        yield
    finally:
        Lie.suspended -= 1


def install(capability: tuple[int, int] = (8, 0), total_bytes: int = 1 << 60) -> None:
    """Make this process believe that it has a GPU."""
    Lie.capability, Lie.total_bytes = capability, total_bytes
    # Imported first: decorators of torch import it lazily, and it breaks on patched classes.
    import torch._dynamo

    _patch_tensor(torch)
    _patch_factories(torch)
    _patch_moves(torch)
    _patch_cuda(torch)
    _patch_switches(torch)


def _patch_tensor(torch: Any) -> None:
    base = torch._C.TensorBase
    true_device, on_meta = base.device.__get__, base.is_meta.__get__
    gpu, host = torch.device("cuda", 0), torch.device("cpu")

    def is_hosted(tensor: Any) -> bool:
        return bool(Lie.hosted) and tensor.untyped_storage()._cdata in Lie.hosted

    def is_cuda(tensor: Any) -> bool:
        return not Lie.suspended and on_meta(tensor) and not is_hosted(tensor)

    def device(tensor: Any) -> Any:
        true = true_device(tensor)
        if Lie.suspended or true.type != "meta":
            return true
        return host if is_hosted(tensor) else gpu

    torch.Tensor.device = property(device)
    torch.Tensor.is_cuda = property(is_cuda)
    torch.Tensor.is_meta = property(lambda tensor: bool(Lie.suspended) and on_meta(tensor))
    torch.Tensor.get_device = lambda tensor: 0 if on_meta(tensor) else -1
    _patch_setitem(torch)
    _patch_repr(torch)


def _patch_repr(torch: Any) -> None:
    """`print(x)` in a model: its values do not exist, and printing them must not end it."""
    original = torch.Tensor.__repr__

    def represented(tensor: Any, **options: Any) -> str:
        if Lie.suspended or not is_pretended(tensor):
            return str(original(tensor, **options))
        shape, dtype = tuple(tensor.shape), tensor.dtype
        return f"tensor(..., device='{tensor.device}', size={shape}, dtype={dtype})"

    torch.Tensor.__repr__ = represented


def _patch_setitem(torch: Any) -> None:
    original = torch.Tensor.__setitem__

    def setitem(tensor: Any, key: Any, value: Any) -> None:
        is_scalar = not isinstance(value, torch.Tensor)
        Lie.in_setitem += is_scalar
        try:
            original(tensor, key, value)
        finally:
            Lie.in_setitem -= is_scalar

    torch.Tensor.__setitem__ = setitem


def to_meta(device: Any) -> Any:
    """`meta` for whatever names a GPU; the host while a model is built."""
    is_gpu = isinstance(device, int) or str(device).startswith("cuda")
    if not is_gpu:
        return device
    return torch.device("cpu" if Lie.building else "meta")


def _patch_factories(torch: Any) -> None:
    """Every function that makes a tensor, so that `device="cuda"` makes a pretended one.

    Not by a TorchFunctionMode: that is switched off inside functions which are themselves
    written in Python, and nested factories would escape it.
    """
    from torch.utils._device import DeviceContext, _device_constructors

    constructors = _device_constructors()
    for name in dir(torch):
        function = getattr(torch, name)
        if callable(function) and _is_one_of(function, constructors):
            setattr(torch, name, _factory(torch, function))
    for name in [name for name in dir(torch) if name.endswith("_like")]:
        setattr(torch, name, _factory(torch, getattr(torch, name)))
    for name in (
        "new_empty",
        "new_empty_strided",
        "new_full",
        "new_ones",
        "new_tensor",
        "new_zeros",
    ):
        setattr(torch.Tensor, name, _factory(torch, getattr(torch.Tensor, name)))
    _patch_new(torch)
    original = DeviceContext.__init__
    DeviceContext.__init__ = lambda self, device: original(self, to_meta(device))  # type: ignore[method-assign]


def _patch_new(torch: Any) -> None:
    """`gradient.new(indices, values, size)`, as torch's own optimizers for sparse gradients."""
    original = torch.Tensor.new
    assemble = torch.ops.aten._sparse_coo_tensor_with_dims_and_tensors.default

    def new(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_pretended(tensor) or tensor.layout is not torch.sparse_coo or len(args) != 3:
            return original(tensor, *args, **kwargs)
        indices, values, size = args
        made = {"dtype": values.dtype, "layout": tensor.layout, "device": torch.device("meta")}
        return assemble(len(indices), values.dim() - 1, size, indices, values, **made)

    torch.Tensor.new = new


def _is_one_of(function: Any, constructors: Any) -> bool:
    try:
        return function in constructors
    except TypeError:  # not hashable, so no function
        return False


# They are given values, which torch writes where no op shows them.
OF_VALUES = frozenset({"tensor", "as_tensor", "asarray", "scalar_tensor", "new_tensor"})


def _factory(torch: Any, function: Callable[..., Any]) -> Callable[..., Any]:
    is_of_values = function.__name__ in OF_VALUES

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = to_meta(kwargs["device"])
            if kwargs["device"].__class__ is torch.device and kwargs["device"].type == "meta":
                kwargs.pop("generator", None)
                kwargs.pop("pin_memory", None)
        out = function(*args, **kwargs)
        if is_of_values and Lie.give and not Lie.suspended and is_pretended(out):
            of_host = {name: value for name, value in kwargs.items() if name != "requires_grad"}
            if not (args and isinstance(args[0], torch.Tensor)):  # an op shows that one's
                Lie.give(out, function(*args, **{**of_host, "device": "cpu"}))
        return out

    # Not functools.wraps: `__wrapped__` makes inspect and torch.jit.script fail.
    wrapped.__name__, wrapped.__doc__ = function.__name__, function.__doc__
    table = torch.jit._builtins._get_builtin_table()
    if id(function) in table:
        table[id(wrapped)] = table[id(function)]
    return wrapped


def _patch_moves(torch: Any) -> None:
    original_to = torch.Tensor.to

    def to(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = to_meta(kwargs["device"])
        if args and isinstance(args[0], str | int | torch.device):
            args = (to_meta(args[0]), *args[1:])
        elif args and isinstance(args[0], torch.Tensor) and is_pretended(args[0]):
            args = (torch.device("meta"), args[0].dtype, *args[1:])
        wanted = kwargs.get("device") or (args[0] if args else None)
        if is_pretended(tensor) and str(wanted) == "cpu" and Lie.building:
            return original_to(tensor, *args[1:], **{**kwargs, "device": torch.device("meta")})
        if is_pretended(tensor) and str(wanted) == "cpu":
            return _brought_to_cpu(torch, tensor, args[1:], kwargs)
        return original_to(tensor, *args, **kwargs)

    def cpu(tensor: Any, *_: Any, **__: Any) -> Any:
        if not is_pretended(tensor) or Lie.building:
            return tensor
        return _brought_to_cpu(torch, tensor, (), {})

    original_tolist = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: original_tolist(cpu(tensor))
    torch.Tensor.to = to
    torch.Tensor.cuda = lambda tensor, *_, **__: to(tensor, "cuda")
    torch.Tensor.cpu = cpu
    torch.Tensor.pin_memory = lambda tensor, *_, **__: tensor
    torch.Tensor.is_pinned = lambda *_, **__: False
    torch.Tensor.record_stream = lambda *_, **__: None


def _brought_to_cpu(torch: Any, tensor: Any, args: Any, kwargs: Any) -> Any:
    """A real tensor of that shape, with what is known of its contents."""
    dtype = kwargs.get("dtype") or next((a for a in args if isinstance(a, torch.dtype)), None)
    real = Lie.real(tensor)
    return real if dtype is None else real.to(dtype)


class OnlyDevice:
    """`with torch.cuda.device(0)`: there is one."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.idx = self.prev_idx = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def nothing(*_: Any, **__: Any) -> None:
    """What synchronises, seeds or empties: nothing runs here."""


def _patch_cuda(torch: Any) -> None:
    class Properties:
        name = GPU_NAME
        major, minor = Lie.capability
        total_memory = Lie.total_bytes
        multi_processor_count = 108
        warp_size = 32
        max_threads_per_multi_processor = 2048
        regs_per_multiprocessor = 65536
        shared_memory_per_block = 49152
        gcnArchName = ""  # noqa: N815 - torch's name

    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "set_device": lambda _: None,
        "get_device_capability": lambda *_: Lie.capability,
        "get_device_properties": lambda *_: Properties(),
        "get_device_name": lambda *_: GPU_NAME,
        "get_arch_list": list,
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or Lie.capability >= (8, 0)
        ),
        "is_current_stream_capturing": lambda: False,
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "seed": lambda: None,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
        "get_rng_state_all": lambda: [torch.zeros(16, dtype=torch.uint8)],
        "set_rng_state": lambda *_, **__: None,
        "set_rng_state_all": lambda *_: None,
        "mem_get_info": lambda *_: (Lie.total_bytes, Lie.total_bytes),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "memory_reserved": lambda *_: 0,
        "max_memory_reserved": lambda *_: 0,
        "reset_peak_memory_stats": nothing,
        "reset_accumulated_memory_stats": nothing,
        "memory_stats": lambda *_, **__: defaultdict(int),
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": streams.use_stream,
        "StreamContext": streams.use_stream,
        "device": OnlyDevice,
        "device_of": OnlyDevice,
        "Stream": streams.Stream,
        "Event": streams.Event,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)
    # bitsandbytes takes it when it is imported; torch's builds for the CPU do not have it.
    if not hasattr(torch._C, "_cuda_getCurrentRawStream"):
        torch._C._cuda_getCurrentRawStream = lambda _: 0
    patch_accelerator(answers)
    patch_marks()


def patch_accelerator(answers: dict[str, Any]) -> None:
    """torch.accelerator: what torch.cuda answers, by its other name."""
    here = torch.device("cuda")
    own: dict[str, Any] = {
        "current_accelerator": lambda *_, **__: here,
        "current_device_index": lambda: 0,
        "current_device_idx": lambda: 0,
        "set_device_index": nothing,
        "set_device_idx": nothing,
        "device_index": OnlyDevice,
        "empty_host_cache": nothing,
        "get_memory_info": answers["mem_get_info"],
        # CUDA knows all of them; which ones are fast is another question.
        "get_device_capability": lambda *_, **__: {"supported_dtypes": set(_DTYPES)},
    }
    for module in (torch.accelerator, getattr(torch.accelerator, "memory", None)):
        for name in dir(module):
            if name in own or name in answers:
                setattr(module, name, own[name] if name in own else answers[name])


_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def patch_marks() -> None:
    """NVTX, whose ranges a profiler shows: a torch without CUDA has none."""
    marks: Any = torch.cuda.nvtx
    marks.range_push = marks.range_pop = lambda *_, **__: 0
    marks.range_start = lambda *_, **__: 0
    marks.range_end = marks.mark = nothing


def _patch_switches(torch: Any) -> None:
    """Places where torch switches something off because it finds no GPU after all."""
    import torch.cuda.amp.common
    from torch.optim import Optimizer

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(Optimizer, name):
            setattr(Optimizer, name, lambda _: None)
    # It must stay a class: annotations such as `Generator | None` use it.
    original = torch.Generator
    torch.Generator = type(
        "Generator", (original,), {"__new__": lambda cls, *_, **__: original.__new__(cls, "cpu")}
    )
