"""torch.cuda and torch.accelerator as on the GPU that is pretended.

What is allocated is exact: the live bytes of the recording, each rounded up as the allocator
does. What is reserved is taken to be the most that was allocated. nvidia-smi and NVML are not
pretended.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

from oomph.records.script import PretendedGpu
from oomph.tracing import streams
from oomph.tracing.pretend import Lie, OnlyDevice, nothing, patch_accelerator
from oomph.tracing.script.asked_gpu import AskedGpu

_MIB = 2**20
_SEGMENT_BYTES = 2 * _MIB  # what the allocator asks the driver for, at least
# Asked while this is imported, before torch is patched: older ones told GPUs apart by their age.
_KNOWS_EMULATION = "including_emulation" in signature(torch.cuda.is_bf16_supported).parameters
WHOLE_GPU = "set_per_process_memory_fraction is not applied: the answer is for the whole GPU"
RESERVED = "memory_reserved and mem_get_info were answered from what was allocated"


class _Properties:
    """What get_device_properties returns."""

    def __init__(self, gpu: AskedGpu) -> None:
        self._gpu = gpu
        self.warp_size, self.regs_per_multiprocessor = 32, 65536
        self.max_threads_per_multi_processor = 2048
        self.shared_memory_per_block = 49152
        self.shared_memory_per_block_optin = 101376
        self.shared_memory_per_multiprocessor = 102400
        self.L2_cache_size = 40 * _MIB
        self.is_integrated = self.is_multi_gpu_board = False
        self.gcnArchName = ""
        self.uuid = "00000000-0000-0000-0000-000000000000"
        self.pci_bus_id = self.pci_device_id = self.pci_domain_id = 0

    @property
    def name(self) -> str:
        return self._gpu.name

    @property
    def total_memory(self) -> int:
        return self._gpu.total_bytes

    @property
    def major(self) -> int:
        return self._gpu.capability[0]

    @property
    def minor(self) -> int:
        return self._gpu.capability[1]

    @property
    def multi_processor_count(self) -> int:
        return self._gpu.multi_processor_count

    def __repr__(self) -> str:
        return (
            f"_CudaDeviceProperties(name='{self.name}', major={self.major}, minor={self.minor},"
            f" total_memory={self.total_memory // _MIB}MB,"
            f" multi_processor_count={self.multi_processor_count})"
        )


class Memory:
    """What a script is told about memory."""

    def __init__(self, recorder: Any, gpu: AskedGpu, approximate: Callable[[str], None]) -> None:
        self._recorder, self._gpu, self._approximate = recorder, gpu, approximate

    def allocated(self, *_: Any, **__: Any) -> int:
        self._recorder.count_bytes()
        return int(self._recorder.live_bytes)

    def most_allocated(self, *_: Any, **__: Any) -> int:
        self._recorder.count_bytes()
        return int(self._recorder.peak_bytes)

    def reserved(self, *_: Any, **__: Any) -> int:
        self._approximate(RESERVED)
        return -(-self.most_allocated() // _SEGMENT_BYTES) * _SEGMENT_BYTES

    def begin_anew(self, *_: Any, **__: Any) -> None:
        self.allocated()
        self._recorder.peak_bytes = self._recorder.live_bytes

    def info(self, *_: Any, **__: Any) -> tuple[int, int]:
        return max(self._gpu.total_bytes - self.reserved(), 0), self._gpu.total_bytes

    def stats(self, *_: Any, **__: Any) -> dict[str, int]:
        found = {
            "allocated_bytes.all.current": self.allocated(),
            "allocated_bytes.all.peak": self.most_allocated(),
            "reserved_bytes.all.current": self.reserved(),
            "reserved_bytes.all.peak": self.reserved(),
            "active_bytes.all.current": self.allocated(),
            "active_bytes.all.peak": self.most_allocated(),
        }
        return defaultdict(int, found)  # of all others torch counts some, and this does not

    def limit(self, fraction_ratio: float, *_: Any, **__: Any) -> None:
        if fraction_ratio < 1:
            self._approximate(WHOLE_GPU)

    def summary(self, *_: Any, **__: Any) -> str:
        return "\n".join(f"{name}: {value}" for name, value in self.stats().items())


def install(recorder: Any, gpu: PretendedGpu, approximate: Callable[[str], None]) -> AskedGpu:
    """Answer for a GPU. Returns who knows what of it was asked for."""
    asked = AskedGpu(gpu)
    Lie.capability, Lie.total_bytes = gpu.capability, gpu.total_bytes
    memory = Memory(recorder, asked, approximate)
    answers = {**_of_device(gpu, asked), **_of_memory(memory), **_of_streams(), **_of_generator()}
    cuda: Any = torch.cuda
    for name, answer in answers.items():
        setattr(cuda, name, answer)
        for module in (cuda.memory, cuda.random):
            if hasattr(module, name):
                setattr(module, name, answer)
    patch_accelerator(answers)
    _patch_versions(gpu)
    vars(torch)["Stream"], vars(torch)["Event"] = streams.Stream, streams.Event
    return asked


def _of_device(gpu: PretendedGpu, asked: AskedGpu) -> dict[str, Any]:
    properties = _Properties(asked)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": _answer_on_bf16(gpu),
        "is_tf32_supported": lambda: gpu.capability >= (8, 0),
        "device_count": lambda: gpu.count,
        "current_device": lambda: 0,
        "set_device": nothing,
        "get_device_name": lambda *_, **__: asked.name,
        "get_device_capability": lambda *_, **__: asked.capability,
        "get_device_properties": lambda *_, **__: properties,
        "get_arch_list": lambda: [f"sm_{''.join(map(str, asked.capability))}"],
        "can_device_access_peer": lambda *_: gpu.count > 1,
        "_lazy_init": nothing,
        "init": nothing,
        "synchronize": nothing,
        "ipc_collect": nothing,
        "device": OnlyDevice,
        "device_of": OnlyDevice,
        "_exchange_device": lambda *_: 0,
        "_maybe_exchange_device": lambda *_: 0,
        "is_current_stream_capturing": lambda: False,
        "utilization": lambda *_, **__: 0,
        "temperature": lambda *_, **__: 40,
        "power_draw": lambda *_, **__: 0,
        "clock_rate": lambda *_, **__: 0,
        "list_gpu_processes": lambda *_, **__: "GPU:0\nno processes are running",
        "cudart": _refuse_cudart,
    }


def _answer_on_bf16(gpu: PretendedGpu) -> Callable[..., bool]:
    """Yes where it is emulated only, too, unless the script asks for more."""

    def is_supported(including_emulation: bool = True) -> bool:
        return gpu.capability >= (8, 0) or (_KNOWS_EMULATION and including_emulation)

    return is_supported


def _refuse_cudart() -> Any:
    class Runtime:
        cudaProfilerStart = cudaProfilerStop = staticmethod(nothing)  # noqa: N815 - CUDA's names

        @staticmethod
        def cudaMemGetInfo(*_: Any) -> tuple[int, int]:  # noqa: N802 - CUDA's name
            found: tuple[int, int] = torch.cuda.mem_get_info()
            return found

    return Runtime


def _of_memory(memory: Memory) -> dict[str, Any]:
    return {
        "memory_allocated": memory.allocated,
        "max_memory_allocated": memory.most_allocated,
        "memory_reserved": memory.reserved,
        "max_memory_reserved": memory.reserved,
        "memory_cached": memory.reserved,
        "max_memory_cached": memory.reserved,
        "mem_get_info": memory.info,
        "device_memory_used": memory.reserved,
        "memory_stats": memory.stats,
        "memory_summary": memory.summary,
        "memory_snapshot": lambda *_, **__: [],
        "memory_usage": lambda *_, **__: 0,
        "reset_peak_memory_stats": memory.begin_anew,
        "reset_max_memory_allocated": memory.begin_anew,
        "reset_max_memory_cached": nothing,
        "reset_accumulated_memory_stats": nothing,
        "empty_cache": nothing,
        "set_per_process_memory_fraction": memory.limit,
        "_record_memory_history": nothing,
        "_dump_snapshot": nothing,
        "_snapshot": lambda *_, **__: {"segments": [], "device_traces": []},
    }


def _of_streams() -> dict[str, Any]:
    return {
        "current_stream": streams.current_stream,
        "default_stream": streams.default_stream,
        "set_stream": streams.set_stream,
        "stream": streams.use_stream,
        "StreamContext": streams.use_stream,
        "Stream": streams.Stream,
        "ExternalStream": streams.Stream,
        "Event": streams.Event,
    }


def _of_generator() -> dict[str, Any]:
    def state(*_: Any, **__: Any) -> Any:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")

    return {
        **dict.fromkeys(("manual_seed", "manual_seed_all", "seed", "seed_all"), nothing),
        **dict.fromkeys(("set_rng_state", "set_rng_state_all"), nothing),
        "initial_seed": lambda: 0,
        "get_rng_state": state,
        "get_rng_state_all": lambda: [state()],
    }


def _patch_versions(gpu: PretendedGpu) -> None:
    """What scripts ask in order to choose: is it CUDA, with cuDNN, and with NCCL?"""
    version: Any = torch.version
    if version.cuda is None:
        version.cuda = "12.8"
    backends: Any = torch.backends
    backends.cuda.is_built = lambda: True
    backends.cudnn.is_available = lambda: True
    backends.cudnn.version = lambda: 91002
    backends.cuda.is_flash_attention_available = lambda: gpu.capability >= (8, 0)
