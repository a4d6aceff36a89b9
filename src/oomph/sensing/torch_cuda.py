"""torch in this process -> which GPU it calls by which index, and what it holds there.

torch is looked up among the modules that the user's script has imported; it is never
imported here, and CUDA is never initialised.
"""

from __future__ import annotations

import operator
import os
import re
import sys
from typing import Any

from oomph.errors import OomphError, Unreadable, UsageError
from oomph.sensing import cuda_order

_CUDA_DEVICE = re.compile(r"cuda(?::(\d{1,4}))?")


def running_torch() -> Any:
    """torch, if this process has imported it and CUDA runs in it; else None."""
    torch = sys.modules.get("torch")
    is_initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    if is_initialized is None:  # not imported, not to its end, or another module of that name
        return None
    return torch if is_initialized() else None


def held_by_torch(cuda_index: int) -> int:
    """What torch in this process has reserved on a GPU."""
    torch = running_torch()
    return 0 if torch is None else int(torch.cuda.memory_reserved(cuda_index))


def cuda_index_of(device: Any) -> int | None:
    """The index in 1, "cuda:1" or torch.device("cuda", 1); None where it is left open."""
    if device is None:
        return None
    if not isinstance(device, bool):
        try:
            return operator.index(device)
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


def uuid_from_torch(torch: Any, cuda_index: int) -> str:
    """The bare UUID of the GPU that torch calls `cuda_index`."""
    count = torch.cuda.device_count()
    if not 0 <= cuda_index < count:
        raise not_visible(cuda_index, count)
    properties = torch.cuda.get_device_properties(cuda_index)
    told = getattr(properties, "uuid", None)  # since torch 2.4
    return str(told) if told else cuda_order.ask_in_this_process()[cuda_index]


def not_visible(index: int, count: int) -> OomphError:
    """The error for an index that CUDA does not show."""
    variable = os.environ.get("CUDA_VISIBLE_DEVICES")
    setting = "is not set" if variable is None else f"is {variable!r:.200}"
    return Unreadable(
        f"cuda:{index:.6g} is not visible to this process",
        because=f"CUDA shows {count} GPU{'s' * (count != 1)}; CUDA_VISIBLE_DEVICES {setting}",
    )
