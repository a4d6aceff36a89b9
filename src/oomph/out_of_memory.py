"""An exception -> which memory ran out, or None for any other error.

torch has a class for this, torch.OutOfMemoryError. Libraries below torch (cuBLAS, cuDNN, NCCL,
bitsandbytes) and the CPU allocator are recognised by their messages (`oom_message.py`), but only in
a RuntimeError or MemoryError, which is what torch raises: a ValueError that quotes such a message
does not count. An error raised `from` an out-of-memory error does.
"""

from __future__ import annotations

import os
from typing import Literal

import torch

from oomph.oom_message import OomMessage, parse

# "workers": processes of a DataLoader. Splitting the batch would not bring them back.
Memory = Literal["gpu", "host", "workers"]

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def which_memory(error: BaseException) -> Memory | None:
    """Return which memory ran out according to an exception; None for any other error."""
    seen: set[int] = set()
    each: BaseException | None = error
    while each is not None and id(each) not in seen:
        found = _named_by(each)
        if found is not None:
            return found
        seen.add(id(each))
        each = _raised_because_of(each)
    return None


def _raised_because_of(error: BaseException) -> BaseException | None:
    """Return the error that this one passes on; None if there is none.

    `raise ... from error` passes it on. Without `from`, only a plain RuntimeError does: other
    errors in an `except` block are usually mistakes of their own. `from None` cuts the connection.
    """
    if not isinstance(error, Exception):
        return None
    if error.__cause__ is not None:
        return error.__cause__
    is_bare = type(error) is RuntimeError and not error.__suppress_context__
    return error.__context__ if is_bare else None


def _named_by(error: BaseException) -> Memory | None:
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu"
    if not isinstance(error, RuntimeError | MemoryError):
        return None
    text = " ".join(map(str, error.args))
    message = parse(text, has_expandable_segments=_has_expandable_segments())
    # The kernel's own lines are about another process, and /dev/shm is no memory of torch's.
    if message is not None and message.family not in ("killed", "shared-memory"):
        return "gpu" if message.memory == "gpu" else _of_host(message)
    return "host" if isinstance(error, MemoryError) else None


def _of_host(message: OomMessage) -> Memory:
    return "workers" if message.memory == "workers" else "host"


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether smaller pieces of the batch would help."""
    return which_memory(error) in ("gpu", "host")


def _has_expandable_segments() -> bool:
    return any("expandable_segments:True" in os.environ.get(name, "") for name in _SETTINGS)
