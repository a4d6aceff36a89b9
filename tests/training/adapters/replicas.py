"""Two ranks of each library with GPUs of their own size, emulated, of which one is too small.

torchrun --nproc-per-node 2 replicas.py FOLDER: writes FOLDER/RANK.json. It asserts nothing.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed

import oomph
from oomph.errors import OomphError
from training.adapters import jobs, loops

# And what the second rank has, too little for a batch. Lightning makes its replicas on a stream of
# their own, which keeps the 20 MiB that it was given.
LIBRARIES: dict[str, tuple[Any, str]] = {
    "accelerate": (loops.with_accelerate, "48MiB"),
    "hf": (loops.with_hf, "48MiB"),
    "lightning": (loops.with_lightning, "64MiB"),
}
PLENTY = "1GiB"
NUM_BATCHES = 4  # of each rank


def trained(train: Any, folder: Path, budget: str, *, is_guarded: bool) -> dict[str, Any]:
    data = jobs.examples(2 * NUM_BATCHES * loops.BATCH, 32)
    with oomph.emulated_gpu(budget) as gpu:
        model = loops.make()
        with jobs.undone(model.used):
            bare, num_steps = train(folder, model, data, 2, is_guarded=is_guarded)
        weights = {name: each.flatten().tolist() for name, each in jobs.weights_of(bare).items()}
        num_ooms = gpu.num_out_of_memory
    gc.collect()
    forget_device()
    return {
        "weights": weights,
        "used": bare.used.whole,
        "num_steps": num_steps,
        "num_ooms": num_ooms,
    }


class FailsOnSecond(torch.optim.SGD):
    """An update that never fits on the second rank, where it is found out half way."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return found


FailsOnSecond.__module__ = "torch.optim.sgd"  # others' optimizers are left alone


def with_failing_update(train: Any, folder: Path) -> dict[str, Any]:
    data, said = jobs.examples(2 * NUM_BATCHES * loops.BATCH, 32), ""
    with (
        oomph.emulated_gpu(PLENTY),
        mock.patch.object(loops, "optimizer_of", lambda m: FailsOnSecond(m.parameters(), lr=0.05)),
    ):
        model = loops.make()
        before = {name: each.tolist() for name, each in jobs.weights_of(model).items()}
        try:
            train(folder, model, data, 2, is_guarded=True)
        except OomphError as error:
            said = str(error)
        after = {name: each.tolist() for name, each in jobs.weights_of(model).items()}
    gc.collect()
    forget_device()
    return {"said": said, "is_as_before": before == after}


def forget_device() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def main(folder: Path) -> None:
    os.environ["LOCAL_RANK"] = "0"  # each process has an emulated GPU, which is its first
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", timeout=timedelta(minutes=5))
    rank = distributed.get_rank()
    found: dict[str, Any] = {}
    for name, (train, budget) in LIBRARIES.items():
        found[name] = {
            "without": trained(train, folder, PLENTY, is_guarded=False),
            "with": trained(train, folder, budget if rank else PLENTY, is_guarded=True),
            "failing": with_failing_update(train, folder),
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    main(Path(sys.argv[1]))
