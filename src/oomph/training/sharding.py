"""A model, How -> the same model on several GPUs: one rank's part of it.

torch.distributed must be running, with as many ranks as `how` has GPUs (torchrun does both).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed

from oomph.errors import UsageError
from oomph.records.sharding import divides_parameters, grid_of
from oomph.records.workload import How
from oomph.training.blocks import find_blocks


def put_on_ranks(model: Any, how: How) -> Any:
    """The model, replicated or divided. The optimizer is made of its parameters afterwards."""
    _check_group(how.num_gpus)
    if divides_parameters(how):
        return divided(model, how)
    # With views, gradients live in the buckets that are sent; without, there is a copy of each.
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def divided(model: Any, how: How) -> Any:
    """FSDP2: each block gathers its parameters when it runs; the rest, the root, keeps them."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    low = how.precision in ("bf16", "pure-bf16")
    # Low precision is enough to compute with; sums over many ranks are made in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
    )
    mesh = _mesh(model, how)
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def _mesh(model: Any, how: How) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    copies, shards = grid_of(how)
    device = next(model.parameters()).device.type
    if copies == 1:
        return init_device_mesh(device, (shards,))
    return init_device_mesh(device, (copies, shards), mesh_dim_names=("copies", "shards"))


def _check_group(num_gpus: int) -> None:
    is_there = distributed.is_available() and distributed.is_initialized()
    num_ranks = distributed.get_world_size() if is_there else 1
    if num_ranks != num_gpus:
        raise UsageError(
            f"{num_gpus} GPUs are wanted, and {num_ranks} rank{'s' * (num_ranks > 1)} run",
            because="each GPU is trained by a process of its own",
            attempt=f"torchrun --nproc-per-node {num_gpus}, and"
            " torch.distributed.init_process_group()",
        )
