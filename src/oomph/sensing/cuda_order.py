"""libcuda -> the UUIDs that CUDA shows, in its own order.

CUDA counts the fastest GPU first, by a rule that it does not publish; only CUDA can tell
the order of unlike GPUs. Asking means cuInit, which must not happen in a process that
may fork later, so a child that has nothing but ctypes asks. It costs a process start,
and is done once, and only where the answer can differ from the order of the PCI bus.
"""

from __future__ import annotations

import ctypes
import sys
import uuid

_ASK_SECONDS = 60  # cuInit takes seconds on large machines without persistence mode


def ask_in_this_process() -> list[str]:
    """The UUIDs without their prefix. For a process where CUDA runs already, or a child."""
    cuda = ctypes.CDLL("libcuda.so.1")
    _check(cuda.cuInit(0), "cuInit")
    count = ctypes.c_int()
    _check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    return [_uuid_of(cuda, ordinal) for ordinal in range(count.value)]


def ask_in_a_child() -> list[str] | None:
    """The same, without touching CUDA here. None if CUDA could not be asked."""
    import subprocess

    if getattr(sys, "frozen", False) or not sys.executable:
        return None  # the executable is an application, and would start once more
    try:
        child = subprocess.run(
            [sys.executable, "-I", "-S", __file__],
            capture_output=True,
            text=True,
            timeout=_ASK_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return child.stdout.split() if child.returncode == 0 else None


def _uuid_of(cuda: ctypes.CDLL, ordinal: int) -> str:
    device = ctypes.c_int()
    _check(cuda.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
    raw = (ctypes.c_ubyte * 16)()
    # v2 tells the slice's own UUID under MIG, where the first version tells the GPU's.
    _check(cuda.cuDeviceGetUuid_v2(raw, device), "cuDeviceGetUuid_v2")
    return str(uuid.UUID(bytes=bytes(raw)))


def _check(code: int, function: str) -> None:
    if code:
        raise OSError(f"{function} answered {code}")


if __name__ == "__main__":
    print("\n".join(ask_in_this_process()))
