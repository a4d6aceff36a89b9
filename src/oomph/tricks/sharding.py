"""A model, Variant -> one rank's part of the model on several GPUs.

torch.distributed must be running, with as many ranks as the variant has GPUs (torchrun does both).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from oomph.errors import UsageError
from oomph.records.workload import (
    GPUS_PER_NODE,
    Sharding,
    Variant,
    check_sharding,
    divides_layers,
    divides_parameters,
    fills_nodes,
    grid_of,
    holds_parameters_on_host,
    torchrun_on,
)
from oomph.tricks.definition import Definition, Fragment, Request, by_hand
from oomph.tricks.mesh import check_group, mesh_of
from oomph.tricks.tensor_parallel import split_layers

if TYPE_CHECKING:
    import torch


def _put_on_ranks(model: torch.nn.Module, variant: Variant) -> torch.nn.Module:
    """Replicate or shard the model. Make the optimizer from its parameters afterwards."""
    import torch

    check_group(variant.num_gpus)
    if divides_parameters(variant):
        return _divided(model, variant)
    # With views, gradients live in the buckets that are sent; without, each exists twice.
    return torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)


def _divided(model: torch.nn.Module, variant: Variant) -> torch.nn.Module:
    """Shard with FSDP2: each block gathers its parameters to run; the root, the rest, keeps its."""
    import torch
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    from oomph.tricks.blocks import find_blocks

    low = variant.precision in _LOW
    # Low precision is enough for computing; sums over many ranks are in fp32.
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if low else None, reduce_dtype=torch.float32 if low else None
    )
    device = _device_of(model).type
    offload = OffloadPolicy()
    if holds_parameters_on_host(variant):
        offload = CPUOffloadPolicy(pin_memory=device == "cuda")
    mesh = mesh_of(variant, device)
    if divides_layers(variant):  # first, so that FSDP shards each part of a layer
        split_layers(model, mesh["tensor"])
    copies, _ = grid_of(variant)
    mesh = mesh["shards"] if copies == 1 else mesh["copies", "shards"]
    for block in find_blocks(model):
        fully_shard(block, mesh=mesh, mp_policy=policy, offload_policy=offload)
    # It changes the model's class.
    fully_shard(model, mesh=mesh, mp_policy=policy, offload_policy=offload)
    return model


def start_alike(model: torch.nn.Module, variant: Variant) -> None:
    """Give every rank the weights of the first: sharding does not do that by itself."""
    import torch
    from torch import distributed

    check_group(variant.num_gpus)
    device = _device_of(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            sent = tensor.detach().to(device).contiguous()
            distributed.broadcast(sent, 0)
            tensor.copy_(sent)


def _device_of(model: torch.nn.Module) -> torch.device:
    """Return where a model is to be trained: a model on the host may be moved shard by shard."""
    import torch

    device = next(model.parameters()).device
    is_on_host = device.type == "cpu" and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if is_on_host else device


# ---- how many GPUs can share a batch -------------------------------------------------------------


def numbers_of_gpus(batch_size: int, most: int, gpus_per_node: int = GPUS_PER_NODE) -> list[int]:
    """Return powers of two, of GPUs and of machines, and the largest number that is possible.

    Each divides the batch, and fits on one machine or fills several.
    """
    possible = [n for n in range(most, 0, -1) if _can_divide(batch_size, n, gpus_per_node)]
    powers = {2**n for n in range(most.bit_length())}
    powers |= {gpus_per_node * power for power in powers}
    return sorted({*powers.intersection(possible), possible[0]} - {1})


def _can_divide(batch_size: int, num_gpus: int, gpus_per_node: int) -> bool:
    return batch_size % num_gpus == 0 and fills_nodes(num_gpus, gpus_per_node)


def can_share(kind: Sharding, num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> bool:
    """Return whether this many GPUs can be used: hybrid needs equal groups of several."""
    try:
        check_sharding(kind, num_gpus, gpus_per_node)
    except UsageError:
        return False
    return True


def _why_not(kind: Sharding, request: Request) -> str | None:
    batch_size, most = request.batch_size, request.max_gpus
    if most == 1:
        return "only one GPU is allowed: --max-gpus"
    per_node = request.gpus_per_node
    numbers = numbers_of_gpus(batch_size, most, per_node)
    if not numbers:
        return f"a batch of {batch_size} cannot be divided equally among up to {most} GPUs"
    if any(can_share(kind, number, per_node) for number in numbers):
        return None
    return f"{' or '.join(map(str, numbers))} GPUs cannot form several equal groups: use fsdp"


# ---- as plain code -------------------------------------------------------------------------------

_START = '''
def start():
    """Joins the processes that torchrun started, of which each has one GPU."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if not dist.is_initialized():
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    if dist.get_world_size() != NUM_GPUS:
        raise SystemExit(f"planned for {NUM_GPUS} processes: torchrun --nproc-per-node {NUM_GPUS}")
'''

_SAME_START = '''
def start_alike(model):
    """Gives every process the weights of the first: sharding does not do that by itself."""
    for tensor in [*model.parameters(), *model.buffers()]:
        sent = tensor.detach().to(DEVICE)
        dist.broadcast(sent, 0)
        tensor.data.copy_(sent)
'''
_DISTRIBUTED = "import torch.distributed as dist"

_LOW = ("bf16", "pure-bf16")
_POLICY = [
    "low, wide = torch.bfloat16, torch.float32  # it computes in bf16, and adds up in fp32",
    'options["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=wide)',
]


def _mesh_in_code(variant: Variant) -> list[str]:
    return [
        f"shape = {grid_of(variant)}  # copies, and the GPUs of one machine that share each",
        'names = ("copy", "shard")',
        'options["mesh"] = init_device_mesh(DEVICE.type, shape, mesh_dim_names=names)',
    ]


def _ddp_in_code(_: Variant) -> Fragment:
    # Gradients that are not views of the buckets exist twice.
    wrapped = "DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True)"
    return Fragment(
        imports=[
            "import contextlib",
            _DISTRIBUTED,
            "from torch.nn.parallel import DistributedDataParallel",
        ],
        functions=[_START],
        # Before the optimizer: a host copy of the weights must be made after DDP has broadcast them
        # to every process.
        on_gpu=['ids = [LOCAL_RANK] if DEVICE.type == "cuda" else None', f"model = {wrapped}"],
    )


def _fsdp_in_code(variant: Variant) -> Fragment:
    is_hybrid = variant.sharding == "hybrid"
    names, policies, start = ["fully_shard"], [], _START
    if variant.precision in _LOW:
        names.append("MixedPrecisionPolicy")
        policies += _POLICY
    if holds_parameters_on_host(variant):
        names.append("CPUOffloadPolicy")
        policies.append(
            'options["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE.type == "cuda")'
        )
        # The norm of gradients on the host is summed there.
        start = start.replace('"nccl" if', '"cpu:gloo,cuda:nccl" if')
    wrap = f"from torch.distributed.fsdp import {', '.join(sorted(names))}"
    mesh = ["from torch.distributed.device_mesh import init_device_mesh"] if is_hybrid else []
    return Fragment(
        imports=[_DISTRIBUTED, *mesh, wrap],
        functions=[start, _SAME_START],
        needs_blocks=True,
        to_gpu=[
            "start_alike(model)",
            "options = {}",
            *policies,
            *(_mesh_in_code(variant) if is_hybrid else []),
            "for block in blocks_of(model):",
            "    fully_shard(block, **options)",
            "fully_shard(model, **options)",
        ],
    )


_UNITS = by_hand(
    "the units of FSDP: auto_wrap_policy={the class of the blocks}",
    unless=["hf", "accelerate", "deepspeed"],
)
_MESH_BY_HAND = by_hand(
    "sharding inside a machine and copies across: fully_shard(..., mesh=a mesh of two axes)"
)


# ---- the tricks ----------------------------------------------------------------------------------

_WHY_NOT_IN_SCRIPT = "a script that starts itself on several GPUs is not rehearsed: a Workload is"

DDP = Definition(
    name="ddp",
    stability="same",
    setting="sharding",
    value="ddp",
    what=lambda v: f"{v.num_gpus} GPUs with the whole model each, gradients averaged",
    code=lambda v: (
        f"{torchrun_on(v)}, DistributedDataParallel(model, gradient_as_bucket_view=True)"
    ),
    splits_batch=True,
    why_not_in_script=_WHY_NOT_IN_SCRIPT,
    why_not=partial(_why_not, "ddp"),
    divide=_put_on_ranks,
    by_hand=by_hand(
        "gradients as views of the buckets, which saves a copy of them:"
        " DistributedDataParallel(..., gradient_as_bucket_view=True)",
        unless=["deepspeed"],
    ),
    in_code=_ddp_in_code,
)

FSDP = Definition(
    name="fsdp",
    stability="same",
    setting="sharding",
    value="fsdp",
    what=lambda v: f"parameters, gradients and optimizer divided over {v.num_gpus} GPUs",
    code=lambda v: f"{torchrun_on(v)}, fully_shard(block), then the model",
    splits_batch=True,
    why_not_in_script=_WHY_NOT_IN_SCRIPT,
    why_not=partial(_why_not, "fsdp"),
    divide=_put_on_ranks,
    by_hand=_UNITS,
    in_code=_fsdp_in_code,
)

HYBRID = Definition(
    name="hybrid",
    stability="same",
    setting="sharding",
    value="hybrid",
    what=lambda v: (
        f"{v.num_gpus} GPUs in equal groups, each on one machine: divided within a group,"
        " copied across groups"
    ),
    code="fully_shard(block, mesh=a mesh of two dimensions)",
    splits_batch=True,
    why_not_in_script=_WHY_NOT_IN_SCRIPT,
    why_not=partial(_why_not, "hybrid"),
    divide=_put_on_ranks,
    by_hand=lambda v, target: (*_UNITS(v, target), *_MESH_BY_HAND(v, target)),
    in_code=_fsdp_in_code,
)
