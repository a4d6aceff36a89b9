"""The footprints of some ways to train -> memory and time of every combination of them.

Forward and backward are rehearsed in each way that changes them; the optimizers' steps once each.
A variant is one of the first, one of the second, a micro-batch, with or without accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.device import SimulatedDevice
from oomph.predicting.footprint import Footprint
from oomph.predicting.footprint_changes import with_step_of, without_accumulation
from oomph.predicting.replay import Replayed, replay
from oomph.predicting.step_parts import StepParts, parts_of
from oomph.predicting.step_times import StepTimes
from oomph.records.catalog import GpuModel
from oomph.records.workload import Variant


class Family(NamedTuple):
    """What decides the forward and the backward of a variant."""

    precision: str  # tf32 takes the memory of fp32
    checkpointing: str
    attention: str
    loss: str
    adapters: str
    offload_activations: bool
    in_backward: bool
    sharding: str
    num_gpus: int
    is_one: bool  # micro-batches of one example have a structure of their own
    # On several GPUs gradients are sent after the last micro-step: one alone is rehearsed itself.
    is_sent_at_once: bool

    @property
    def accumulates(self) -> bool:
        """Whether it was rehearsed with two micro-steps."""
        return not self.in_backward and not self.is_sent_at_once


class Step(NamedTuple):
    """What decides the optimizer's step of a variant."""

    precision: str
    adapters: str
    optimizer: str
    offload_optimizer: bool
    sharding: str
    num_gpus: int


def family_of(variant: Variant) -> Family:
    return Family(
        precision="fp32" if variant.precision == "tf32" else variant.precision,
        checkpointing=variant.checkpointing,
        attention=variant.attention,
        loss=variant.loss,
        adapters=variant.adapters,
        offload_activations=variant.offload_activations,
        in_backward=variant.optimizer_in_backward,
        sharding=variant.sharding,
        num_gpus=variant.num_gpus,
        is_one=variant.micro_batch == 1,
        is_sent_at_once=variant.num_gpus > 1 and variant.accumulation == 1,
    )


def step_of(variant: Variant) -> Step:
    """fp16 has a loss scaler in its step; the other kinds of autocast have the step of fp32."""
    precision = variant.precision if variant.precision in ("fp16", "pure-bf16") else "fp32"
    return Step(
        precision=precision,
        adapters=variant.adapters,
        optimizer=variant.optimizer,
        offload_optimizer=variant.offload_optimizer,
        sharding=variant.sharding,
        num_gpus=variant.num_gpus,
    )


@dataclass(eq=False, kw_only=True)
class Ways:
    """Answers for any variant of which family and step were rehearsed."""

    families: Mapping[Family, Footprint]
    steps: Mapping[Step, Footprint]
    model: GpuModel
    known_replays: MutableMapping[str, int] = field(default_factory=dict)  # reserved bytes
    _whole: dict[tuple[Family, Step, bool], Footprint] = field(default_factory=dict)
    _parts: dict[tuple[Family, bool], StepParts] = field(default_factory=dict)
    _step_parts: dict[Step, StepParts] = field(default_factory=dict)
    _least: dict[tuple[Family, Step, bool, int], int] = field(default_factory=dict)
    _seconds: dict[tuple[Family, Step, str, int, int], float | None] = field(default_factory=dict)
    _times: dict[tuple[Family, Step, bool, str], StepTimes] = field(default_factory=dict)
    _steps_alone: dict[Step, float | None] = field(default_factory=dict)

    def knows(self, variant: Variant) -> bool:
        """Whether all that it is made of was rehearsed."""
        family = family_of(variant)
        return family in self.families and (family.in_backward or step_of(variant) in self.steps)

    def footprint(self, variant: Variant) -> Footprint:
        family, step, is_single = family_of(variant), step_of(variant), variant.accumulation == 1
        key = family, step, is_single
        if key not in self._whole:
            self._whole[key] = self._made(family, step, is_single)
        return self._whole[key]

    def _made(self, family: Family, step: Step, is_single: bool) -> Footprint:
        found = self.families[family]
        if not family.in_backward:
            found = with_step_of(found, self.steps[step])
        return without_accumulation(found) if is_single and family.accumulates else found

    def least_bytes(self, variant: Variant) -> int:
        """Of torch's memory: the most that is live at a time, without replaying anything."""
        family, step, is_single = family_of(variant), step_of(variant), variant.accumulation == 1
        key = family, step, is_single, variant.micro_batch
        if key not in self._least:
            self._least[key] = self._found_least(family, step, is_single, variant)
        return self._least[key]

    def _found_least(self, family: Family, step: Step, is_single: bool, variant: Variant) -> int:
        if family.in_backward:
            return self.families[family].live_bytes(variant.micro_batch)
        if (family, is_single) not in self._parts:
            found = self.families[family]
            self._parts[family, is_single] = parts_of(
                without_accumulation(found) if is_single and family.accumulates else found
            )
        if step not in self._step_parts:
            self._step_parts[step] = parts_of(self.steps[step])
        return self._parts[family, is_single].peak_with(self._step_parts[step], variant.micro_batch)

    def host_bytes(self, variant: Variant) -> int:
        """Of the host's memory, for what left the GPU."""
        family, step = self.families[family_of(variant)], self.steps.get(step_of(variant))
        lines = [family.host_bytes, *([step.host_bytes] if step is not None else [])]
        return sum(fixed + grown * variant.micro_batch for fixed, grown in lines)

    def seconds(self, variant: Variant) -> float | None:
        """Of one optimizer step."""
        family, step = family_of(variant), step_of(variant)
        key = family, step, variant.precision, variant.micro_batch, variant.accumulation
        if key not in self._seconds:
            self._seconds[key] = self._found_seconds(variant, family, step)
        return self._seconds[key]

    def _found_seconds(self, variant: Variant, family: Family, step: Step) -> float | None:
        times = self._times_of(variant, family, step)
        if not times.has_other_clocks or step.optimizer == "as-is" or family.in_backward:
            return times.seconds(variant.micro_batch, variant.accumulation)
        # Where the bus or a link has a clock of its own a step is wound op by op, which is slow:
        # the optimizers' steps, which come after all of that, are told apart by their own times.
        plain = replace(variant, optimizer="as-is")
        whole, mine, theirs = self.seconds(plain), self._alone(step), self._alone(step_of(plain))
        if whole is None or mine is None or theirs is None:
            return None
        return whole + mine - theirs

    def _alone(self, step: Step) -> float | None:
        """The seconds of an optimizer's step by itself."""
        if step not in self._steps_alone:
            self._steps_alone[step] = StepTimes(self.steps[step], self.model).seconds(2, 1)
        return self._steps_alone[step]

    def _times_of(self, variant: Variant, family: Family, step: Step) -> StepTimes:
        which = family, step, variant.accumulation == 1, variant.precision
        if which not in self._times:
            self._times[which] = StepTimes(
                self.footprint(variant),
                self.model,
                "tf32" if variant.precision == "tf32" else "fp32",
                variant.num_gpus,
            )
        return self._times[which]

    def reserved_bytes(self, variant: Variant) -> int:
        """What torch's allocator reserves on a GPU that has no end."""
        key = repr((*family_of(variant), *step_of(variant), *_rest_of(variant)))
        if key not in self.known_replays:
            self.known_replays[key] = self.replayed(variant, None).peak_reserved_bytes
        return self.known_replays[key]

    def replayed(self, variant: Variant, limit_bytes: int | None) -> Replayed:
        """A replay on a device of so many bytes."""
        device = SimulatedDevice() if limit_bytes is None else SimulatedDevice(max(limit_bytes, 0))
        settings = AllocatorSettings(expandable_segments=variant.expandable_segments)
        sizes, events, streams = self.footprint(variant).requests(variant.micro_batch)
        return replay(CachingAllocator(settings, device), sizes, events, streams)


def _rest_of(variant: Variant) -> tuple[int, bool, bool]:
    return variant.micro_batch, variant.accumulation == 1, variant.expandable_segments
