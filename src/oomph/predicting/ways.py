"""The footprints of some ways to train -> memory and time of every combination of them.

Forward and backward are rehearsed in each way that changes them; the optimizers' steps once each.
A variant is one of the first, one of the second, a micro-batch, with or without accumulation.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.footprint import Footprint
from oomph.predicting.footprint_changes import (
    with_step_of,
    without_accumulation,
    without_gradients,
    without_workspaces,
    workspaces,
)
from oomph.predicting.footprint_replays import FootprintReplays
from oomph.predicting.rates import MatmulPrecision
from oomph.predicting.replay import Replayed
from oomph.predicting.step_parts import StepParts, parts_of
from oomph.predicting.step_times import (
    MicroSteps,
    OptimizerStep,
    PricedFootprint,
    Prices,
    StepTimes,
)
from oomph.records.catalog import GpuModel
from oomph.records.workload import Variant

_NEAR_RATIO = 1 / 64  # of examples: near enough


class Family(NamedTuple):
    """What decides the forward and the backward of a variant."""

    precision: str  # tf32 takes the memory of fp32
    checkpointing: str
    attention: str
    loss: str
    adapters: str
    offload_activations: bool
    in_backward: str  # the optimizer that steps in backward; empty: it steps after it
    sharding: str
    num_gpus: int
    # The one micro-batch that it speaks for; 0: every one from 2 on. A single example has a
    # structure of its own, and what is worth offloading depends on its size.
    only_at: int
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
    is_alone = variant.micro_batch == 1 or variant.offload_activations
    return Family(
        precision="fp32" if variant.precision == "tf32" else variant.precision,
        checkpointing=variant.checkpointing,
        attention=variant.attention,
        loss=variant.loss,
        adapters=variant.adapters,
        offload_activations=variant.offload_activations,
        in_backward=variant.optimizer if variant.optimizer_in_backward else "",
        sharding=variant.sharding,
        num_gpus=variant.num_gpus,
        only_at=variant.micro_batch if is_alone else 0,
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
    # False: a family that accumulates was rehearsed without, because a step goes backward several
    # times by itself, or has several optimizers by turns.
    adds_up: bool = True
    # Of replays: the bytes reserved without a limit, and whether it passed (1) under one.
    known_replays: MutableMapping[str, int] = field(default_factory=dict)
    _whole: dict[tuple[Family, Step, bool], Footprint] = field(default_factory=dict)
    _parts: dict[tuple[Family, bool], StepParts] = field(default_factory=dict)
    _steps_after: dict[tuple[Step, tuple[tuple[int, int], ...]], Footprint] = field(
        default_factory=dict
    )
    _step_parts: dict[int, StepParts] = field(default_factory=dict)  # by the step's footprint
    _parts_without_gradients: dict[Family, StepParts] = field(default_factory=dict)
    _least: dict[tuple[Family, Step, bool, int], int] = field(default_factory=dict)
    _seconds: dict[tuple[Family, Step, str, int, int], float | None] = field(default_factory=dict)
    _known_prices: dict[tuple[MatmulPrecision, int], Prices] = field(default_factory=dict)
    _micro_steps: dict[tuple[Family, MatmulPrecision, bool], MicroSteps] = field(
        default_factory=dict
    )
    _optimizer_steps: dict[tuple[Step, MatmulPrecision], OptimizerStep] = field(
        default_factory=dict
    )

    def knows(self, variant: Variant) -> bool:
        """Whether all that it is made of was rehearsed."""
        family = family_of(variant)
        is_whole = bool(family.in_backward) or step_of(variant) in self.steps
        return family in self.families and is_whole

    def footprint(self, variant: Variant) -> Footprint:
        family, step, is_single = family_of(variant), step_of(variant), variant.accumulation == 1
        key = family, step, is_single
        if key not in self._whole:
            self._whole[key] = self._made(family, step, is_single)
        return self._whole[key]

    def _made(self, family: Family, step: Step, is_single: bool) -> Footprint:
        found = self.families[family]
        if not self._has_step(family, step):
            found = with_step_of(found, self._step_after(family, step))
        return self._of_one(found) if is_single and family.accumulates else found

    def _has_step(self, family: Family, step: Step) -> bool:
        """Whether the optimizer's step is the family's own: steps by turns cannot be exchanged."""
        is_as_given = step.optimizer == "as-is" and not step.offload_optimizer
        return bool(family.in_backward) or (is_as_given and not self.adds_up)

    def _of_one(self, found: Footprint) -> Footprint:
        """With one micro-step in a step."""
        return without_accumulation(found) if self.adds_up else found

    def least_bytes(self, variant: Variant) -> int:
        """Of torch's memory: the most that is live at a time, without replaying anything."""
        family, step, is_single = family_of(variant), step_of(variant), variant.accumulation == 1
        key = family, step, is_single, variant.micro_batch
        if key not in self._least:
            self._least[key] = self._found_least(family, step, is_single, variant)
        return self._least[key]

    def _found_least(self, family: Family, step: Step, is_single: bool, variant: Variant) -> int:
        if self._has_step(family, step):
            return self.footprint(variant).live_bytes(variant.micro_batch)
        if (family, is_single) not in self._parts:
            found = self.families[family]
            self._parts[family, is_single] = parts_of(
                self._of_one(found) if is_single and family.accumulates else found
            )
        parts = self._step_parts_after(family, step)
        return self._parts[family, is_single].peak_with(parts, variant.micro_batch)

    def _step_parts_after(self, family: Family, step: Step) -> StepParts:
        stepped = self._step_after(family, step)
        if id(stepped) not in self._step_parts:
            self._step_parts[id(stepped)] = parts_of(stepped)
        return self._step_parts[id(stepped)]

    def least_in_backward_bytes(self, variant: Variant) -> int:
        """The same, never more than the truth, with the optimizer of this variant in backward.

        All gradients are gone, and all that a step takes beside its state: no step in backward
        takes less than what is left of one after it.
        """
        family, step = family_of(variant), step_of(variant)
        if family not in self._parts_without_gradients:
            found = self.families[family]
            found = self._of_one(found) if family.accumulates else found
            self._parts_without_gradients[family] = parts_of(without_gradients(found))
        return self._parts_without_gradients[family].least_with_state_of(
            self._step_parts_after(family, step), variant.micro_batch
        )

    def _step_after(self, family: Family, step: Step) -> Footprint:
        """The optimizer's step as it is after a forward and backward."""
        key = step, tuple(sorted(workspaces(self.families[family])))
        if key not in self._steps_after:
            self._steps_after[key] = without_workspaces(self.steps[step], key[1])
        return self._steps_after[key]

    def host_bytes(self, variant: Variant) -> int:
        """Of the host's memory, for what left the GPU."""
        family, step = self.families[family_of(variant)], self.steps.get(step_of(variant))
        parts = [family] if step is None else [family, step]
        return sum(part.host_bytes_at(variant.micro_batch) for part in parts)

    def seconds(self, variant: Variant) -> float | None:
        """Of one optimizer step."""
        family, step = family_of(variant), step_of(variant)
        key = family, step, variant.precision, variant.micro_batch, variant.accumulation
        if key not in self._seconds:
            matmul: MatmulPrecision = "tf32" if variant.precision == "tf32" else "fp32"
            has_step = self._has_step(family, step)
            self._seconds[key] = StepTimes(
                self._micro_steps_of(family, matmul, has_step=has_step),
                None if has_step else self._optimizer_step_of(step, matmul),
            ).seconds(variant.micro_batch, variant.accumulation)
        return self._seconds[key]

    def _micro_steps_of(
        self, family: Family, matmul: MatmulPrecision, *, has_step: bool
    ) -> MicroSteps:
        key = family, matmul, has_step
        if key not in self._micro_steps:
            priced = PricedFootprint(self.families[family], self._prices(matmul, family.num_gpus))
            self._micro_steps[key] = MicroSteps(priced, has_step=has_step, is_one=not self.adds_up)
        return self._micro_steps[key]

    def _optimizer_step_of(self, step: Step, matmul: MatmulPrecision) -> OptimizerStep:
        key = step, matmul
        if key not in self._optimizer_steps:
            priced = PricedFootprint(self.steps[step], self._prices(matmul, step.num_gpus))
            self._optimizer_steps[key] = OptimizerStep(priced)
        return self._optimizer_steps[key]

    def _prices(self, matmul: MatmulPrecision, num_gpus: int) -> Prices:
        key = matmul, num_gpus
        if key not in self._known_prices:
            self._known_prices[key] = Prices(self.model, matmul, num_gpus)
        return self._known_prices[key]

    def reserved_bytes(self, variant: Variant) -> int:
        """What torch's allocator reserves on a GPU that has no end."""
        key = key_of(variant)
        if key not in self.known_replays:
            self.known_replays[key] = self.replayed(variant, None).peak_reserved_bytes
        return self.known_replays[key]

    def reserved_bytes_within(self, variant: Variant, limit_bytes: int) -> int:
        """The same on a device of so many bytes, where it gives back what it has cached.

        Where it does not fit, what it would reserve without a limit.
        """
        reserved = self.reserved_bytes(variant)
        if reserved <= limit_bytes or self.least_bytes(variant) > limit_bytes:
            return reserved
        key = f"{key_of(variant)} within {limit_bytes}"
        if key not in self.known_replays:
            found = self.replayed(variant, limit_bytes)
            self.known_replays[key] = (
                found.peak_reserved_bytes if found.ran_out_at is None else reserved
            )
        return self.known_replays[key]

    def passes_with_outputs(self, variant: Variant, limit_bytes: int) -> bool:
        """As `passes`, where the loop keeps what the model returned until the next step."""
        key = f"{key_of(variant)} with outputs"
        replays = self._replays(variant)
        if key not in self.known_replays:
            self.known_replays[key] = replays.under_with_outputs(None).peak_reserved_bytes
        if self.known_replays[key] <= limit_bytes:
            return True
        key += f" in {limit_bytes}"
        if key not in self.known_replays:
            found = replays.under_with_outputs(limit_bytes)
            self.known_replays[key] = found.ran_out_at is None
        return bool(self.known_replays[key])

    def passes(self, variant: Variant, limit_bytes: int) -> bool:
        """Whether it runs on a device of so many bytes, where a cache is given back if need be."""
        if self.least_bytes(variant) > limit_bytes:
            return False
        if self.reserved_bytes(variant) <= limit_bytes:
            return True
        return self._passes_with(variant.micro_batch, variant, limit_bytes)

    def boundary(
        self, variant: Variant, limit_bytes: int, known: float, num_replays: int
    ) -> tuple[float, float]:
        """How many fit at a time (`known` do) and how many do not; nearer, the more is replayed.

        Half of an example is one that is half as long, as far as what grows with the length goes.
        """
        least = known
        beyond = self.footprint(variant).examples_within(limit_bytes)
        if not num_replays:
            return least, beyond
        # The first guess: that as much is reserved beside what lives, and a little more.
        beside_ratio = self.least_bytes(variant) / max(self.reserved_bytes(variant), 1)
        likely_bytes = int(limit_bytes * beside_ratio / (1 + _NEAR_RATIO))
        likely = self.footprint(variant).examples_within(likely_bytes)
        next_one = likely if likely > least else (least + beyond) / 2
        for _ in range(num_replays):
            if beyond - least <= _NEAR_RATIO * least or not isfinite(beyond):
                break
            if self._passes_with(next_one, variant, limit_bytes):
                least = next_one
            else:
                beyond = next_one
            next_one = (least + beyond) / 2
        return least, beyond

    def _passes_with(self, examples: float, variant: Variant, limit_bytes: int) -> bool:
        """The same by a replay of so many examples at a time."""
        key = f"{key_of(variant)} with {examples:.4f} in {limit_bytes}"
        if key not in self.known_replays:
            found = self.replayed(variant, limit_bytes, examples)
            self.known_replays[key] = found.ran_out_at is None
        return bool(self.known_replays[key])

    def replayed(
        self, variant: Variant, limit_bytes: int | None, examples: float | None = None
    ) -> Replayed:
        """A replay on a device of so many bytes, with another number of examples if told."""
        return self._replays(variant, examples).under(limit_bytes)

    def _replays(self, variant: Variant, examples: float | None = None) -> FootprintReplays:
        settings = AllocatorSettings(expandable_segments=variant.expandable_segments)
        size = variant.micro_batch if examples is None else examples
        return FootprintReplays(self.footprint(variant), size, settings)


def key_of(variant: Variant) -> str:
    """Of all that decides its requests."""
    rest = variant.micro_batch, variant.accumulation == 1, variant.expandable_segments
    return repr((*family_of(variant), *step_of(variant), *rest))
