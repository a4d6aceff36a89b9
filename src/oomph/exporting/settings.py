"""Variant -> the settings of transformers, accelerate, Lightning and DeepSpeed.

Each is merged into the user's own settings. not_expressed lists what they cannot express.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from oomph.errors import UsageError
from oomph.launching.torchrun import spread
from oomph.records.workload import (
    Variant,
    divides_layers,
    divides_parameters,
    holds_parameters_on_host,
)
from oomph.tricks.trick import to_put_on

_LAUNCHERS = ("torchrun", "slurm", "sge")
TARGETS = ("hf", "lightning", "accelerate", "deepspeed", "code", *_LAUNCHERS)


def not_expressed(variant: Variant, target: str) -> tuple[str, ...]:
    """Return a sentence for each part of the plan that the target's settings cannot express."""
    if target not in TARGETS:
        raise UsageError(
            f"{target!r:.60} is not an export target", attempt=f"one of {', '.join(TARGETS)}"
        )
    if target in _LAUNCHERS:
        return (
            (
                f"{target} only starts the processes: the script itself must train"
                f" {variant.micro_batch} examples at a time and accumulate {variant.accumulation}"
                " times; plan.to_code() is such a script"
            ),
        )
    loader = f"the loader: DataLoader(..., batch_size={variant.micro_batch})"
    return (
        *([loader] if target in ("lightning", "accelerate") else []),
        *(line for trick in to_put_on(variant) for line in trick.by_hand(variant, target)),
    )


def refuse_shared_layers(variant: Variant, target: str) -> None:
    """Raise UsageError for a plan whose GPUs share layers: these settings have no word for it."""
    if divides_layers(variant):
        raise UsageError(
            f"a plan with tensor parallelism cannot be exported for {target}",
            because="with its settings every GPU would take examples of its own: another batch",
            attempt="model = oomph.apply(plan, model) under torchrun",
        )


def as_settings(mine: object) -> dict[str, Any]:
    """Convert a mapping, or a dataclass object such as TrainingArguments, to a new dict.

    From an object, take only the values that differ from its class's defaults.
    """
    if mine is None:
        return {}
    if isinstance(mine, Mapping):
        return copy.deepcopy(dict(mine))
    if dataclasses.is_dataclass(mine) and not isinstance(mine, type):
        return {
            field.name: copy.deepcopy(getattr(mine, field.name))
            for field in dataclasses.fields(mine)
            if field.init and getattr(mine, field.name) != _default(field)
        }
    raise UsageError(
        f"settings cannot be read from {type(mine).__name__!r:.60}",
        because="they are a dict, or an object of a dataclass such as TrainingArguments",
        attempt="pass a dict",
    )


def merged_with(mine: Mapping[str, Any], planned: Mapping[str, Any]) -> dict[str, Any]:
    """Merge both at any depth; where they conflict, the plan wins."""
    merged = dict(mine)
    for name, value in planned.items():
        own = merged.get(name)
        if isinstance(own, Mapping) and isinstance(value, Mapping):
            merged[name] = merged_with(own, value)
        else:
            merged[name] = value
    return merged


def _default(field: dataclasses.Field[Any]) -> object:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


# ---- transformers' TrainingArguments -------------------------------------------------------------
# Checked against transformers 5.22.

# Names from transformers.training_args.OptimizerNames. Its default is AdamW, so the implementations
# of the user's optimizer are those of AdamW.
_OPTIM = {
    "fused": "adamw_torch_fused",
    "foreach": "adamw_torch",
    "8-bit": "adamw_bnb_8bit",
    "adafactor": "adafactor",
    "sgd": "sgd",
}
_IMPLEMENTATIONS = ("fused", "foreach", "for-loop")


def training_arguments(variant: Variant, args: object = None) -> dict[str, Any]:
    """Return fields for TrainingArguments(**...): the user's own, overridden by the plan's."""
    refuse_shared_layers(variant, "transformers")
    mine = as_settings(args)
    planned = {
        "per_device_train_batch_size": variant.micro_batch,
        "gradient_accumulation_steps": variant.accumulation,
        "auto_find_batch_size": False,  # it would change the batch size, and with it the update
        **_precision(variant, mine),
        **_checkpointing(variant, mine),
        **_optimizer(variant, mine),
        **_sharding(variant, mine),
    }
    mine.pop("gradient_checkpointing_kwargs", None)  # in `planned`, with the user's entries kept
    return {"dataloader_pin_memory": True, **merged_with(mine, planned)}


def _precision(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    # bf16=True means autocast; bf16 weights are loaded as bf16 and need no flag.
    fields = {"bf16": variant.precision == "bf16", "fp16": variant.precision == "fp16"}
    if variant.precision == "tf32":
        return {**fields, "tf32": True}
    if variant.precision == "fp32" and mine.get("tf32"):
        return {**fields, "tf32": False}
    return fields


def _checkpointing(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    is_every = variant.checkpointing.startswith("every-")
    is_whole = variant.checkpointing == "blocks"
    if is_whole and divides_parameters(variant):
        return {"gradient_checkpointing": False}  # it is set in fsdp_config: one all-gather less
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
        return {}  # not AdamW, so the names do not cover its implementations
    return {"optim": _OPTIM[variant.optimizer]} if variant.optimizer in _OPTIM else {}


def _sharding(variant: Variant, mine: dict[str, Any]) -> dict[str, Any]:
    without_zero = {"deepspeed": None} if mine.get("deepspeed") else {}
    if not divides_parameters(variant):
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


# ---- `accelerate launch --config_file`, and the arguments of Accelerator -------------------------
# Checked against accelerate 1.15. The file cannot set the accumulation, Accelerator cannot set the
# number of processes: both are needed.


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSettings:
    """The file for the launcher, and the arguments for the script."""

    config: dict[str, Any]
    arguments: dict[str, Any]  # Accelerator(**arguments)

    @property
    def text(self) -> str:
        """Return the file's text. It is JSON, which is also YAML: either file extension works."""
        return json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"


def accelerate_settings(
    variant: Variant, config: object = None, *, gpus_per_node: int | None = None
) -> AccelerateSettings:
    """Return both, with the plan's settings merged into the user's configuration."""
    refuse_shared_layers(variant, "accelerate")
    nodes = spread(variant, gpus_per_node)
    mixed = variant.precision if variant.precision in ("fp16", "bf16") else "no"
    is_sharded = divides_parameters(variant)
    plain = "MULTI_GPU" if variant.num_gpus > 1 else "NO"
    planned: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "FSDP" if is_sharded else plain,
        "mixed_precision": mixed,
        "num_processes": variant.num_gpus,
        "num_machines": nodes.num_nodes,
        "use_cpu": False,
        **({"fsdp_config": _fsdp(variant)} if is_sharded else {}),
    }
    others = {"deepspeed_config", "megatron_lm_config", "fsdp_config"} - planned.keys()
    mine = {name: value for name, value in as_settings(config).items() if name not in others}
    merged = {"machine_rank": 0, "debug": False, **merged_with(mine, planned)}
    arguments = {"mixed_precision": mixed, "gradient_accumulation_steps": variant.accumulation}
    return AccelerateSettings(config=merged, arguments=arguments)


def _fsdp(variant: Variant) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_activation_checkpointing": variant.checkpointing == "blocks",
        "fsdp_offload_params": variant.offload_optimizer,
        "fsdp_cpu_ram_efficient_loading": False,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
    }


# ---- Lightning's Trainer -------------------------------------------------------------------------
# Checked against pytorch-lightning 2.6. The Trainer does not make the loader. The loader's batch
# size must be the plan's micro-batch; not_expressed says so.

_PRECISIONS = {
    "fp32": "32-true",
    "tf32": "32-true",  # and torch.set_float32_matmul_precision("high")
    "fp16": "16-mixed",
    "bf16": "bf16-mixed",
    "pure-bf16": "bf16-true",
}


def trainer_arguments(
    variant: Variant, args: object = None, *, gpus_per_node: int | None = None
) -> dict[str, Any]:
    """Return arguments for Trainer(**...): the user's own, overridden by the plan's."""
    refuse_shared_layers(variant, "Lightning")
    nodes = spread(variant, gpus_per_node)
    planned = {
        "accelerator": "gpu",
        "devices": nodes.num_gpus_each,
        "num_nodes": nodes.num_nodes,
        "accumulate_grad_batches": variant.accumulation,
        "precision": _PRECISIONS[variant.precision],
        "strategy": _strategy(variant),
    }
    return merged_with(as_settings(args), planned)


def _strategy(variant: Variant) -> str:
    if divides_parameters(variant):
        return "fsdp_cpu_offload" if variant.offload_optimizer else "fsdp"
    return "ddp" if variant.num_gpus > 1 else "auto"


# ---- DeepSpeed's ds_config.json ------------------------------------------------------------------
# Checked against DeepSpeed 0.19. DeepSpeed keeps 16-bit weights beside their fp32 originals, where
# autocast keeps only the fp32 ones. Its memory is close to the prediction, not equal to it.


def deepspeed_config(variant: Variant, config: object = None) -> dict[str, Any]:
    """Return the configuration: the user's own, overridden by the plan's."""
    refuse_shared_layers(variant, "DeepSpeed")
    is_pure = variant.precision == "pure-bf16"
    pure = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    offload = {"offload_optimizer": {"device": "cpu", "pin_memory": True}}
    is_on_host = variant.offload_optimizer or variant.zero_offload
    if holds_parameters_on_host(variant):
        offload["offload_param"] = {"device": "cpu", "pin_memory": True}
    planned = {
        "train_batch_size": variant.batch_size,
        "train_micro_batch_size_per_gpu": variant.micro_batch,
        "gradient_accumulation_steps": variant.accumulation,
        "bf16": {"enabled": variant.precision == "bf16" or is_pure, **(pure if is_pure else {})},
        "fp16": {"enabled": variant.precision == "fp16"},
        "zero_optimization": {
            "stage": _stage(variant),
            **(offload if is_on_host else {}),
        },
    }
    if variant.checkpointing != "none":
        planned["activation_checkpointing"] = {
            "partition_activations": False,
            "cpu_checkpointing": variant.offload_activations,
        }
    mine = as_settings(config)
    mine.pop("torch_autocast", None)  # another setting for the precision
    zero = mine.get("zero_optimization")
    if isinstance(zero, dict):  # the plan decides what is offloaded
        zero.pop("offload_param", None)
        if not is_on_host:
            zero.pop("offload_optimizer", None)
    return merged_with(mine, planned)


def _stage(variant: Variant) -> int:
    if divides_parameters(variant):
        return 3  # parameters, gradients and state are sharded
    # Stage 0 can neither offload nor omit the fp32 weights. Stage 1 shards the state; on one GPU
    # the shard is all of it.
    is_on_host = variant.offload_optimizer or variant.zero_offload
    return 1 if is_on_host or variant.precision == "pure-bf16" else 0
