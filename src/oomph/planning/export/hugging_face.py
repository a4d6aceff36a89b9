"""Variant -> the fields of transformers' TrainingArguments.

Held against transformers 5.22. What its Trainer cannot be told is in beyond.py.
"""

from __future__ import annotations

from typing import Any

from oomph.planning.export.mine import as_settings, laid_upon
from oomph.records.workload import Variant

# Names of transformers.training_args.OptimizerNames. Its own default is AdamW, so the
# implementations of "your optimizer" are those of AdamW.
_OPTIM = {
    "fused": "adamw_torch_fused",
    "foreach": "adamw_torch",
    "8-bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def training_arguments(variant: Variant, args: object = None) -> dict[str, Any]:
    """Fields for TrainingArguments(**...): the user's own, with the plan's laid upon them."""
    mine = as_settings(args)
    planned = {
        "per_device_train_batch_size": variant.micro_batch,
        "gradient_accumulation_steps": variant.accumulation,
        "auto_find_batch_size": False,  # it would change the batch, and the update with it
        **_precision(variant, mine),
        **_checkpointing(variant, mine),
        **_optimizer(variant, mine),
        **_sharding(variant, mine),
    }
    mine.pop("gradient_checkpointing_kwargs", None)  # laid out anew, with its own parts kept
    return {"dataloader_pin_memory": True, **laid_upon(mine, planned)}


def _precision(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    # bf16=True is autocast; weights in bf16 are loaded that way and need no flag.
    fields = {"bf16": variant.precision == "bf16", "fp16": variant.precision == "fp16"}
    if variant.precision == "tf32":
        return {**fields, "tf32": True}
    if variant.precision == "fp32" and mine.get("tf32"):
        return {**fields, "tf32": False}
    return fields


def _checkpointing(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    is_every = variant.checkpointing.startswith("every-")
    is_whole = variant.checkpointing == "blocks"
    if is_whole and variant.sharding in ("fsdp", "hybrid"):
        return {"gradient_checkpointing": False}  # in fsdp_config: one all-gather less
    if not is_whole and not is_every:
        return {"gradient_checkpointing": False}
    kept = {
        name: value
        for name, value in (mine.get("gradient_checkpointing_kwargs") or {}).items()
        if name not in ("every_n_layers", "offload")
    }
    every = {"every_n_layers": int(variant.checkpointing[len("every-") :])} if is_every else {}
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {**kept, "use_reentrant": False, **every},
    }


def _optimizer(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    own = str(getattr(mine.get("optim"), "value", mine.get("optim", "adamw_torch")))
    if variant.optimizer in _IMPLEMENTATIONS and not own.startswith("adamw_torch"):
        return {}  # another optimizer than AdamW: its implementation is not among the names
    return {"optim": _OPTIM[variant.optimizer]} if variant.optimizer in _OPTIM else {}


def _sharding(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    without_zero = {"deepspeed": None} if mine.get("deepspeed") else {}
    if variant.sharding not in ("fsdp", "hybrid"):
        if mine.get("fsdp"):
            mine.pop("fsdp_config", None)
            return {**without_zero, "fsdp": None}
        return without_zero
    config = {
        "version": 2,
        "reshard_after_forward": True,
        "activation_checkpointing": variant.checkpointing == "blocks",
        "cpu_offload": variant.offload_optimizer,
    }
    return {**without_zero, "fsdp": True, "fsdp_config": config}
