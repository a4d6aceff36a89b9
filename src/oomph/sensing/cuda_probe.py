"""Start torch and CUDA stage by stage in a child process, while `calibration` watches from outside.

After each stage it prints torch's figures as a line of JSON. An input line starts the next stage;
the end of the input ends the process. Run it only as a child: once CUDA is initialised, it stays
in a process until the process ends.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, TextIO

from oomph.records.generation import generation_of
from oomph.units import GIB


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keep torch's own output out of the answers
    try:
        for answer in _stages():
            _answer(answers, answer)
            if not sys.stdin.readline():
                return
    except ModuleNotFoundError as error:
        _answer(answers, {"error": "no torch" if error.name == "torch" else str(error)})
    except Exception as error:  # noqa: BLE001 - any error of torch or the driver is the answer
        _answer(answers, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def _answer(answers: TextIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer) + "\n")
    answers.flush()


def _stages() -> Iterator[dict[str, Any]]:
    import torch

    yield {
        "torch_version": str(torch.__version__),
        "cuda_version": torch.version.cuda,
        "is_available": torch.version.cuda is not None and torch.cuda.is_available(),
    }
    first = torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    yield {"reserved_bytes": torch.cuda.memory_reserved(), "total_bytes": total_bytes}
    _load_libraries(torch)
    torch.cuda.synchronize()
    yield {"reserved_bytes": torch.cuda.memory_reserved()}
    del first

    yield measure(torch)


def _load_libraries(torch: Any) -> None:
    """Make cuBLAS and cuDNN create their handles: one matmul and one convolution with backward."""
    matrix = torch.ones(512, 512, device="cuda", requires_grad=True)
    (matrix @ matrix).sum().backward()
    if torch.backends.cudnn.is_available():
        layer = torch.nn.Conv2d(16, 16, 3, padding=1, device="cuda")
        layer(torch.ones(4, 16, 32, 32, device="cuda")).sum().backward()


# ---- torch on a GPU -> the best rates it reaches: matmuls by dtype, and copying ----
# A fraction of a second each: the median of repeats between two events, the best of the shapes.

_REPEATS = 9  # judgement: a median of nine ignores a few disturbed repeats
_REPEAT_S = 0.03  # long compared to the resolution of an event, 0.5 us (CUDA runtime, cudaEvent)
_WARM_UPS = 3  # the clocks rise, and cuBLAS chooses its kernel

# Large enough to fill every GPU of the catalogue; which of the two is faster varies. Judgement.
_MATMUL_SIZES = (4096, 8192)
_COPIED_BYTES = GIB // 2  # much larger than any cache
_MAX_SHARE_OF_FREE = 0.25  # judgement: other processes may want some of the free memory too


def measure(torch: Any) -> dict[str, Any]:
    """Measure the rates of the current GPU. Skip what does not fit into its memory."""
    names = ["float16", "float32"]
    if generation_of(torch.cuda.get_device_capability()).has_bf16:  # else torch only emulates it
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
    return 2 * size_bytes / _median_s(torch, lambda: target.copy_(source))  # read and written


def _room_bytes(torch: Any) -> int:
    torch.cuda.empty_cache()
    free_bytes, _ = torch.cuda.mem_get_info()
    return int(free_bytes * _MAX_SHARE_OF_FREE)


def _median_s(torch: Any, work: Callable[[], Any]) -> float:
    """Return how many seconds the GPU takes for `work`."""
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
