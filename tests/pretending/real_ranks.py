"""Run by torchrun on two ranks, on the CPU: what real ranks compute and allocate, as JSON.

torchrun --nproc-per-node 2 -m pretending.real_ranks
Each rank trains on its half of the batch; what it ends with is compared with one process that
has trained on all of it. The first rank prints.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import time
from typing import Any

import torch
from torch import distributed, nn

from oomph.pretending import ranks
from oomph.records.workload import Variant
from oomph.rehearsing.self_test import Counting
from oomph.tricks import apply

SMALL_BYTES = 64  # scalars, and the list of its buckets that DDP sends around
EXAMPLES = 4  # on each rank, at a time
WIDTH = 256  # two blocks, and 2 MiB of gradients: more than the first bucket has room for
WAYS = {
    "ddp": Variant(micro_batch=EXAMPLES, sharding="ddp", num_gpus=2),
    "ddp, accumulated": Variant(micro_batch=EXAMPLES, accumulation=2, sharding="ddp", num_gpus=2),
    "fsdp": Variant(micro_batch=EXAMPLES, sharding="fsdp", num_gpus=2),
    "fsdp, accumulated": Variant(micro_batch=EXAMPLES, accumulation=2, sharding="fsdp", num_gpus=2),
    "fsdp, recomputed": Variant(
        micro_batch=EXAMPLES, sharding="fsdp", num_gpus=2, checkpointing="blocks"
    ),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH + 1)  # an odd number: shards are padded
        self.down = nn.Linear(2 * WIDTH + 1, WIDTH)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 65)

    def forward(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def examples(count: int) -> Any:
    torch.manual_seed(1)
    return torch.randn(count, WIDTH)


def loss_of(model: Any, x: Any) -> Any:
    return model(x).square().mean()


def optimizer_of(parameters: Any) -> Any:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=True)  # as on a GPU


def train(
    model: Any,
    variant: Variant,
    mine: list[Any],
    recorder: Any = None,
    loss_of: Any = loss_of,
) -> None:
    """Two steps over this rank's examples."""
    optimizer = optimizer_of(list(model.parameters()))
    loss = None  # as any loop, it holds the last one until the next has its name
    with recorder or contextlib.nullcontext():
        for _ in range(2):
            optimizer.zero_grad()
            for left, x in zip(reversed(range(len(mine))), mine, strict=True):
                waits = left and variant.sharding == "ddp"
                with model.no_sync() if waits else contextlib.nullcontext():
                    new = loss_of(model, x)
                    loss = new / len(mine) if len(mine) > 1 else new
                    del new
                    loss.backward()
            optimizer.step()
        if recorder:
            recorder.events = list(recorder.events)  # what follows is the end of this function


def until_broadcast_is_over(recorder: Counting) -> None:
    """DDP sends a flat copy of all weights; gloo's thread drops it a moment after it says so."""
    flat = {number for number, (op, _, _) in enumerate(recorder.born) if op == "aten.cat.default"}
    while not {-event - 1 for event in recorder.events if event < 0} >= flat:
        time.sleep(0.01)


def whole(parameter: Any) -> Any:
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def compared(way: str, variant: Variant) -> dict[str, Any]:
    rank = distributed.get_rank()
    torch.manual_seed(0)
    alone = Stack()
    count = variant.micro_batch * variant.accumulation
    batch = examples(count * 2)
    mine = list(batch[rank * count : (rank + 1) * count].chunk(variant.accumulation))
    recorder = Counting()
    gc.collect()
    gc.disable()
    with contextlib.ExitStack() as stack:
        if variant.sharding == "fsdp":
            stack.enter_context(ranks.local_parts_are_seen(recorder))
        with recorder:
            model = apply.put_on_model(copy.deepcopy(alone), variant)
        until_broadcast_is_over(recorder)
        recorder.begin_with_the_living()
        train(model, variant, mine, recorder)
    gc.enable()
    train(alone, Variant(micro_batch=len(batch)), [batch])
    pairs = list(zip(alone.parameters(), model.parameters(), strict=True))
    return {
        "way": way,
        "weights_differ_by": max(_difference(a, whole(b)) for a, b in pairs),
        "gradients_differ_by": max(_difference(a.grad, whole(b.grad)) for a, b in pairs),
        "taken": curve(recorder.events, recorder.sizes),
    }


def curve(events: list[int], sizes: list[int]) -> list[tuple[int, int]]:
    """Each request, and the bytes that are live with it; small ones are left out."""
    live, told = 0, []
    for event in events:
        size_bytes = sizes[abs(event) - 1]
        if size_bytes <= SMALL_BYTES:
            continue
        live += size_bytes if event > 0 else -size_bytes
        if event > 0:
            told.append((size_bytes, live))
    return told


def _difference(one: Any, other: Any) -> float:
    return float((one - other).detach().abs().max())


def main() -> None:
    distributed.init_process_group("gloo")
    for way, variant in WAYS.items():
        found = compared(way, variant)
        if distributed.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
    distributed.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # a thread of gloo that drops a tensor while Python shuts down aborts the process


if __name__ == "__main__":
    main()
