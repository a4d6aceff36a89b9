"""Variant -> the arguments of Lightning's Trainer.

Held against pytorch-lightning 2.6. The Trainer does not make the loader: its batch size is the
plan's micro-batch, and is said with what is left out in beyond.py.
"""

from __future__ import annotations

from typing import Any

from oomph.planning.export.mine import as_settings, laid_upon
from oomph.records.workload import Variant

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
    """Arguments for Trainer(**...): the user's own, with the plan's laid upon them."""
    from oomph.planning.export.nodes import spread

    nodes = spread(variant.num_gpus, gpus_per_node)
    planned = {
        "accelerator": "gpu",
        "devices": nodes.num_gpus_each,
        "num_nodes": nodes.num_nodes,
        "accumulate_grad_batches": variant.accumulation,
        "precision": _PRECISIONS[variant.precision],
        "strategy": _strategy(variant),
    }
    return laid_upon(as_settings(args), planned)


def _strategy(variant: Variant) -> str:
    if variant.sharding in ("fsdp", "hybrid"):
        return "fsdp_cpu_offload" if variant.offload_optimizer else "fsdp"
    return "ddp" if variant.num_gpus > 1 else "auto"
