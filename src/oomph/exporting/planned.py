"""Planned: a Plan that can be saved and exported to training tools.

plans.best.to_hf()              # TrainingArguments(**...)
plans.best.not_expressed("hf")  # what TrainingArguments cannot express, and how to do it
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from oomph.errors import UsageError
from oomph.exporting.code import as_code
from oomph.exporting.settings import (
    AccelerateSettings,
    accelerate_settings,
    deepspeed_config,
    not_expressed,
    trainer_arguments,
    training_arguments,
)
from oomph.launching.grid_engine import sge_script
from oomph.launching.slurm import slurm_script
from oomph.launching.torchrun import MEETING, Command, spread, torchrun_command
from oomph.records.plan import Plan
from oomph.records.stored import as_json, from_json_file, no_record
from oomph.records.workload import OPTIMIZERS, Variant, check_checkpointing, check_sharding
from oomph.store import write_whole
from oomph.tricks.trick import contradiction_in


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Planned(Plan):
    """A Plan with its exports. Each keeps the batch size: micro-batch x accumulation x GPUs."""

    @classmethod
    def of(cls, plan: Plan) -> Planned:
        """Return the same plan, with its exports."""
        return cls(**{field.name: getattr(plan, field.name) for field in fields(plan)})

    def to_hf(self, args: object = None) -> dict[str, Any]:
        """Return fields for transformers' TrainingArguments(**...).

        `args` is your own dict or TrainingArguments: settings that the plan does not decide are
        kept.
        """
        return training_arguments(self.variant, args)

    def to_lightning(
        self, args: object = None, *, gpus_per_node: int | None = None
    ) -> dict[str, Any]:
        """Return arguments for Lightning's Trainer(**...).

        Set the loader's batch size to micro_batch yourself.
        """
        return trainer_arguments(self.variant, args, gpus_per_node=gpus_per_node)

    def to_accelerate(
        self, config: object = None, *, gpus_per_node: int | None = None
    ) -> AccelerateSettings:
        """Return settings for accelerate.

        Use `.text` with accelerate launch --config_file, `.arguments` with Accelerator(**...).
        """
        return accelerate_settings(self.variant, config, gpus_per_node=gpus_per_node)

    def to_deepspeed(self, config: object = None) -> dict[str, Any]:
        """Return the content of ds_config.json."""
        return deepspeed_config(self.variant, config)

    def to_torchrun(
        self, script: str = "train.py", arguments: Sequence[str] = (), **where: Any
    ) -> Command:
        """Return the command that starts the processes: `.arguments`, `.environment`, `.shell`.

        where: gpus_per_node, endpoint, threads_per_gpu.
        """
        return torchrun_command(self.variant, script, arguments, **where)

    def to_slurm(
        self, script: str = "train.py", arguments: Sequence[str] = (), **request: Any
    ) -> str:
        """Return a job script for sbatch.

        request: name, time, memory, partition, gpus_per_node, cpus_per_gpu.
        """
        return slurm_script(self.variant, script, arguments, **request)

    def to_sge(
        self, script: str = "train.py", arguments: Sequence[str] = (), **request: Any
    ) -> str:
        """Return a job script for Grid Engine's qsub.

        request: name, time, memory, queue, gpu_resource, parallel_environment, slots, gpus_counted.
        """
        return sge_script(self.variant, script, arguments, **request)

    def to_code(self) -> str:
        """Return a plain PyTorch training loop that follows this plan exactly, without oomph."""
        return as_code(self)

    def exported(self, target: str, script: str, arguments: Sequence[str] = ()) -> str:
        """Return an export as text: what to write to a file, or JSON of what the methods return.

        What the target cannot express follows as comments, after JSON as a key of that name.
        """
        if target == "code":
            return self.to_code()
        left = self.not_expressed(target)
        if target in ("torchrun", "slurm", "sge"):
            texts = {
                "torchrun": lambda: self._torchrun_text(script, arguments),
                "slurm": lambda: self.to_slurm(script, arguments),
                "sge": lambda: self.to_sge(script, arguments),
            }
            text = texts[target]().rstrip("\n")
            return "\n".join([text, *(f"# by hand: {line}" for line in left)])
        settings: dict[str, Any]
        if target == "accelerate":
            made_for = self.to_accelerate()
            settings = {"config": made_for.config, "Accelerator": made_for.arguments}
        else:
            methods = {"hf": self.to_hf, "lightning": self.to_lightning}
            settings = {**methods.get(target, self.to_deepspeed)()}
        if left:
            settings["not_expressed"] = list(left)
        return json.dumps(settings, indent=2, ensure_ascii=False, default=str)

    def _torchrun_text(self, script: str, arguments: Sequence[str]) -> str:
        """Return the command; for several machines, with what the user must fill in."""
        nodes = spread(self.variant)
        if nodes.num_nodes == 1:
            return self.to_torchrun(script, arguments).shell
        command = self.to_torchrun(script, arguments, endpoint=MEETING).shell
        todo = f"start it on each of the {nodes.num_nodes} machines, with the name of one of them"
        return f"{command}\n# by hand: {todo} for FIRST-HOST"

    def not_expressed(self, target: str) -> tuple[str, ...]:
        """Return what the export to a target cannot express, and how to do it.

        Targets are "hf", "lightning", "accelerate", ...
        """
        return not_expressed(self.variant, target)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write plan.json atomically. See docs/plan-format.md."""
        write_whole(path, as_json(self) + "\n")


def load_plan(path: str | os.PathLike[str]) -> Planned:
    """Load the plan that `save` or `oomph plan -o` wrote. Raises Unreadable."""
    plan = from_json_file(Planned, path, what="plan")
    try:
        check_variant(plan.variant)
    except UsageError as error:
        raise no_record("plan", path, error.in_one_line()) from None
    return plan


def check_variant(variant: Variant) -> None:
    """Raise UsageError for a variant that no plan can contain."""
    check_checkpointing(variant.checkpointing)
    if variant.optimizer not in OPTIMIZERS:
        raise UsageError(f"{variant.optimizer!r:.60} is not an optimizer that oomph knows")
    counts = variant.micro_batch, variant.accumulation, variant.num_gpus, variant.gpus_per_node
    if min(*counts, variant.tensor_parallel) < 1:
        raise UsageError("micro-batch, accumulation and numbers of GPUs must be at least 1")
    grid = variant.num_gpus, variant.gpus_per_node, variant.tensor_parallel
    check_sharding(variant.sharding, *grid)
    if error := contradiction_in(variant, clips_gradients=False):
        raise error
