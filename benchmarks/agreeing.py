"""What it costs that ranks agree on each step, beside bare DDP and FSDP2, in the same run.

Two processes on this machine, joined by gloo. The bare loops cannot go on after an error of memory
on one rank. Times are by the clock, since ranks wait for each other: they are those of a machine
whose cores are busy with both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

NUM_RANKS, NUM_PIECES, MICRO_BATCH, NUM_BLOCKS = 2, 4, 8, 4
WIDTHS = {16: 60, 768: 12}  # and how many rounds
BARE = {"Stepper, DDP": "bare DDP, no_sync", "Stepper, FSDP2": "bare FSDP2"}


def measure() -> str:
    with tempfile.TemporaryDirectory() as folder:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.agreeing", folder, str(rank)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for rank in range(NUM_RANKS)
        ]
        codes = [each.wait() for each in started]
        if any(codes):
            raise RuntimeError(f"the ranks ended with {codes}")
        found = json.loads((Path(folder) / "found.json").read_text())
    return as_table(*(found[str(width)] for width in WIDTHS))


def as_table(small: dict[str, float], large: dict[str, float]) -> str:
    """Milliseconds by way -> a table, with what each Stepper takes on top of its bare loop."""
    title = f"{NUM_PIECES} micro-batches and a step, {NUM_RANKS} ranks, gloo"
    narrow, wide = (f"ms, {width} wide" for width in WIDTHS)
    lines = [
        f"| {title:<45} | {narrow:>12} |  more | {wide:>12} |  more |",
        f"|{'-' * 47}|{'-' * 13}:|------:|{'-' * 13}:|------:|",
    ]
    for name in small:
        bare = BARE.get(name, name)
        more = (small[name] - small[bare], large[name] / large[bare] - 1)
        lines.append(
            f"| {name:<45} | {small[name]:12.1f} | {more[0]:5.1f} | {large[name]:12.0f} |"
            f" {more[1]:5.0%} |"
        )
    return "\n".join(lines)


# ---- one rank ------------------------------------------------------------------------------------


def run(folder: Path, rank: int) -> None:
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", f"file://{folder}/store", timedelta(minutes=5), NUM_RANKS, rank
    )
    found = {width: measured(width, rounds) for width, rounds in WIDTHS.items()}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    distributed.barrier()
    distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


def measured(width: int, rounds: int) -> dict[str, float]:
    """Milliseconds of a step, of each way; the best of many rounds, in turns."""
    from torch import distributed

    ways = {
        "bare DDP, no_sync": bare(*job(width, replicated)),
        "Stepper, DDP": by_stepper(*job(width, replicated)),
        "bare FSDP2": bare(*job(width, sharded)),
        "Stepper, FSDP2": by_stepper(*job(width, sharded)),
    }
    best = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, step in ways.items():
            distributed.barrier()
            began_s = time.perf_counter()
            step()
            best[name] = min(best[name], (time.perf_counter() - began_s) * 1e3)
    return best


def job(width: int, shared: Callable[[Any], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """A model on all ranks, its optimizer, and four micro-batches."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(NUM_BLOCKS)]
    model = shared(nn.Sequential(*blocks))
    num = NUM_PIECES * MICRO_BATCH
    batch = {"x": torch.randn(num, width), "y": torch.randint(0, width, (num,))}
    return model, torch.optim.SGD(model.parameters(), lr=1e-3), batch


def replicated(model: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def sharded(model: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in model:
        fully_shard(block)
    return fully_shard(model)


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def bare(model: Any, optimizer: Any, batch: dict[str, Any]) -> Callable[[], Any]:
    def step() -> None:
        columns = [tensor.split(MICRO_BATCH) for tensor in batch.values()]
        for number, row in enumerate(zip(*columns, strict=True), 1):
            is_synced = number == NUM_PIECES or not hasattr(model, "no_sync")
            with nullcontext() if is_synced else model.no_sync():
                (loss_of(model, dict(zip(batch, row, strict=True))) / NUM_PIECES).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def by_stepper(model: Any, optimizer: Any, batch: dict[str, Any]) -> Callable[[], Any]:
    import oomph

    stepper = oomph.Stepper(model, optimizer, loss_of, micro_batch=MICRO_BATCH, weight="mean")
    return lambda: stepper(batch)


if __name__ == "__main__":
    run(Path(sys.argv[1]), int(sys.argv[2]))
