"""torch on a GPU -> the best rates that it reaches there: matmuls by dtype, and copying.

A fraction of a second each: the median of repeats between two events, the best of the shapes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median
from typing import Any

from oomph.units import GIB

_REPEATS = 9
_REPEAT_S = 0.03  # long beside the resolution of an event, 0.5 us (CUDA runtime, cudaEvent)
_WARM_UPS = 3  # clocks rise, and cuBLAS chooses its kernel

# Large enough to fill every GPU of the catalogue; which of the two is better differs. Judgement.
_MATMUL_SIZES = (4096, 8192)
_COPIED_BYTES = GIB // 2  # far beyond every cache
_MOST_OF_FREE = 0.25  # of the memory that is free: others may want some too

_BFLOAT16_SINCE = (8, 0)  # before, torch only emulates it


def measure(torch: Any) -> dict[str, Any]:
    """The rates of the current GPU. What does not fit into its memory is left out."""
    names = ["float16", "float32"]
    if torch.cuda.get_device_capability() >= _BFLOAT16_SINCE:
        names.insert(0, "bfloat16")
    torch.backends.cuda.matmul.allow_tf32 = False
    rates = {name: _matmul_flops(torch, name) for name in names}
    return {
        "matmul_flops": {name: rate for name, rate in rates.items() if rate is not None},
        "bandwidth_bytes_per_s": _copied_bytes_per_s(torch),
    }


def _matmul_flops(torch: Any, dtype_name: str) -> float | None:
    dtype = getattr(torch, dtype_name)
    rates = [
        2 * size**3 / _matmul_s(torch, size, dtype)
        for size in _MATMUL_SIZES
        if 3 * size * size * dtype.itemsize <= _room_bytes(torch)
    ]
    return max(rates, default=None)


def _matmul_s(torch: Any, size: int, dtype: Any) -> float:
    left, right = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return _median_s(torch, lambda: torch.mm(left, right, out=out))


def _copied_bytes_per_s(torch: Any) -> float | None:
    size_bytes = min(_COPIED_BYTES, _room_bytes(torch) // 2)
    if not size_bytes:
        return None
    source = torch.zeros(size_bytes, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * size_bytes / _median_s(torch, lambda: target.copy_(source))  # read, and written


def _room_bytes(torch: Any) -> int:
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes * _MOST_OF_FREE)


def _median_s(torch: Any, work: Callable[[], Any]) -> float:
    """Seconds on the GPU that one piece of work takes."""
    once_s = min(_timed_s(torch, work, 1) for _ in range(_WARM_UPS))
    count = max(1, math.ceil(_REPEAT_S / max(once_s, 1e-6)))
    return median(_timed_s(torch, work, count) / count for _ in range(_REPEATS))


def _timed_s(torch: Any, work: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
