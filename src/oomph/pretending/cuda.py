"""Stand in for torch.cuda and torch.accelerator on a GPU that does not exist.

A `Gpu` describes the device and answers its memory functions. It is either a rehearsal's GPU (here
and in script/rehearsal.py) or the emulated one (card.py). Memory queries are answered below
torch.cuda, in torch._C, so torch's own memory_allocated, memory_stats and memory_summary stay
unchanged. Anything that is not supported raises NotPretended with its name.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable
from inspect import signature
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch
import torch.cuda.amp.common
from torch.optim import Optimizer

from oomph.errors import UsageError
from oomph.pretending import streams
from oomph.pretending.memory_stats import Statistics
from oomph.pretending.patches import Patches, put
from oomph.records.generation import DEFAULT_NUM_SMS, generation_of
from oomph.units import MIB

# Read before torch is patched. Older versions went by the GPU's generation alone.
_KNOWS_EMULATION = "including_emulation" in signature(torch.cuda.is_bf16_supported).parameters
_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


class NotPretended(UsageError, RuntimeError):
    """A part of CUDA that the pretended GPU does not have.

    It is also a RuntimeError, as torch raises, so libraries notice that the feature is missing.
    """


def nothing(*_: Any, **__: Any) -> None:
    """Do nothing, for synchronise, seed and empty: nothing runs on this GPU."""


class Gpu:
    """The GPU of a rehearsal. It does not count memory, so all of its memory is free."""

    on_emptied: Callable[[], None] = staticmethod(nothing)  # of the rehearsal that runs
    kind = "pretended"
    uuid: str | None = "00000000-0000-0000-0000-000000000000"
    instead = "a branch of the model for GPUs without it"
    count = 1
    name: str
    total_bytes: int
    capability: tuple[int, int]
    multi_processor_count: int

    def __init__(self, capability: tuple[int, int], total_bytes: int = 1 << 60) -> None:
        self.name = f"oomph's {self.kind} GPU"
        self.capability, self.total_bytes = capability, total_bytes
        self.multi_processor_count = DEFAULT_NUM_SMS
        # Ampere or later. Reading this attribute is not noted for scripts.
        self.is_ampere = generation_of(capability).has_bf16

    def check(self, device: Any) -> None:
        """Raise RuntimeError if the device does not exist."""

    def refuse(self, name: str, because: str) -> NoReturn:
        raise NotPretended(
            f"the {self.kind} GPU has no {name}", because=because, attempt=self.instead
        )

    def answers(self) -> dict[str, Any]:
        """Return what functions of torch.cuda answer on this kind of GPU, by name."""
        return {
            "utilization": lambda *_, **__: 0,
            "memory_usage": lambda *_, **__: 0,
            "temperature": lambda *_, **__: 40,
            "power_draw": lambda *_, **__: 0,
            "clock_rate": lambda *_, **__: 0,
            "ExternalStream": streams.Stream,
            # A function of its own: a script's rehearsal puts another in its place.
            "_dump_snapshot": lambda *_, **__: None,
        }

    # ---- memory ----------------------------------------------------------------------------------

    def free_and_total_bytes(self) -> tuple[int, int]:
        return self.total_bytes, self.total_bytes

    def memory_stats(self) -> dict[str, Any]:
        """Stand in for torch._C._cuda_memoryStats."""
        return Statistics().nested()

    def reset_peaks(self) -> None: ...
    def reset_accumulated(self) -> None: ...
    def empty_cache(self) -> None:
        Gpu.on_emptied()

    def limit(self, fraction_ratio: float) -> None:
        """Stand in for torch.cuda.set_per_process_memory_fraction."""

    def fraction(self) -> float:
        return 1.0

    def take_raw(self, size_bytes: int, stream: int) -> int:  # noqa: ARG002
        """Stand in for torch.cuda.caching_allocator_alloc."""
        self.refuse("torch.cuda.caching_allocator_alloc", "only memory of tensors is rehearsed")

    def give_back_raw(self, address: int) -> None:  # noqa: ARG002
        """Stand in for torch.cuda.caching_allocator_delete."""
        self.refuse("torch.cuda.caching_allocator_delete", "only memory of tensors is rehearsed")

    def snapshot(self, asked: tuple[int, int, bool] | None = None) -> dict[str, Any]:  # noqa: ARG002
        """Stand in for torch._C._cuda_memorySnapshot."""
        return {"segments": [], "device_traces": []}

    def history(self) -> dict[str, Any]:
        """Return the functions of torch._C that record and describe memory events."""
        names = ("record_memory_history", "record_memory_history_legacy", "setMemoryMetadata")
        more = ("allocationTraceback", "attach_out_of_memory_observer")
        return {
            **{f"_cuda_{name}": nothing for name in (*names, *more)},
            "_cuda_isHistoryEnabled": lambda: False,
            "_cuda_getMemoryMetadata": lambda: "",
            "_accelerator_setAllocatorSettings": nothing,
        }

    # ---- random numbers --------------------------------------------------------------------------

    def random_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    def set_random_state(self, state: torch.Tensor) -> None: ...


def install(patches: Patches, gpu: Gpu) -> None:
    """Make torch.cuda and torch.accelerator answer for this GPU."""
    below = {**_memory_below(gpu), **_devices_below(gpu), **_accelerator_below(gpu)}
    patches.put(torch._C, **below, **gpu.history())
    own = gpu.answers()
    answers = {**_about_device(gpu), **_about_random(gpu), **_STREAMS, **_refusals(gpu), **own}
    replaced: list[tuple[object, object]] = []
    for name, answer in answers.items():
        original = vars(torch.cuda).get(name) or vars(torch.cuda.memory).get(name)
        if callable(original):
            replaced.append((original, answer))
        else:  # not a function: others may share the value, such as True or ()
            patches.put(torch.cuda, **{name: answer})
    patches.put_wherever_imported("torch.cuda", replaced)
    patches.put(torch, Stream=streams.Stream, Event=streams.Event)
    patches.put(torch.cuda, _cudart=_runtime(gpu))
    patches.put(torch.cuda.nvtx, _nvtx=_Ranges())
    patches.put(torch.accelerator, is_available=lambda: True, device_count=lambda: gpu.count)
    same = {name: answer for name, answer in own.items() if hasattr(torch.accelerator, name)}
    patches.put(torch.accelerator, **same)
    if hasattr(torch.accelerator, "Graph"):
        patches.put(torch.accelerator, Graph=_refused_class(gpu, "torch.accelerator.Graph"))
    _refuse_modules(patches, gpu)
    _keep_switched_on(patches)


def _memory_below(gpu: Gpu) -> dict[str, Any]:
    def limit(fraction_ratio: float, device: int) -> None:
        gpu.check(device)
        gpu.limit(fraction_ratio)

    def cache(value: bool) -> None:
        if not value:
            gpu.refuse("torch.cuda.caching_allocator_enable(False)", _POOLS)

    return {
        "_cuda_memoryStats": lambda _: gpu.memory_stats(),
        "_cuda_resetPeakMemoryStats": lambda _: gpu.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda _: gpu.reset_accumulated(),
        "_cuda_emptyCache": gpu.empty_cache,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_setMemoryFraction": limit,
        "_cuda_getMemoryFraction": lambda _: gpu.fraction(),
        "_cuda_cudaCachingAllocator_raw_alloc": gpu.take_raw,
        "_cuda_cudaCachingAllocator_raw_delete": gpu.give_back_raw,
        "_cuda_cudaCachingAllocator_enable": cache,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_memorySnapshot": gpu.snapshot,
        "_host_emptyCache": nothing,
    }


def _devices_below(gpu: Gpu) -> dict[str, Any]:
    mode = [0]  # of synchronizing calls; there are none here

    def set_mode(value: int) -> None:
        mode[0] = value

    return {
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": gpu.check,
        "_cuda_exchangeDevice": lambda _: 0,
        "_cuda_maybeExchangeDevice": lambda _: 0,
        "_cuda_canDeviceAccessPeer": lambda *_: gpu.count > 1,
        "_cuda_getArchFlags": lambda: _architecture(gpu),
        "_cuda_synchronize": nothing,
        "_cuda_sleep": nothing,
        "_cuda_ipc_collect": nothing,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_set_sync_debug_mode": set_mode,
        "_cuda_get_sync_debug_mode": lambda: mode[0],
        # bitsandbytes reads this when it is imported; CPU-only builds of torch lack it.
        "_cuda_getCurrentRawStream": lambda _: 0,
        "_cuda_tunableop_is_enabled": lambda: False,
    }


def _accelerator_below(gpu: Gpu) -> dict[str, Any]:
    below = {
        "getAccelerator": lambda: torch.device("cuda"),
        "getDeviceIndex": lambda: 0,
        # CUDA computes with all of these dtypes; which are fast is another question.
        "getDeviceCapability": lambda _: {"supported_dtypes": set(_DTYPES)},
        "setDeviceIndex": gpu.check,
        "exchangeDevice": lambda _: 0,
        "maybeExchangeDevice": lambda _: 0,
        "getStream": streams.current_stream,
        "setStream": streams.set_stream,
        "synchronizeDevice": nothing,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": gpu.empty_cache,
        "emptyHostCache": nothing,
        "getDeviceStats": lambda _: gpu.memory_stats(),
        "resetPeakStats": lambda _: gpu.reset_peaks(),
        "resetAccumulatedStats": lambda _: gpu.reset_accumulated(),
        "getMemoryInfo": lambda _: gpu.free_and_total_bytes(),
    }
    return {f"_accelerator_{name}": function for name, function in below.items()}


# ---- the device ----------------------------------------------------------------------------------


class _Properties:
    """The result of get_device_properties. Figures without a source are an A100's."""

    warp_size, regs_per_multiprocessor = 32, 65536
    max_threads_per_multi_processor = 2048
    shared_memory_per_block = 49152
    shared_memory_per_block_optin = 101376
    shared_memory_per_multiprocessor = 102400
    L2_cache_size = 40 * MIB
    is_integrated = is_multi_gpu_board = False
    gcnArchName = ""  # noqa: N815 - torch's name
    pci_bus_id = pci_device_id = pci_domain_id = 0

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    name = property(lambda self: self._gpu.name)
    uuid = property(lambda self: self._gpu.uuid)
    total_memory = property(lambda self: self._gpu.total_bytes)
    major = property(lambda self: self._gpu.capability[0])
    minor = property(lambda self: self._gpu.capability[1])
    multi_processor_count = property(lambda self: self._gpu.multi_processor_count)

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor},"
            f" total_memory={self.total_memory // MIB}MB,"
            f" multi_processor_count={self.multi_processor_count})"
        )


def _architecture(gpu: Gpu) -> str:
    return "sm_" + "".join(map(str, gpu.capability))


def _about_device(gpu: Gpu) -> dict[str, Any]:
    class Device:
        """Stand in for torch.cuda.device and device_of; with a single GPU nothing changes."""

        def __init__(self, device: Any) -> None:
            if not isinstance(device, torch.Tensor) and device != -1:
                gpu.check(device)
            self.idx = self.prev_idx = 0

        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    def of_device(answer: Callable[[], Any]) -> Callable[..., Any]:
        def asked(device: Any = None) -> Any:
            gpu.check(device)
            return answer()

        return asked

    def used_bytes() -> int:
        free_bytes, total_bytes = gpu.free_and_total_bytes()
        return total_bytes - free_bytes

    def processes() -> str:
        return f"GPU:0\nprocess {os.getpid():>10d} uses {used_bytes() / MIB:>12.3f} MB GPU memory"

    def is_bf16_supported(including_emulation: bool = True) -> bool:
        return gpu.is_ampere or (_KNOWS_EMULATION and including_emulation)

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: gpu.count,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "synchronize": of_device(lambda: None),
        "ipc_collect": lambda: None,
        "set_device": gpu.check,
        "_exchange_device": lambda _: 0,
        "_maybe_exchange_device": lambda _: 0,
        "get_device_capability": of_device(lambda: gpu.capability),
        "get_device_properties": of_device(lambda: _Properties(gpu)),
        "get_device_name": of_device(lambda: gpu.name),
        "get_arch_list": lambda: [_architecture(gpu)],
        "is_bf16_supported": is_bf16_supported,
        "mem_get_info": of_device(gpu.free_and_total_bytes),
        "device_memory_used": of_device(used_bytes),
        "list_gpu_processes": of_device(processes),
        "device": Device,
        "device_of": Device,
        "has_half": True,
        "cudart": lambda: _runtime(gpu),
    }


def _runtime(gpu: Gpu) -> SimpleNamespace:
    """Return the CUDA runtime functions that scripts call; most have no effect here."""

    def done(*_: Any, **__: Any) -> int:
        return 0

    silent = ("ProfilerStart", "ProfilerStop", "HostRegister", "HostUnregister")
    return SimpleNamespace(
        **{f"cuda{name}": done for name in (*silent, "DeviceSynchronize", "StreamSynchronize")},
        cudaMemGetInfo=lambda *_: gpu.free_and_total_bytes(),
        cudaGetErrorString=lambda code: f"CUDA error {code}",
        cudaError=_Error,
    )


class _Error(int):
    success = 0


class _Ranges:
    """Stand in for torch.cuda.nvtx: the ranges are not recorded."""

    def __init__(self) -> None:
        self._depth = 0
        self._numbers = itertools.count(1)

    def rangePushA(self, _: str) -> int:  # noqa: N802 - NVTX's names
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802
        self._depth -= 1
        return self._depth

    def rangeStartA(self, *_: Any) -> int:  # noqa: N802
        return next(self._numbers)

    deviceRangeStart = rangeStartA  # noqa: N815
    rangeEnd = markA = deviceRangeEnd = staticmethod(nothing)  # noqa: N815


def _about_random(gpu: Gpu) -> dict[str, Any]:
    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), nothing),
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda *_, **__: gpu.random_state(),
        "get_rng_state_all": lambda: [gpu.random_state()],
        "set_rng_state": lambda state, *_, **__: gpu.set_random_state(state),
        "set_rng_state_all": lambda states: gpu.set_random_state(states[0]),
        "default_generators": (torch.default_generator,),
    }


_STREAMS = {
    "is_current_stream_capturing": lambda: False,
    "current_stream": streams.current_stream,
    "default_stream": streams.default_stream,
    "stream": streams.use_stream,
    "StreamContext": streams.use_stream,
    "set_stream": streams.set_stream,
    "Stream": streams.Stream,
    "Event": streams.Event,
    # Nobody can read these figures of pinned memory, so there is nothing to reset.
    "reset_accumulated_host_memory_stats": nothing,
    "reset_peak_host_memory_stats": nothing,
}


def _keep_switched_on(patches: Patches) -> None:
    """Undo what torch switches off when it finds no GPU after all."""
    patches.put(torch.cuda.amp.common, amp_definitely_not_available=lambda: False)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(Optimizer, name):
            patches.put(Optimizer, **{name: lambda _: None})


# ---- not supported -------------------------------------------------------------------------------

_GRAPHS = "every op runs immediately, and none on a GPU"
_SENSORS = "it is not hardware and has no sensors"
_POOLS = "its allocator has one pool for each stream"
_HANDLES = "there is no CUDA library behind it"
_PINNED = "pinned memory is plain memory of the host"
_STORAGES = "typed storages have long been replaced by untyped ones"
_REFUSED_CLASSES = {
    **dict.fromkeys(("CUDAGraph", "graph", "GreenContext"), _GRAPHS),
    **dict.fromkeys(("MemPool", "CUDAPluggableAllocator"), _POOLS),
    "ExternalStream": _HANDLES,
    **{
        f"{name}Storage": _STORAGES
        for name in (
            *("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long"),
            *("Short", "ComplexDouble", "ComplexFloat"),
        )
    },
}
_REFUSED_FUNCTIONS = {
    **dict.fromkeys(("make_graphed_callables", "graph_pool_handle"), _GRAPHS),
    **dict.fromkeys(("use_mem_pool", "_use_uvm", "change_current_allocator"), _POOLS),
    "get_stream_from_external": _HANDLES,
    **dict.fromkeys(("current_blas_handle", "current_solver_handle"), _HANDLES),
    **dict.fromkeys(("utilization", "memory_usage", "temperature"), _SENSORS),
    **dict.fromkeys(("power_draw", "clock_rate"), _SENSORS),
    **dict.fromkeys(("host_memory_stats", "host_memory_stats_as_nested_dict"), _PINNED),
}
_REFUSED_MODULES = {  # all their functions, except those that ask whether they are available
    "nccl": "there is one GPU for each process, and no NCCL",
    "tunable": "its kernels are not CUDA's",
    "jiterator": "its kernels are not CUDA's",
    "gds": _HANDLES,
}


def _refused_class(gpu: Gpu, name: str, because: str = _GRAPHS) -> type:
    """Return a class that cannot be instantiated; it must stay a class for isinstance checks."""
    made = _refused_function(gpu, name, because)
    return type(name.rpartition(".")[2], (), {"__new__": made, "__module__": "torch.cuda"})


def _refused_function(gpu: Gpu, name: str, because: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        gpu.refuse(name, because)

    return refuse


def _refusals(gpu: Gpu) -> dict[str, Any]:
    tables = ((_refused_class, _REFUSED_CLASSES), (_refused_function, _REFUSED_FUNCTIONS))
    return {
        name: refused(gpu, f"torch.cuda.{name}", because)
        for refused, table in tables
        for name, because in table.items()
    }


def _refuse_modules(patches: Patches, gpu: Gpu) -> None:
    for module_name, because in _REFUSED_MODULES.items():
        full_name = f"torch.cuda.{module_name}"
        module = sys.modules.get(full_name)
        for name, value in _own(module) if module else ():
            is_private = name.startswith("_") and not name.startswith("_create")
            if not is_private and name not in ("is_available", "is_enabled"):
                refused = _refused_class if isinstance(value, type) else _refused_function
                patches.put(module, **{name: refused(gpu, f"{full_name}.{name}", because)})


def _own(module: ModuleType) -> list[tuple[str, Any]]:
    """Return what a module defines itself."""
    own = module.__name__
    return [item for item in vars(module).items() if getattr(item[1], "__module__", "") == own]


# ---- `torch.device(0)` ---------------------------------------------------------------------------
# C++ asks the driver what a bare number means and finds no driver. Devices stay unchanged in C++:
# only the name `torch.device` refers to another class, and every device is an instance of it.

_Device = torch.device


class _Kind(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if len(args) == 1 and type(args[0]) is int:
            return _Device("cuda", args[0])
        return _Device(*args, **kwargs)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, _Device)

    def __subclasscheck__(cls, kind: type) -> bool:
        return issubclass(kind, _Device)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _Device

    def __hash__(cls) -> int:
        return hash(_Device)


def install_bare_device_numbers() -> None:
    """Patch torch.device for good, and `Module.to`, whose arguments C++ parses."""
    named = _Kind("device", (), {"__module__": "torch", "__doc__": _Device.__doc__})
    original = torch.nn.Module.to

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        if args and type(args[0]) is int:
            args = (named(args[0]), *args[1:])
        if type(kwargs.get("device")) is int:
            kwargs["device"] = named(kwargs["device"])
        return original(module, *args, **kwargs)

    put(torch, device=named)
    put(torch.nn.Module, to=to)
