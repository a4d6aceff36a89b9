"""torch in this process -> what its allocator holds, and has held at most, on each GPU.

The allocator's own counters: exact, without a synchronisation, and of this process alone. They
are asked in the thread that trains, never in another. Whoever calls
torch.cuda.reset_peak_memory_stats makes them forget: the most of several readings is the peak.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomph.errors import OomphError
from oomph.records.run import TorchGpu
from oomph.sensing.torch_cuda import running_torch, uuid_from_torch


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMemory:
    """Of one GPU."""

    cuda_index: int
    allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def read_torch_memory() -> tuple[TorchMemory, ...]:
    """Of the GPUs that torch has taken memory of; () where CUDA does not run in this process."""
    torch = running_torch()
    if torch is None:
        return ()
    read = (_read(torch, index) for index in range(torch.cuda.device_count()))
    return tuple(memory for memory in read if memory.peak_reserved_bytes)


def _read(torch: Any, cuda_index: int) -> TorchMemory:
    told = torch.cuda.memory_stats(cuda_index)  # one question: each max_memory_... asks it anew
    return TorchMemory(
        cuda_index=cuda_index,
        allocated_bytes=told.get("allocated_bytes.all.current", 0),
        peak_allocated_bytes=told.get("allocated_bytes.all.peak", 0),
        peak_reserved_bytes=told.get("reserved_bytes.all.peak", 0),
    )


def torch_gpu(cuda_index: int) -> TorchGpu | None:
    """The GPU as torch knows it; None where CUDA does not run."""
    torch = running_torch()
    if torch is None:
        return None
    told = torch.cuda.get_device_properties(cuda_index)
    name, total = getattr(told, "name", None), getattr(told, "total_memory", None)
    return TorchGpu(
        cuda_index=cuda_index,
        name=None if name is None else str(name),
        total_bytes=None if total is None else int(total),
    )


def current_cuda_index() -> int | None:
    """The GPU that this thread of torch works on; None where CUDA does not run."""
    torch = running_torch()
    return None if torch is None else int(torch.cuda.current_device())


def uuid_of(cuda_index: int) -> str | None:
    """Without its prefix; None where torch cannot tell, as of an emulated GPU."""
    torch = running_torch()
    if torch is None:
        return None
    try:
        return uuid_from_torch(torch, cuda_index)
    except (OomphError, OSError):
        return None
