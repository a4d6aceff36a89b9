"""Random jobs on the emulated GPU: what it takes to settle on a size, beside others' searches.

    python -m benchmarks.jobs 200

A job is a model, a batch, a GPU's memory, and batches of one length or of several. To know whether
a size fits it is trained for real, on an emulated GPU with memory for all; what that was asked for
is then put to the allocator of the GPU that the job has.
"""

from __future__ import annotations

import logging
import multiprocessing
import statistics
import sys
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.job_searches import WAYS, Outcome
from benchmarks.job_trials import jobs

NUM_JOBS = 12  # of `make bench`, a few minutes of CPU; 200 take an hour
_AT_A_TIME = 4  # are drawn by one seed, and run in one process
_SEED = 2026
_COLUMNS = (
    "no OOM",
    "most OOMs",
    "of the largest size",
    "least",
    "batch kept",
    "samples twice",
    "lost",
)


def measure(num: int = NUM_JOBS) -> str:
    outcomes = _all_outcomes(num)
    title = f"{num} random jobs, emulated GPU"
    width = max(len(title), *map(len, WAYS))
    rule = "|".join(f"{'-' * (len(each) + 1)}:" for each in _COLUMNS)
    lines = [f"| {title:<{width}} | {' | '.join(_COLUMNS)} |", f"|{'-' * (width + 2)}|{rule}|"]
    for name, found in outcomes.items():
        cells = [f"{cell:>{len(at)}}" for cell, at in zip(_cells(found), _COLUMNS, strict=True)]
        lines.append(f"| {name:<{width}} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cells(found: Sequence[Outcome]) -> tuple[str, ...]:
    shares = [share for each in found for share in each.shares]
    return (
        f"{_share(not each.num_ooms for each in found):.0%}",
        f"{max(each.num_ooms for each in found)}",
        f"{statistics.mean(shares):.1%}",
        f"{min(shares):.0%}",
        f"{_share(each.keeps_batch for each in found):.0%}",
        f"{sum(each.num_repeated for each in found)}",
        f"{sum(each.num_lost for each in found)}",
    )


def _share(answers: Iterable[bool]) -> float:
    return statistics.mean(map(float, answers))


def _all_outcomes(num: int) -> dict[str, list[Outcome]]:
    """Several seeds at a time: the jobs are the same on however many cores."""
    parts = range(0, num, _AT_A_TIME)
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        found = pool.map(
            _outcomes_of,
            [min(_AT_A_TIME, num - first) for first in parts],
            [_SEED + first for first in parts],
        )
        together: dict[str, list[Outcome]] = {name: [] for name in WAYS}
        for part in found:
            for name, outcomes in part.items():
                together[name] += outcomes
            num_done = len(together[next(iter(WAYS))])
            print(f"{num_done} of {num} jobs", end="\r", file=sys.stderr, flush=True)
    return together


def _outcomes_of(num: int, seed: int) -> dict[str, list[Outcome]]:
    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    made = jobs(num, seed)
    return {name: [run(job) for job in made] for name, run in WAYS.items()}


if __name__ == "__main__":
    print(measure(int(sys.argv[1]) if len(sys.argv) > 1 else NUM_JOBS))
