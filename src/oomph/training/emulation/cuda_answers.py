"""What torch.cuda answers while there is an emulated GPU.

Memory is answered below torch.cuda, in torch._C: so torch's own memory_allocated, memory_stats,
memory_summary and all that imported them stay as they are. Random numbers are the CPU's: the
state of the GPU's generator is that of the CPU's.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.cuda.amp.common

from oomph.training.emulation.card import Card
from oomph.training.emulation.patches import Patches
from oomph.training.emulation.places import place_of

GPU_NAME = "oomph's emulated GPU"


class Nothing:
    """A context that does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...
    def __enter__(self) -> Nothing:
        return self

    def __exit__(self, *_: object) -> None: ...


def patch_cuda(patches: Patches, card: Card, streams: Any, capability: tuple[int, int]) -> None:
    _patch_memory(patches, card)
    answers = {**_about_device(card, capability), **_about_random(), **_about_streams(streams)}
    for name, answer in answers.items():
        original = vars(torch.cuda).get(name)
        if original is None:
            patches.set(torch.cuda, name, answer)
        else:
            patches.set_wherever_imported("torch.cuda", original, answer)
    _patch_accelerator(patches, card, streams)
    _patch_switches(patches)


def _patch_memory(patches: Patches, card: Card) -> None:
    below: dict[str, Any] = {
        "_cuda_memoryStats": lambda _: card.memory_stats(),
        "_cuda_resetPeakMemoryStats": lambda _: card.reset_peaks(),
        "_cuda_resetAccumulatedMemoryStats": lambda _: None,
        "_cuda_emptyCache": card.empty_cache,
        "_cuda_getAllocatorBackend": lambda: "native",
    }
    for name, function in below.items():
        patches.set(torch._C, name, function)


def _patch_accelerator(patches: Patches, card: Card, streams: Any) -> None:
    """torch.accelerator, below: the GPU by another name."""
    patches.set(torch.accelerator, "is_available", lambda: True)
    patches.set(torch.accelerator, "device_count", lambda: 1)
    below: dict[str, Any] = {
        "getAccelerator": lambda: torch.device("cuda"),
        "getDeviceIndex": lambda: 0,
        "setDeviceIndex": place_of,
        "exchangeDevice": lambda _: 0,
        "maybeExchangeDevice": lambda _: 0,
        "getStream": streams.current_stream,
        "synchronizeDevice": lambda _: None,
        "isAllocatorInitialized": lambda: True,
        "emptyCache": card.empty_cache,
        "getDeviceStats": lambda _: card.memory_stats(),
        "resetPeakStats": lambda _: card.reset_peaks(),
        "resetAccumulatedStats": lambda _: None,
        "getMemoryInfo": lambda _: card.free_and_total_bytes(),
    }
    for name, function in below.items():
        patches.set(torch._C, f"_accelerator_{name}", function)


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

    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "synchronize": lambda *_, **__: None,
        "ipc_collect": lambda: None,
        "set_device": place_of,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: Properties(),
        "get_device_name": lambda *_: GPU_NAME,
        "get_arch_list": lambda: [f"sm_{capability[0]}{capability[1]}"],
        "is_bf16_supported": lambda including_emulation=True: (
            including_emulation or capability >= (8, 0)
        ),
        "mem_get_info": lambda *_: card.free_and_total_bytes(),
        "device": Nothing,
    }


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
    }


def _about_streams(streams: Any) -> dict[str, Any]:
    return {
        "is_current_stream_capturing": lambda: False,
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "stream": streams.use_stream,
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
