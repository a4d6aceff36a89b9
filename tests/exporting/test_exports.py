"""Every export keeps the batch, and says what it cannot say."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from planning.plans import plan_of, variant_of, variants, whatever_it_takes

from oomph.errors import UsageError
from oomph.exporting.settings import (
    TARGETS,
    accelerate_settings,
    deepspeed_config,
    not_expressed,
    trainer_arguments,
    training_arguments,
)
from oomph.launching.torchrun import torchrun_command
from oomph.records.workload import Variant


@whatever_it_takes
@given(variants())
def test_every_export_keeps_the_batch(variant: Variant) -> None:
    batch = variant.batch_size
    hf = training_arguments(variant)
    each = hf["per_device_train_batch_size"] * hf["gradient_accumulation_steps"]
    assert each * variant.num_gpus == batch
    trainer = trainer_arguments(variant)
    processes = trainer["devices"] * trainer["num_nodes"]
    assert variant.micro_batch * trainer["accumulate_grad_batches"] * processes == batch
    accelerate = accelerate_settings(variant)
    steps = accelerate.arguments["gradient_accumulation_steps"]
    assert variant.micro_batch * steps * accelerate.config["num_processes"] == batch
    ds = deepspeed_config(variant)
    each = ds["train_micro_batch_size_per_gpu"] * ds["gradient_accumulation_steps"]
    assert ds["train_batch_size"] == each * variant.num_gpus == batch
    command = torchrun_command(variant, "train.py").arguments
    assert f"--nproc-per-node={variant.num_gpus}" in command


@whatever_it_takes
@given(variants())
def test_machines_share_the_gpus_evenly(variant: Variant) -> None:
    trainer = trainer_arguments(variant, gpus_per_node=2)
    assert trainer["devices"] * trainer["num_nodes"] == variant.num_gpus
    config = accelerate_settings(variant, gpus_per_node=2).config
    assert config["num_machines"] == trainer["num_nodes"]


def test_machines_that_the_gpus_do_not_fill_are_refused() -> None:
    with pytest.raises(UsageError, match="cannot be spread"):
        plan_of(num_gpus=4).to_lightning(gpus_per_node=3)


@whatever_it_takes
@given(variants())
def test_what_is_not_expressed_is_a_sentence_of_its_own(variant: Variant) -> None:
    for target in TARGETS:
        sentences = not_expressed(variant, target)
        assert len(set(sentences)) == len(sentences)
        assert all(sentences)


@pytest.mark.parametrize(
    ("target", "settings", "said"),
    [
        ("hf", {"checkpointing": "blocks:0,3"}, "the blocks 0,3 only"),
        ("hf", {"loss": "chunked"}, "chunk_loss(model)"),
        ("hf", {"num_gpus": 2}, "gradient_as_bucket_view"),
        ("hf", {"offload_optimizer": True}, "CPUOffloadOptimizer"),
        ("lightning", {}, "batch_size=4"),
        ("lightning", {"precision": "tf32"}, "set_float32_matmul_precision"),
        ("lightning", {"precision": "pure-bf16"}, "stochastic rounding"),
        ("accelerate", {"expandable_segments": True}, "PYTORCH_ALLOC_CONF"),
        ("deepspeed", {"checkpointing": "blocks"}, "every block"),
        ("hf", {"attention": "sdpa"}, 'set_attn_implementation("sdpa")'),
        ("hf", {"optimizer": "sgd"}, "momentum=0.9"),
        ("slurm", {}, "plan.to_code()"),
    ],
)
def test_what_a_target_cannot_say_is_said_apart(
    target: str, settings: dict[str, Any], said: str
) -> None:
    assert said in " ".join(plan_of(**settings).not_expressed(target))


@pytest.mark.parametrize(
    ("target", "settings"),
    [
        ("hf", {"checkpointing": "every-2", "precision": "bf16", "optimizer": "8-bit"}),
        ("hf", {"sharding": "fsdp", "num_gpus": 2, "checkpointing": "blocks"}),
        ("deepspeed", {"offload_optimizer": True, "precision": "bf16"}),
        ("code", {"checkpointing": "blocks:1", "offload_optimizer": True, "optimizer": "fused"}),
    ],
)
def test_nothing_is_said_apart_where_the_settings_say_it_all(
    target: str, settings: dict[str, Any]
) -> None:
    assert plan_of(**settings).not_expressed(target) == ()


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(UsageError, match="'keras' is not an export target"):
        not_expressed(variant_of(), "keras")
