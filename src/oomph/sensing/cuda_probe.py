"""torch and CUDA, started stage by stage in a process of their own, for `calibration` to watch.

After each stage a line of JSON says what torch has to say; the next one begins when a line comes
in, and the process ends when the input does. Only to be run as a child: CUDA stays in a process
for as long as that lives.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what torch prints is no answer
    try:
        for answer in _stages():
            _tell(answers, answer)
            if not sys.stdin.readline():
                return
    except ModuleNotFoundError as error:
        _tell(answers, {"error": "no torch" if error.name == "torch" else str(error)})
    except Exception as error:  # noqa: BLE001 - whatever torch or the driver says is the answer
        _tell(answers, {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"})


def _tell(answers: TextIO, answer: dict[str, Any]) -> None:
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
    from oomph.sensing.gpu_rates import measure

    yield measure(torch)


def _load_libraries(torch: Any) -> None:
    """Have cuBLAS and cuDNN make their handles: a matmul and a convolution, there and back."""
    matrix = torch.ones(512, 512, device="cuda", requires_grad=True)
    (matrix @ matrix).sum().backward()
    if torch.backends.cudnn.is_available():
        layer = torch.nn.Conv2d(16, 16, 3, padding=1, device="cuda")
        layer(torch.ones(4, 16, 32, 32, device="cuda")).sum().backward()


if __name__ == "__main__":
    main()
