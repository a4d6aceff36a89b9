"""torch in this process -> which GPU has which index, and how much memory torch holds there.

torch is looked up among the modules the script has imported. It is never imported here, and CUDA is
never initialised. Memory figures are the allocator's own counters: exact, and without a
synchronisation. Ask for them in the training thread.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from dataclasses import dataclass
from typing import Any

from oomph.errors import OomphError, Unreadable, UsageError
from oomph.records.run import TorchGpu
from oomph.sensing.cuda_order import ask_in_this_process

_CUDA_DEVICE = re.compile(r"cuda(?::(\d{1,4}))?")


def running_torch() -> Any:
    """Return torch if this process has imported it and CUDA runs in it, else None."""
    torch = sys.modules.get("torch")
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    # None: not imported, only partly imported, or another module named torch
    return torch if is_initialized is not None and is_initialized() else None


def reserved_bytes(cuda_index: int) -> int:
    """Return how much memory torch in this process has reserved on a GPU."""
    torch = running_torch()
    return 0 if torch is None else int(torch.cuda.memory_reserved(cuda_index))


def cuda_index_of(device: object) -> int | None:
    """Return the index in 1, "cuda:1" or torch.device("cuda", 1); None if it has none."""
    if device is None:
        return None
    if not isinstance(device, bool):
        try:
            return operator.index(device)  # type: ignore[arg-type]  # or TypeError
        except TypeError:
            pass
    written = _CUDA_DEVICE.fullmatch(str(device))
    if written is None:
        raise UsageError(
            f"{device!r:.80} is not a CUDA device",
            because="a GPU is named by its torch index",
            attempt='0, "cuda:0" or torch.device("cuda", 0)',
        )
    return None if written[1] is None else int(written[1])


def current_cuda_index() -> int | None:
    """Return the current device of this thread in torch; None where CUDA does not run."""
    torch = running_torch()
    return None if torch is None else int(torch.cuda.current_device())


def uuid_from_torch(torch: Any, cuda_index: int) -> str:
    """Return the UUID, without prefix, of the GPU that torch calls `cuda_index`."""
    count = torch.cuda.device_count()
    if not 0 <= cuda_index < count:
        raise not_visible(cuda_index, count)
    properties = torch.cuda.get_device_properties(cuda_index)
    uuid = getattr(properties, "uuid", None)  # since torch 2.4
    return str(uuid) if uuid else ask_in_this_process()[cuda_index]


def uuid_of(cuda_index: int) -> str | None:
    """Return the UUID without prefix; None if torch has none, as for an emulated GPU."""
    torch = running_torch()
    if torch is None:
        return None
    try:
        return uuid_from_torch(torch, cuda_index)
    except (OomphError, OSError):
        return None


def not_visible(index: int, count: int) -> OomphError:
    """Return the error for an index that CUDA does not show."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "is not set" if variable is None else f"is {variable!r:.200}"
    return Unreadable(
        f"cuda:{index:.6g} is not visible to this process",
        because=f"CUDA shows {count} GPU{'s' * (count != 1)}; CUDA_VISIBLE_DEVICES {setting}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchMemory:
    """What torch's allocator holds on one GPU now, and its peak."""

    cuda_index: int
    allocated_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int


def read_torch_memory() -> tuple[TorchMemory, ...]:
    """Read the GPUs on which torch holds memory; () if CUDA does not run in this process.

    torch.cuda.reset_peak_memory_stats resets the peaks: keep the maximum of several readings.
    """
    torch = running_torch()
    if torch is None:
        return ()
    read = (_memory(torch, index) for index in range(torch.cuda.device_count()))
    return tuple(memory for memory in read if memory.peak_reserved_bytes)


def _memory(torch: Any, cuda_index: int) -> TorchMemory:
    stats = torch.cuda.memory_stats(cuda_index)  # each max_memory_... call fetches all of it
    return TorchMemory(
        cuda_index=cuda_index,
        allocated_bytes=stats.get("allocated_bytes.all.current", 0),
        peak_allocated_bytes=stats.get("allocated_bytes.all.peak", 0),
        peak_reserved_bytes=stats.get("reserved_bytes.all.peak", 0),
    )


def torch_gpu(cuda_index: int) -> TorchGpu | None:
    """Return the GPU as torch knows it; None where CUDA does not run."""
    torch = running_torch()
    if torch is None:
        return None
    properties = torch.cuda.get_device_properties(cuda_index)
    name, total = getattr(properties, "name", None), getattr(properties, "total_memory", None)
    return TorchGpu(
        cuda_index=cuda_index,
        name=None if name is None else str(name),
        total_bytes=None if total is None else int(total),
    )
