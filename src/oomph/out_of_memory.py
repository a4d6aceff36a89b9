"""An exception -> which memory ran out, or None for any other error.

torch has a class for this, torch.OutOfMemoryError. Libraries below torch (cuBLAS, cuDNN, NCCL,
bitsandbytes) and the CPU allocator are recognised by their messages, but only in a RuntimeError or
MemoryError, which is what torch raises: a ValueError that quotes such a message does not count. An
error raised `from` an out-of-memory error does.
"""

from __future__ import annotations

import os
import re
from typing import Literal

import torch

# "workers": processes of a DataLoader. Splitting the batch would not bring them back.
Memory = Literal["gpu", "host", "workers"]

_DEVICES = "CUDA|HIP|XPU|NPU|MPS backend"
_GPU = re.compile(
    rf"""
      \b(?:{_DEVICES})\ out\ of\ memory            # torch's caching allocators
    | \b(?:CUDA|HIP|XPU)\ (?:driver\ )?error:\s*out\ of\ memory
    | \bcuda\ runtime\ err(?:or)?\s*\(2\)\s*:\s*out\ of\ memory    # torch before 1.0
    | \bTHCudaCheck\ FAIL\b.*\bout\ of\ memory
    | \bcuda\ failed\ with\ error\ 2\ out\ of\ memory               # spconv
    | \bAllocation\ on\ device\b.*\bwould\ exceed\ allowed\ memory  # backend:cudaMallocAsync
    | \bTried\ to\ allocate\ (?:more\ than\ 1EB|[\d.]+\ [KMGT]i?B)
    | \breserved\ in\ total\ by\ PyTorch
    | \bmax_split_size_mb\ to\ avoid\ fragmentation
    | \bcan\ NOT\ allocate\ memory\ block\ with\ size\ larger       # XPU
    | \bAllocation\ is\ out\ of\ device\ memory                     # XPU
    | \b(?:UR_RESULT|PI)_ERROR_OUT_OF_(?:DEVICE_MEMORY|RESOURCES)\b  # XPU
    | \bInvalid\ buffer\ size:\ [\d.]+\ [KMGT]i?B                 # MPS: more than a buffer may have
    | \b(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE|HIPBLAS|HIPSPARSE)_STATUS_ALLOC_FAILED\b
    | \bCUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED\b
    | \bCUFFT_ALLOC_FAILED\b
    | \b(?:cudaErrorMemoryAllocation|CUDA_ERROR_OUT_OF_MEMORY|hipErrorOutOfMemory)\b
    | \b(?:rocblas_status_memory_error|miopenStatusAllocFailed)\b
    | \bUnable\ to\ find\ a\ valid\ cuDNN\ algorithm                # no workspace fits
    | \bCuda\ failure\s*(?:2\s*)?'out\ of\ memory'                  # NCCL
    | \bNCCL\b.*\bout\ of\ memory
    | \bError\ out\ of\ memory\ at\ line\ \d+                       # bitsandbytes
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_HOST = re.compile(
    r"""
      \bDefaultCPUAllocator:\ (?:can't\ allocate|not\ enough)\ memory
    | \benforce\ fail\ at\ .*alloc.*\bposix_memalign
    """,
    re.VERBOSE | re.IGNORECASE | re.DOTALL,
)
_WORKERS = re.compile(
    r"\bDataLoader worker \(pid[^)]*\) is killed by signal: (?:Killed|Bus error)", re.IGNORECASE
)
# An old driver reports this for expandable segments when memory runs out; without them it is
# another fault (pytorch's CUDACachingAllocator.cpp maps memory only for them).
_DRIVER = "CUDA driver error: invalid argument"
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
    if _GPU.search(text) or (_DRIVER in text and _has_expandable_segments()):
        return "gpu"
    if _WORKERS.search(text):
        return "workers"
    return "host" if isinstance(error, MemoryError) or _HOST.search(text) else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether smaller pieces of the batch would help."""
    return which_memory(error) in ("gpu", "host")


def _has_expandable_segments() -> bool:
    return any("expandable_segments:True" in os.environ.get(name, "") for name in _SETTINGS)
