"""torch in this process -> which GPU it calls by which index, and what it holds there.

torch is looked up among the modules that the user's script has imported; it is never
imported here, and CUDA is never initialised.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from oomph.errors import OomphError, Unreadable, UsageError
from oomph.sensing import cuda_order


def running_torch() -> Any:
    """torch, if this process has imported it and CUDA runs in it; else None."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):  # not imported, or not to its end
        return None
    return torch if torch.cuda.is_initialized() else None


def cuda_index_of(device: Any) -> int | None:
    """The index in 1, "cuda:1" or torch.device("cuda", 1); None where it is left open."""
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    kind, _, index = str(device).partition(":")
    if kind == "cuda" and (index.isdecimal() or str(device) == "cuda"):
        return int(index) if index else None
    raise UsageError(
        f"{device!r} is not a CUDA device",
        because="a GPU is named by its torch index",
        attempt='0, "cuda:0" or torch.device("cuda", 0)',
    )


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
    setting = "is not set" if variable is None else f"is {variable!r}"
    return Unreadable(
        f"cuda:{index} is not visible to this process",
        because=f"CUDA shows {count} GPU{'s' * (count != 1)}; CUDA_VISIBLE_DEVICES {setting}",
    )
