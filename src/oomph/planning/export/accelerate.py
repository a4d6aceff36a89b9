"""Variant -> what `accelerate launch --config_file` reads, and the arguments of Accelerator.

Held against accelerate 1.15. The file cannot carry the accumulation, Accelerator cannot carry the
number of processes: both are needed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from oomph.planning.export.mine import as_settings, laid_upon
from oomph.planning.export.nodes import spread
from oomph.records.workload import Variant

_MIXED = {"fp16": "fp16", "bf16": "bf16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccelerateSettings:
    """The file for the launcher, and the arguments for the script."""

    config: dict[str, Any]
    arguments: dict[str, Any]  # Accelerator(**arguments)

    @property
    def text(self) -> str:
        """The file's text. It is JSON, which is YAML too: either ending will do."""
        return json.dumps(self.config, indent=2, ensure_ascii=False) + "\n"


def accelerate_settings(
    variant: Variant, config: object = None, *, gpus_per_node: int | None = None
) -> AccelerateSettings:
    """Both, with the plan's laid upon the user's own configuration."""
    nodes = spread(variant.num_gpus, gpus_per_node)
    mixed = _MIXED.get(variant.precision, "no")
    mine = as_settings(config)
    planned: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": _distributed_type(variant),
        "mixed_precision": mixed,
        "num_processes": variant.num_gpus,
        "num_machines": nodes.num_nodes,
        "use_cpu": False,
    }
    for other in ("deepspeed_config", "megatron_lm_config", "fsdp_config"):
        if not (other == "fsdp_config" and planned["distributed_type"] == "FSDP"):
            mine.pop(other, None)
    if planned["distributed_type"] == "FSDP":
        planned["fsdp_config"] = _fsdp(variant)
    merged = {"machine_rank": 0, "debug": False, **laid_upon(mine, planned)}
    arguments = {"mixed_precision": mixed, "gradient_accumulation_steps": variant.accumulation}
    return AccelerateSettings(config=merged, arguments=arguments)


def _distributed_type(variant: Variant) -> str:
    if variant.sharding in ("fsdp", "hybrid"):
        return "FSDP"
    return "MULTI_GPU" if variant.num_gpus > 1 else "NO"


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
