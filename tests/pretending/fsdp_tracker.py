"""torch's own FSDPMemTracker on the same training: its peaks as JSON. In a process of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH = 1024
NUM_UNITS = 12
UNIT_BYTES = 4 * WIDTH * WIDTH
CASES = [(2, "fp32"), (4, "fp32"), (8, "fp32"), (8, "bf16")]


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Any) -> Any:
        return self.only(x)


def units() -> Any:
    return nn.Sequential(*(Unit() for _ in range(NUM_UNITS)))


def peak_bytes(num_ranks: int, precision: str) -> int:
    """The peak of one forward and backward."""
    low = precision == "bf16"
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
    )
    distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    mesh = init_device_mesh("cpu", (num_ranks,))
    with FakeTensorMode():
        model = units()
        for unit in model:
            fully_shard(unit, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        tracker = FSDPMemTracker(model, optimizer)
        x = torch.zeros(1, WIDTH)
        tracker.track_inputs((x,))
        with tracker:
            model(x).float().mean().backward()
    snapshot = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    distributed.destroy_process_group()
    return sum(size for kind, size in snapshot.items() if "Total" not in str(kind))


def main() -> None:
    for num_ranks, precision in CASES:
        found = {"case": [num_ranks, precision], "peak_bytes": peak_bytes(num_ranks, precision)}
        sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
