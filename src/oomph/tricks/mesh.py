"""Variant -> the grid of ranks that it trains on.

torch.distributed must be running, with as many ranks as the variant has GPUs (torchrun does both).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomph.errors import UsageError
from oomph.records.workload import Variant, grid_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def mesh_of(variant: Variant, device: str) -> DeviceMesh:
    """Return the grid of ranks: copies of the model, shards of it, parts of each layer.

    Neighbours share layers, so that these are on one machine.
    """
    from torch.distributed.device_mesh import init_device_mesh

    copies, shards = grid_of(variant)
    sizes = {"copies": copies, "shards": shards, "tensor": variant.tensor_parallel}
    there = {name: size for name, size in sizes.items() if size > 1 or name == "shards"}
    return init_device_mesh(device, tuple(there.values()), mesh_dim_names=tuple(there))


def check_group(num_gpus: int) -> None:
    from torch import distributed

    is_there = distributed.is_available() and distributed.is_initialized()
    num_ranks = distributed.get_world_size() if is_there else 1
    if num_ranks != num_gpus:
        raise UsageError(
            f"{num_gpus} GPUs are needed, but {num_ranks} rank{'s' * (num_ranks > 1)} run",
            because="each GPU needs a process of its own",
            attempt=f"torchrun --nproc-per-node {num_gpus}, and"
            " torch.distributed.init_process_group()",
        )
