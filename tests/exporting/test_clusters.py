"""torchtitan's configuration and Megatron-LM's arguments say what the plan says."""

from __future__ import annotations

import ast
from typing import Any

import pytest
from planning.plans import plan_of

ON_64: dict[str, Any] = {
    "num_gpus": 64,
    "sharding": "fsdp",
    "tensor_parallel": 8,
    "precision": "bf16",
    "checkpointing": "blocks",
    "micro_batch": 2,
    "accumulation": 4,
}


def settings_in(text: str) -> dict[str, str]:
    """What a configuration sets, as written; the text is Python."""
    (function,) = (one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef))
    return {
        ast.unparse(line.targets[0]): ast.unparse(line.value)
        for line in function.body
        if isinstance(line, ast.Assign)
    }


def test_torchtitan_gets_the_grid_and_the_whole_batch() -> None:
    found = settings_in(plan_of(**ON_64).to_torchtitan())
    assert found["config.parallelism.data_parallel_shard_degree"] == "8"
    assert found["config.parallelism.data_parallel_replicate_degree"] == "1"
    assert found["config.parallelism.tensor_parallel_degree"] == "8"
    assert found["config.training.local_batch_size"] == "2"
    assert found["config.training.global_batch_size"] == "64"  # 2 x 4 x 8 groups
    assert found["config.training.mixed_precision_param"] == "'bfloat16'"
    assert found["config.activation_checkpoint"] == "FullAC.Config()"


def test_torchtitan_is_started_on_every_machine() -> None:
    text = plan_of(**ON_64).to_torchtitan()
    assert "--nnodes=8" in text
    assert "-m torchtitan.train --module" in text
    alone = plan_of(num_gpus=8, sharding="fsdp").to_torchtitan()
    assert "--standalone" in alone


@pytest.mark.parametrize(
    ("sharding", "grid"), [("ddp", ("8", "1")), ("fsdp", ("1", "8")), ("hybrid", ("2", "4"))]
)
def test_torchtitan_shards_and_copies_as_planned(sharding: str, grid: tuple[str, str]) -> None:
    found = settings_in(plan_of(num_gpus=8, sharding=sharding).to_torchtitan())
    names = ("data_parallel_replicate_degree", "data_parallel_shard_degree")
    assert tuple(found[f"config.parallelism.{name}"] for name in names) == grid
    assert found["config.activation_checkpoint"] == "None"


def test_megatron_gets_the_grid_and_the_whole_batch() -> None:
    lines = plan_of(**ON_64).to_megatron()
    for line in (
        "--tensor-model-parallel-size 8",
        "--sequence-parallel",
        "--micro-batch-size 2",
        "--global-batch-size 64",
        "--use-torch-fsdp2",
        "--bf16",
        "--recompute-granularity full",
    ):
        assert line in lines
    alone = plan_of(precision="fp32").to_megatron()
    assert not any("fsdp" in line or "sequence" in line or "bf16" in line for line in alone)


@pytest.mark.parametrize("target", ["torchtitan", "megatron"])
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"checkpointing": "blocks:0,3"}, "checkpointing"),
        ({"checkpointing": "selective"}, "checkpointing"),
        ({"loss": "chunked"}, "loss"),
        ({"optimizer": "8-bit"}, "8-bit"),
        ({"adapters": "lora"}, "adapters"),
        ({"expandable_segments": True}, "expandable_segments"),
        ({"offload_activations": True}, "offload activations"),
    ],
)
def test_what_they_cannot_express_is_said(target: str, settings: dict[str, Any], said: str) -> None:
    plan = plan_of(**settings)
    assert any(said in line for line in plan.not_expressed(target))
    assert "# by hand: the model and its data" in plan.exported(target, "train.py")


@pytest.mark.parametrize("target", ["hf", "lightning", "accelerate", "deepspeed", "code"])
def test_tools_that_know_no_shared_layers_refuse_such_a_plan(target: str) -> None:
    from oomph.errors import UsageError

    with pytest.raises(UsageError, match="tensor parallelism"):
        plan_of(**ON_64).exported(target, "train.py")
