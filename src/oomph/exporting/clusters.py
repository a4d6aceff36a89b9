"""Variant -> what torchtitan and Megatron-LM are started with, for models of theirs.

Each trains a model of its own by its name, so the model and its data stay the user's. Read in
torchtitan 0.3.0 (config/configs.py, models/llama3/config_registry.py) and in Megatron-LM
(megatron/training/arguments.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oomph.records.workload import Variant, divides_layers, divides_parameters, grid_of

_LOW = ("bf16", "pure-bf16")

# ---- torchtitan: a configuration is a Python function --------------------------------------------

_TORCHTITAN = '''\
"""torchtitan 0.3.0, as oomph planned it.

{start} --module {module} --config planned
with this file as config_registry.py of a package of yours, in place of {module}.
"""

from torchtitan.models.llama3.config_registry import llama3_8b  # your model
{imports}

def planned():
    config = llama3_8b()
{lines}
    return config
'''
_CHECKPOINTING = {"blocks": "FullAC", "selective": "SelectiveAC"}


def torchtitan_config(variant: Variant, start: str) -> str:
    """Return the text of a configuration; `start` is the command up to torchtitan's arguments."""
    kind = _CHECKPOINTING.get(variant.checkpointing)
    imports = ""
    if kind is not None:
        imports = f"from torchtitan.distributed.activation_checkpoint import {kind}\n"
    settings: dict[str, Any] = {**_training(variant), **_parallelism(variant)}
    settings["activation_checkpoint"] = f"{kind}.Config()" if kind else None
    lines = "\n".join(f"    config.{name} = {value}" for name, value in settings.items())
    return _TORCHTITAN.format(start=start, module="PACKAGE", imports=imports, lines=lines)


def _training(variant: Variant) -> dict[str, Any]:
    is_pure = variant.precision == "pure-bf16"
    return {
        "training.local_batch_size": variant.micro_batch,
        "training.global_batch_size": variant.batch_size,
        "training.dtype": repr("bfloat16" if is_pure else "float32"),
        "training.mixed_precision_param": repr(
            "bfloat16" if variant.precision in _LOW else "float32"
        ),
        "training.enable_cpu_offload": divides_parameters(variant) and variant.offload_optimizer,
    }


def _parallelism(variant: Variant) -> dict[str, Any]:
    copies, shards = grid_of(variant)
    return {
        "parallelism.data_parallel_replicate_degree": copies,
        "parallelism.data_parallel_shard_degree": shards,
        "parallelism.tensor_parallel_degree": variant.tensor_parallel,
        "parallelism.pipeline_parallel_degree": 1,
        "parallelism.context_parallel_degree": 1,
    }


def left_by_torchtitan(variant: Variant) -> Iterator[str]:
    """Yield what torchtitan's configuration cannot express."""
    if variant.precision == "bf16" and not divides_parameters(variant) and divides_layers(variant):
        yield "bf16: without FSDP or DDP torchtitan does not cast; data_parallel_shard_degree = 2"
    if variant.precision in ("fp16", "tf32"):
        yield f"{variant.precision}: torchtitan trains in bfloat16 or float32"
    if variant.checkpointing == "selective":
        yield "checkpointing: torchtitan's SelectiveAC keeps other ops than the plan"
    elif variant.checkpointing not in ("none", "blocks"):
        yield f"checkpointing of {variant.checkpointing}: torchtitan recomputes all blocks or none"
    yield from _left_by_both(variant)


# ---- Megatron-LM ---------------------------------------------------------------------------------


def megatron_arguments(variant: Variant) -> list[str]:
    """Return Megatron-LM's arguments, one flag with its value to a line."""
    lines = [
        f"--micro-batch-size {variant.micro_batch}",
        f"--global-batch-size {variant.batch_size}",
        f"--tensor-model-parallel-size {variant.tensor_parallel}",
        "--pipeline-model-parallel-size 1",
        "--context-parallel-size 1",
    ]
    if divides_layers(variant):
        lines.append("--sequence-parallel")
    if divides_parameters(variant):
        lines += [
            "--use-torch-fsdp2",
            "--no-gradient-accumulation-fusion",
            "--ckpt-format torch_dist",
            "--untie-embeddings-and-output-weights",
        ]
    if variant.precision in ("bf16", "fp16"):
        lines.append(f"--{variant.precision}")
    if variant.checkpointing == "blocks":
        lines += ["--recompute-granularity full", "--recompute-method uniform"]
        lines.append("--recompute-num-layers 1")
    elif variant.checkpointing == "selective":
        lines.append("--recompute-granularity selective")
    return lines


def left_by_megatron(variant: Variant) -> Iterator[str]:
    """Yield what Megatron-LM's arguments cannot express."""
    if divides_parameters(variant):
        yield "CUDA_DEVICE_MAX_CONNECTIONS must not be 1: Megatron-LM's FSDP2 refuses it"
    if variant.sharding == "hybrid":
        yield "sharding inside a machine and copies across: --use-torch-fsdp2 shards among all"
    if variant.precision in _LOW or variant.precision == "fp16":
        yield "weights: Megatron-LM keeps 16-bit weights beside the fp32 ones: 2 bytes more each"
    if variant.precision == "pure-bf16":
        yield "pure-bf16: --bf16 keeps fp32 weights for the optimizer"
    if variant.checkpointing == "selective":
        yield "checkpointing: Megatron-LM recomputes attention only, and the plan more"
    elif variant.checkpointing not in ("none", "blocks"):
        how = variant.checkpointing
        yield f"checkpointing of {how}: --recompute-num-layers counts from one end"
    yield from _left_by_both(variant)


def _left_by_both(variant: Variant) -> Iterator[str]:
    yield "the model and its data: both tools train models of their own, by name"
    if variant.optimizer != "as-is":
        yield f"the optimizer: {variant.optimizer}"
    plain = Variant(micro_batch=1)
    names = ("loss", "adapters", "offload_activations", "zero_offload", "optimizer_in_backward")
    for name in names:
        if getattr(variant, name) != getattr(plain, name):
            yield f"{name.replace('_', ' ')}: neither tool has the plan's"
    if variant.expandable_segments:
        yield "PYTORCH_ALLOC_CONF=expandable_segments:True in the environment"
