"""Variant -> the content of DeepSpeed's ds_config.json.

Held against DeepSpeed 0.19. DeepSpeed keeps 16-bit weights beside their fp32 originals where
autocast keeps the fp32 ones alone: its memory is near the predicted, not equal to it.
"""

from __future__ import annotations

from typing import Any

from oomph.planning.export.mine import as_settings, laid_upon
from oomph.records.workload import Variant


def deepspeed_config(variant: Variant, config: object = None) -> dict[str, Any]:
    """The configuration: the user's own, with the plan's laid upon it."""
    planned = {
        "train_batch_size": variant.batch_size,
        "train_micro_batch_size_per_gpu": variant.micro_batch,
        "gradient_accumulation_steps": variant.accumulation,
        "bf16": _bf16(variant),
        "fp16": {"enabled": variant.precision == "fp16"},
        "zero_optimization": _zero(variant),
    }
    mine = as_settings(config)
    mine.pop("torch_autocast", None)  # a second way to say the precision
    _without_offload(mine, variant)
    return laid_upon(mine, {**planned, **_activations(variant)})


def _bf16(variant: Variant) -> dict[str, Any]:
    is_pure = variant.precision == "pure-bf16"
    enabled = {"enabled": variant.precision == "bf16" or is_pure}
    if not is_pure:
        return enabled
    return {**enabled, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}


def _zero(variant: Variant) -> dict[str, Any]:
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    return {"stage": _stage(variant), **(offload if variant.offload_optimizer else {})}


def _stage(variant: Variant) -> int:
    if variant.sharding in ("fsdp", "hybrid"):
        return 3  # parameters, gradients and state are sharded
    # Stage 0 can neither offload nor leave the fp32 weights out: stage 1 shards the state, which
    # on one GPU is all of it.
    return 1 if variant.offload_optimizer or variant.precision == "pure-bf16" else 0


def _without_offload(mine: dict[str, Any], variant: Variant) -> None:
    """Takes the user's own offloading away: the plan says what is on the host."""
    zero = mine.get("zero_optimization")
    if isinstance(zero, dict):
        zero.pop("offload_param", None)
        if not variant.offload_optimizer:
            zero.pop("offload_optimizer", None)


def _activations(variant: Variant) -> dict[str, Any]:
    if variant.checkpointing == "none":
        return {}
    section = {"partition_activations": False, "cpu_checkpointing": variant.offload_activations}
    return {"activation_checkpointing": section}
