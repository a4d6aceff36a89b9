"""What torch.cuda answers while there is an emulated GPU.

Memory is answered below torch.cuda, in torch._C: so torch's own memory_allocated, memory_stats,
memory_summary and all that imported them stay as they are. Random numbers are the CPU's: the
state of the GPU's generator is that of the CPU's. What is not emulated raises NotEmulated.
"""

from __future__ import annotations

import itertools
import os
import sys
import warnings
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.amp.common

from oomph.errors import UsageError
from oomph.training.emulation.card import Card
from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import place_of
from oomph.units import MIB

GPU_NAME = "oomph's emulated GPU"


class NotEmulated(UsageError, RuntimeError):
    """Something of CUDA that the emulated GPU does not have.

    A RuntimeError, too: so torch refuses, and so libraries notice that a feature is not there.
    """


class _Device:
    """torch.cuda.device and device_of: there is one, so nothing changes."""

    def __init__(self, device: Any) -> None:
        if isinstance(device, torch.Tensor):  # device_of
            device = -1
        if not isinstance(device, int) or device >= 0:
            place_of(device)
        self.idx = self.prev_idx = 0

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def patch_cuda(patches: Patches, card: Card, streams: Any, capability: tuple[int, int]) -> None:
    for name, function in {**_memory_below(card), **_devices_below(capability)}.items():
        patches.set(torch._C, name, function)
    answers = {**_about_device(card, capability), **_about_random(), **_about_streams(streams)}
    replaced: list[tuple[Any, Any]] = []
    for name, answer in {**answers, **_refusals()}.items():
        # Not where it is a value that others have, too: True, ().
        if callable(original := vars(torch.cuda).get(name)):
            replaced.append((original, answer))
        else:
            patches.set(torch.cuda, name, answer)
    patches.set_wherever_imported("torch.cuda", replaced)
    patches.set(torch, "Stream", streams.Stream)
    patches.set(torch, "Event", streams.Event)
    patches.set(torch.cuda, "_cudart", _runtime(card))
    patches.set(torch.cuda.nvtx, "_nvtx", _Ranges())
    _refuse_modules(patches)
    _patch_annotations(patches, card)
    _patch_accelerator(patches, card, streams)
    _patch_switches(patches)


def _memory_below(card: Card) -> dict[str, Any]:
    history = card.history

    def raw_alloc(size_bytes: int, stream: int) -> int:
        return card.take((size_bytes,), stream)[0] if size_bytes else 0

    def raw_delete(address: int) -> None:
        if address:
            card.give_back_raw(address)

    def limit(fraction_ratio: float, device: int) -> None:
        place_of(device)
        card.limit(fraction_ratio)

    def cache(value: bool) -> None:
        if not value:
            raise _refusal("torch.cuda.caching_allocator_enable(False)")

    return {
        "_cuda_memoryStats": lambda _: card.memory_stats(),
        "_cuda_resetPeakMemoryStats": lambda _: card.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda _: card.statistics.reset_accumulated(),
        "_cuda_emptyCache": card.empty_cache,
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_setMemoryFraction": limit,
        "_cuda_getMemoryFraction": lambda _: card.fraction(),
        "_cuda_cudaCachingAllocator_raw_alloc": raw_alloc,
        "_cuda_cudaCachingAllocator_raw_delete": raw_delete,
        "_cuda_cudaCachingAllocator_enable": cache,
        "_cuda_cudaCachingAllocator_is_enabled": lambda: True,
        "_cuda_memorySnapshot": card.snapshot,
        "_cuda_record_memory_history": history.record,
        "_cuda_record_memory_history_legacy": history.record_as_before,
        "_cuda_isHistoryEnabled": lambda: history.is_on,
        "_cuda_setMemoryMetadata": history.set_metadata,
        "_cuda_getMemoryMetadata": lambda: history.metadata,
        "_cuda_allocationTraceback": card.traceback_of,
        "_cuda_attach_out_of_memory_observer": card.observers.append,
        "_accelerator_setAllocatorSettings": card.configure,
        "_host_emptyCache": lambda: None,
    }


def _devices_below(capability: tuple[int, int]) -> dict[str, Any]:
    mode = [0]  # of synchronizing calls, which are none here

    def set_mode(value: int) -> None:
        mode[0] = value

    return {
        "_cuda_getDevice": lambda: 0,
        "_cuda_setDevice": place_of,
        "_cuda_exchangeDevice": lambda _: 0,
        "_cuda_maybeExchangeDevice": lambda _: 0,
        "_cuda_canDeviceAccessPeer": lambda *_: False,
        "_cuda_getArchFlags": lambda: f"sm_{capability[0]}{capability[1]}",
        "_cuda_synchronize": lambda: None,
        "_cuda_sleep": lambda _: None,
        "_cuda_ipc_collect": lambda: None,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_set_sync_debug_mode": set_mode,
        "_cuda_get_sync_debug_mode": lambda: mode[0],
    }


def _patch_accelerator(patches: Patches, card: Card, streams: Any) -> None:
    """torch.accelerator, below: the GPU by another name."""
    patches.set(torch.accelerator, "is_available", lambda: True)
    patches.set(torch.accelerator, "device_count", lambda: 1)
    if hasattr(torch.accelerator, "Graph"):
        patches.set(torch.accelerator, "Graph", _refused_class("torch.accelerator.Graph"))
    below: dict[str, Any] = {
        "getAccelerator": lambda: torch.device("cuda"),
        "getDeviceIndex": lambda: 0,
        "getDeviceCapability": lambda _: {"supported_dtypes": set(_DTYPES)},
        "setDeviceIndex": place_of,
        "exchangeDevice": lambda _: 0,
        "maybeExchangeDevice": lambda _: 0,
        "getStream": streams.current_stream,
        "setStream": streams.set_stream,
        "synchronizeDevice": lambda _: None,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": card.empty_cache,
        "emptyHostCache": lambda: None,
        "getDeviceStats": lambda _: card.memory_stats(),
        "resetPeakStats": lambda _: card.reset_peaks(),
        "resetAccumulatedStats": lambda _: card.statistics.reset_accumulated(),
        "getMemoryInfo": lambda _: card.free_and_total_bytes(),
    }
    for name, function in below.items():
        patches.set(torch._C, f"_accelerator_{name}", function)


_DTYPES = (
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.complex64, torch.complex128),
)


def _about_device(card: Card, capability: tuple[int, int]) -> dict[str, Any]:
    class Properties:
        name = GPU_NAME
        major, minor = capability
        total_memory = card.memory.total_bytes
        multi_processor_count = 108  # of an A100, as `capability` is by default
        warp_size = 32
        max_threads_per_multi_processor = 2048
        regs_per_multiprocessor = 65536
        shared_memory_per_block = 49152
        is_integrated = False
        gcnArchName = ""  # noqa: N815 - torch's name

    def of_one(answer: Any) -> Any:
        """For any device that there is."""

        def asked(device: Any = None) -> Any:
            place_of(device)
            return answer()

        return asked

    def used_bytes() -> int:
        free_bytes, total_bytes = card.free_and_total_bytes()
        return total_bytes - free_bytes

    def processes() -> str:
        return f"GPU:0\nprocess {os.getpid():>10d} uses {used_bytes() / MIB:>12.3f} MB GPU memory"

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "synchronize": of_one(lambda: None),
        "ipc_collect": lambda: None,
        "set_device": place_of,
        "get_device_capability": of_one(lambda: capability),
        "get_device_properties": of_one(Properties),
        "get_device_name": of_one(lambda: GPU_NAME),
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or capability >= (8, 0)
        ),
        "mem_get_info": of_one(card.free_and_total_bytes),
        "device_memory_used": of_one(used_bytes),
        "list_gpu_processes": of_one(processes),
        "device": _Device,
        "device_of": _Device,
        "has_half": True,
        "cudart": lambda: _runtime(card),
    }


def _runtime(card: Card) -> Any:
    """The functions of CUDA's runtime that scripts call: what they do goes unnoticed here."""

    def done(*_: Any, **__: Any) -> int:
        return 0

    return SimpleNamespace(
        cudaMemGetInfo=lambda _: card.free_and_total_bytes(),
        cudaProfilerStart=done,
        cudaProfilerStop=done,
        cudaHostRegister=done,
        cudaHostUnregister=done,
        cudaDeviceSynchronize=done,
        cudaStreamSynchronize=done,
        cudaGetErrorString=lambda code: f"CUDA error {code}",
        cudaError=_Error,
    )


class _Error(int):
    success = 0


class _Ranges:
    """torch.cuda.nvtx: ranges that nobody looks at."""

    def __init__(self) -> None:
        self._depth = 0
        self._numbers = itertools.count(1)

    def rangePushA(self, _: str) -> int:  # noqa: N802 - NVTX's names
        self._depth += 1
        return self._depth - 1

    def rangePop(self) -> int:  # noqa: N802
        self._depth -= 1
        return self._depth

    def rangeStartA(self, _: str) -> int:  # noqa: N802
        return next(self._numbers)

    def rangeEnd(self, _: int) -> None: ...  # noqa: N802
    def markA(self, _: str) -> None: ...  # noqa: N802
    def deviceRangeStart(self, *_: Any) -> int:  # noqa: N802
        return next(self._numbers)

    def deviceRangeEnd(self, *_: Any) -> None: ...  # noqa: N802


# ---- what is not emulated ------------------------------------------------------------------------

_GRAPHS = "every op on it runs immediately, on the CPU"
_SENSORS = "it is not hardware and has no sensors"
_POOLS = "its allocator has one pool for each stream"
_HANDLES = "there is no CUDA library behind it"
_REFUSED_CLASSES = {
    "CUDAGraph": _GRAPHS,
    "graph": _GRAPHS,
    "GreenContext": _GRAPHS,
    "MemPool": _POOLS,
    "CUDAPluggableAllocator": _POOLS,
    "ExternalStream": _HANDLES,
    **{
        f"{name}Storage": "typed storages have long been replaced by untyped ones"
        for name in (
            *("BFloat16", "Bool", "Byte", "Char", "Double", "Float", "Half", "Int", "Long"),
            *("Short", "ComplexDouble", "ComplexFloat"),
        )
    },
}
_REFUSED_FUNCTIONS = {
    "make_graphed_callables": _GRAPHS,
    "graph_pool_handle": _GRAPHS,
    "use_mem_pool": _POOLS,
    "_use_uvm": _POOLS,
    "change_current_allocator": _POOLS,
    "get_stream_from_external": _HANDLES,
    "current_blas_handle": _HANDLES,
    "current_solver_handle": _HANDLES,
    "utilization": _SENSORS,
    "memory_usage": _SENSORS,
    "temperature": _SENSORS,
    "power_draw": _SENSORS,
    "clock_rate": _SENSORS,
    "host_memory_stats": "pinned memory is plain memory of the host",
    "host_memory_stats_as_nested_dict": "pinned memory is plain memory of the host",
    "reset_accumulated_host_memory_stats": "pinned memory is plain memory of the host",
    "reset_peak_host_memory_stats": "pinned memory is plain memory of the host",
}
_REFUSED_MODULES = {  # all of their functions, but for questions whether they are there
    "nccl": "there is one emulated GPU for each process, and no NCCL",
    "tunable": "its kernels are the CPU's",
    "jiterator": "its kernels are the CPU's",
    "gds": _HANDLES,
}


def _refusal(name: str, because: str | None = None) -> NotEmulated:
    return NotEmulated(
        f"the emulated GPU has no {name}",
        because=because or _POOLS,
        attempt='skipping it where torch.cuda.get_device_name() says "oomph\'s emulated GPU"',
    )


def _refused_class(name: str, because: str = _GRAPHS) -> type:
    """Still a class, for others ask isinstance."""

    def new(*_: Any, **__: Any) -> Any:
        raise _refusal(name, because)

    return type(name.rpartition(".")[2], (), {"__new__": new, "__module__": "torch.cuda"})


def _refused_function(name: str, because: str) -> Any:
    def refuse(*_: Any, **__: Any) -> Any:
        raise _refusal(name, because)

    return refuse


def _refusals() -> dict[str, Any]:
    classes = {
        name: _refused_class(f"torch.cuda.{name}", because)
        for name, because in _REFUSED_CLASSES.items()
    }
    functions = {
        name: _refused_function(f"torch.cuda.{name}", because)
        for name, because in _REFUSED_FUNCTIONS.items()
    }
    return {**classes, **functions}


def _refuse_modules(patches: Patches) -> None:
    for module_name, because in _REFUSED_MODULES.items():
        module = sys.modules.get(f"torch.cuda.{module_name}")
        for name, value in list(vars(module).items()) if module else ():
            is_question = name.startswith("_") and not name.startswith("_create")
            is_question = is_question or name in ("is_available", "is_enabled")
            if getattr(value, "__module__", "") == f"torch.cuda.{module_name}" and not is_question:
                full = f"torch.cuda.{module_name}.{name}"
                refused: Any = _refused_function(full, because)
                if isinstance(value, type):
                    refused = _refused_class(full, because)
                patches.set(module, name, refused)
    patches.set(torch._C, "_cuda_tunableop_is_enabled", lambda: False)


def _patch_annotations(patches: Patches, card: Card) -> None:
    """A snapshot has torch.profiler.record_function, by which torch marks steps of optimizers."""
    kind = torch.autograd.profiler.record_function
    enter, leave, history = kind.__enter__, kind.__exit__, card.history

    def entered(self: Any) -> Any:
        history.annotate("START", self.name)
        return enter(self)

    def left(self: Any, *args: Any) -> Any:
        history.annotate("END", self.name)
        return leave(self, *args)

    patches.set(kind, "__enter__", entered)
    patches.set(kind, "__exit__", left)


def _about_random() -> dict[str, Any]:
    return {
        "manual_seed": lambda _: None,
        "manual_seed_all": lambda _: None,
        "seed": lambda: None,
        "seed_all": lambda: None,
        "initial_seed": torch.initial_seed,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
        "default_generators": (torch.default_generator,),
    }


def _about_streams(streams: Any) -> dict[str, Any]:
    return {
        "is_current_stream_capturing": lambda: False,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "stream": streams.use_stream,
        "StreamContext": streams.use_stream,
        "set_stream": streams.set_stream,
        "Stream": streams.Stream,
        "Event": streams.Event,
    }


def _patch_switches(patches: Patches) -> None:
    """Places where torch switches something off because it finds no GPU after all."""
    from torch.optim import Optimizer

    patches.set(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
    for name in ("_accelerator_graph_capture_health_check", "_cuda_graph_capture_health_check"):
        if hasattr(Optimizer, name):
            patches.set(Optimizer, name, lambda _: None)
    patches.set(torch.backends.cudnn, "is_acceptable", lambda _: False)  # it would warn
    patches.set(torch, "Generator", _generator(torch.Generator))
    patches.set(torch, "compile", _uncompiled)
    _patch_grouping(patches)


def _generator(original: type) -> type:
    """Still a class, for annotations use it, and what was made before is of it."""

    class OfEitherDevice(type(original)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return isinstance(instance, original)

    def new(cls: Any, device: Any = "cpu") -> Any:  # noqa: ARG001
        place_of(device)
        return original.__new__(original, "cpu")

    return OfEitherDevice("Generator", (original,), {"__new__": new})


def _uncompiled(model: Any = None, **_: Any) -> Any:
    warnings.warn("the emulated GPU compiles nothing: torch.compile is left out", stacklevel=2)
    return (lambda function: function) if model is None else model


def _patch_grouping(patches: Patches) -> None:
    """Optimizers and gradient clipping ask C++ for the device of each group of tensors."""
    original = torch._C._group_tensors_by_device_and_dtype

    def grouped(lists: Any, with_indices: bool = False) -> Any:
        groups = original(lists, with_indices)
        return {
            (_device_of(tensors, device), dtype): (tensors, indices)
            for (device, dtype), (tensors, indices) in groups.items()
        }

    patches.set(torch._C, "_group_tensors_by_device_and_dtype", grouped)


def _device_of(lists: Any, device: Any) -> Any:
    first = next((tensor for tensors in lists for tensor in tensors if tensor is not None), None)
    return device if first is None else first.device
