"""libcuda -> the UUIDs of the GPUs that CUDA shows, in CUDA's own order.

CUDA puts the fastest GPU first by an unpublished rule, so only CUDA knows the order when the
GPUs differ. Asking it means cuInit, which must not happen in a process that may fork later, so a
child process runs this file. The child has only the standard library: import nothing else.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import uuid

_TIMEOUT_S = 60  # cuInit takes seconds on large machines without persistence mode


def ask_in_this_process() -> list[str]:
    """Return the UUIDs without their prefix. Call it in a child, or where CUDA already runs."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_uuid_of(cuda, ordinal) for ordinal in range(count.value)]


def ask_in_a_child() -> list[str] | None:
    """Return the UUIDs without touching CUDA in this process; None if CUDA could not be asked."""
    if getattr(sys, "frozen", False) or not sys.executable:
        return None  # sys.executable is an application: running it would start it again
    command = [sys.executable, "-I", "-S", __file__]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return child.stdout.split() if child.returncode == 0 else None


def _uuid_of(cuda: ctypes.CDLL, ordinal: int) -> str:
    device = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    raw = (ctypes.c_ubyte * 16)()
    # Under MIG, v2 gives the UUID of the slice; the first version gives the UUID of the GPU.
    _check(cuda.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid_v2")
    return str(uuid.UUID(bytes=bytes(raw)))


def _check(code: int, function: str) -> None:
    if code:
        raise OSError(f"{function} answered {code}")


if __name__ == "__main__":
    print("\n".join(ask_in_this_process()))
