"""What `oomph.watching()` costs a training of 50 ms steps, beside the bare loop, in the same run.

CPU time of the whole process, its threads with it. Twice: of steps that sleep, so that all code
has left the processor's caches when its turn comes, which is the worst case; and of steps that
follow each other at once, where it has not.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from oomph.rehearsing.child import in_a_child

TITLE = "CPU beside a step of 50 ms"
STEP_S = 0.05
NUM_BEFORE = 140  # seven seconds: the driver is found, files are open, the first turns are over
NUM_STEPS = 200  # ten seconds: two turns of the thread, and one look at the processes
ROUNDS = 2
NUM_AT_ONCE, WINDOW = 5000, 500

Way = Callable[[Iterable[Any]], Any]


def measure() -> str:
    """The best of several rounds, in turns: a noisy moment hits all ways alike."""
    import torch  # noqa: F401 - once, and not in each child

    cold, warm = dict.fromkeys(WAYS, float("inf")), dict.fromkeys(WAYS, float("inf"))
    for _ in range(ROUNDS):
        for name, way in WAYS.items():
            cold[name] = min(cold[name], in_a_child(lambda way=way: sleeping_us(way)))  # type: ignore[misc]
            warm[name] = min(warm[name], in_a_child(lambda way=way: at_once_us(way)))  # type: ignore[misc]
    width = max(map(len, WAYS))
    lines = [
        f"| {TITLE:<{width}} | us, cold | of the step | us, warm | of the step |",
        f"|{'-' * (width + 2)}|---------:|------------:|---------:|------------:|",
    ]
    for name in WAYS:
        figures = [more for us in (cold, warm) for more in (us[name] - us[BARE],)]
        shares = [figure / 1e6 / STEP_S for figure in figures]
        lines.append(
            f"| {name:<{width}} | {figures[0]:8.1f} | {shares[0]:11.3%} |"
            f" {figures[1]:8.1f} | {shares[1]:11.3%} |"
        )
    return "\n".join(lines)


def sleeping_us(way: Way) -> float:
    """CPU of one step, once all is under way."""
    import torch

    torch.set_num_threads(1)
    with way([torch.zeros(32, 4)] * (NUM_BEFORE + NUM_STEPS + 1)) as batches:
        began_s = ended_s = 0.0
        for number, _ in enumerate(batches):
            if number == NUM_BEFORE:
                began_s = time.process_time()
            if number == NUM_BEFORE + NUM_STEPS:
                ended_s = time.process_time()
            time.sleep(STEP_S)
        return (ended_s - began_s) / NUM_STEPS * 1e6


def at_once_us(way: Way) -> float:
    """CPU of one step among many, in the best of some stretches."""
    import torch

    with way([torch.zeros(32, 4)] * NUM_AT_ONCE) as batches:
        seen, best = time.process_time(), float("inf")
        for number, _ in enumerate(batches, start=1):
            if number % WINDOW == 0:
                now = time.process_time()
                best, seen = min(best, now - seen), now
        return best / WINDOW * 1e6


@contextlib.contextmanager
def bare(batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
    yield batches


@contextlib.contextmanager
def inside_oomph_watch(batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
    import oomph

    with tempfile.TemporaryDirectory() as directory:
        os.environ["OOMPH_RUN_DIR"] = directory
        with oomph.watching(prints=False) as run:
            yield run.steps(batches)


@contextlib.contextmanager
def alone(batches: Iterable[Any]) -> Iterator[Iterable[Any]]:
    from nvml.machine import Gpu, NvmlMachine, Proc

    import oomph

    with tempfile.TemporaryDirectory() as directory:
        os.environ["OOMPH_RUNS"] = directory
        machine = NvmlMachine(Path(directory), [Gpu(processes=[Proc(os.getpid())])], log=False)
        with machine.active(), oomph.watching(prints=False) as run:
            yield run.steps(batches)


BARE = "the bare loop"
WAYS: dict[str, Callable[[Iterable[Any]], Any]] = {
    BARE: bare,
    "inside oomph watch": inside_oomph_watch,
    "alone, its GPU watched by a thread": alone,
}


if __name__ == "__main__":
    print(measure())
