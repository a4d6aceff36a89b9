"""What `oomph.record` costs: the same training on the emulated GPU, with and without it.

The emulated GPU writes its history in Python, torch's allocator in C++. On CUDA recording has
another price, which was not measured.

python -m benchmarks.recording
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.emulation import gpt2, small_ops
from oomph.rehearsing.child import in_a_child

_TRAININGS = {"MLP of small ops": small_ops, "GPT-2 of 4 layers": gpt2}
_ROUNDS = 8
_STEPS = 10


def measure() -> str:
    title = "a step on the emulated GPU (CUDA: not run)"
    lines = [
        f"| {title} | CPU ms | in oomph.record | ratio |",
        f"|{'-' * (len(title) + 2)}|-------:|----------------:|------:|",
    ]
    for name, make in _TRAININGS.items():
        without_ms, with_ms = in_a_child(partial(measured, make))
        ratio = with_ms / without_ms
        lines.append(
            f"| {name:<{len(title)}} | {without_ms:6.1f} | {with_ms:15.1f} | {ratio:5.2f} |"
        )
    return "\n".join(lines)


def measured(make: Callable[[str], Callable[[int], None]]) -> tuple[float, float]:
    """Milliseconds of CPU for a step without and with the recording, the best of many rounds."""
    import torch

    import oomph

    torch.set_num_threads(1)
    taken: tuple[list[float], list[float]] = ([], [])
    with TemporaryDirectory() as directory, oomph.emulated_gpu("8GiB"):
        path = Path(directory, "oom.pickle")
        step = make("cuda")
        step(0)
        for _ in range(_ROUNDS):  # in turns, so that a noisy moment hits both
            taken[0].append(_timed(step, nullcontext))
            taken[1].append(_timed(step, partial(oomph.record, path)))
    return min(taken[0]), min(taken[1])


def _timed(step: Callable[[int], None], within: Callable[[], AbstractContextManager[Any]]) -> float:
    import torch

    with within() as recording:
        step(0)
        began_s = time.process_time()
        for number in range(_STEPS):
            step(number)
        taken_ms = (time.process_time() - began_s) * 1000 / _STEPS
        has_recorded = any(torch.cuda.memory._snapshot()["device_traces"])
    if has_recorded != (recording is not None):
        raise RuntimeError("the recording was not on exactly where it was asked for")
    return taken_ms


if __name__ == "__main__":
    print(measure())
