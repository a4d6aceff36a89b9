"""Planned: a Plan that can be saved, and handed to the tool that trains.

plans.best.to_hf()              # TrainingArguments(**...)
plans.best.not_expressed("hf")  # what TrainingArguments cannot say, and how to do it
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from oomph.errors import UsageError
from oomph.planning.export.accelerate import AccelerateSettings, accelerate_settings
from oomph.planning.export.beyond import not_expressed
from oomph.planning.export.code import as_code
from oomph.planning.export.deepspeed import deepspeed_config
from oomph.planning.export.hugging_face import training_arguments
from oomph.planning.export.jobs import sge_script, slurm_script
from oomph.planning.export.lightning import trainer_arguments
from oomph.planning.export.torchrun import Command, torchrun_command
from oomph.records.checkpointing import check_checkpointing
from oomph.records.contradictions import contradiction_in
from oomph.records.plan import Plan
from oomph.records.stored import as_json, from_json_file, no_record
from oomph.records.workload import OPTIMIZERS, Variant
from oomph.store import write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned(Plan):
    """A Plan with its exports. Every one keeps the batch: micro-batch x accumulation x GPUs."""

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        """The same plan, with its exports."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    def to_hf(self, args: object = None) -> dict[str, Any]:
        """Fields for transformers' TrainingArguments(**...).

        `args` is your own dict or TrainingArguments: what the plan does not decide is kept.
        """
        return training_arguments(self.variant, args)

    def to_lightning(
        self, args: object = None, *, gpus_per_node: int | None = None
    ) -> dict[str, Any]:
        """Arguments for Lightning's Trainer(**...). The loader's batch size is micro_batch."""
        return trainer_arguments(self.variant, args, gpus_per_node=gpus_per_node)

    def to_accelerate(
        self, config: object = None, *, gpus_per_node: int | None = None
    ) -> AccelerateSettings:
        """`.text` for accelerate launch --config_file, `.arguments` for Accelerator(**...)."""
        return accelerate_settings(self.variant, config, gpus_per_node=gpus_per_node)

    def to_deepspeed(self, config: object = None) -> dict[str, Any]:
        """The content of ds_config.json."""
        return deepspeed_config(self.variant, config)

    def to_torchrun(
        self, script: str = "train.py", arguments: Sequence[str] = (), **where: Any
    ) -> Command:
        """The command that starts the planned processes: `.arguments`, `.environment`, `.shell`.

        where: gpus_per_node, endpoint, threads_per_gpu.
        """
        return torchrun_command(self.variant, script, arguments, **where)

    def to_slurm(
        self, script: str = "train.py", arguments: Sequence[str] = (), **request: Any
    ) -> str:
        """A job script for sbatch.

        request: name, time, memory, partition, gpus_per_node, cpus_per_gpu.
        """
        return slurm_script(self.variant, script, arguments, **request)

    def to_sge(
        self, script: str = "train.py", arguments: Sequence[str] = (), **request: Any
    ) -> str:
        """A job script for Grid Engine's qsub.

        request: name, time, memory, queue, gpu_resource, parallel_environment, slots, gpus_counted.
        """
        return sge_script(self.variant, script, arguments, **request)

    def to_code(self) -> str:
        """A plain PyTorch training loop that does exactly this plan, without oomph."""
        return as_code(self)

    def not_expressed(self, target: str) -> tuple[str, ...]:
        """What the export to "hf", "lightning", "accelerate"... cannot say, and how to do it."""
        return not_expressed(self.variant, target)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes plan.json, whole or not at all. See docs/plan-format.md."""
        write_whole(path, as_json(self) + "\n")


def load_plan(path: str | os.PathLike[str]) -> Planned:
    """The plan that `save` or `oomph plan -o` wrote. Raises Unreadable."""
    plan = from_json_file(Planned, path, what="plan")
    try:
        check_variant(plan.variant)
    except UsageError as error:
        raise no_record("plan", path, error.in_one_line()) from None
    return plan


def check_variant(variant: Variant) -> None:
    """Raises UsageError for a way to train that nobody could have planned."""
    check_checkpointing(variant.checkpointing)
    if variant.optimizer not in OPTIMIZERS:
        raise UsageError(f"{variant.optimizer!r:.60} is no way to optimize")
    if min(variant.micro_batch, variant.accumulation, variant.num_gpus) < 1:
        raise UsageError("a micro-batch, a number of times and a number of GPUs are at least 1")
    if error := contradiction_in(variant, clips_gradients=False):
        raise error
