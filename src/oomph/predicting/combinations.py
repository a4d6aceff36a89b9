"""The footprints of some variants -> memory and time of every combination of their parts.

Variants with the same forward and backward share one rehearsal, and so do those with the same
optimizer step. A variant combines the two at a micro-batch, with or without accumulation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

from oomph.predicting.allocator_settings import settings_for
from oomph.predicting.footprint import (
    CATEGORIES,
    OF_ALLOCATIONS,
    OF_EVENTS,
    PHASES,
    Footprint,
)
from oomph.predicting.links import Links, links_of
from oomph.predicting.pricing import Prices
from oomph.predicting.rates import MatmulPrecision
from oomph.predicting.reductions import NONE, Multiprocessors
from oomph.predicting.replay import replay_requests
from oomph.predicting.speed import (
    LIKELY,
    SHARED,
    MicroSteps,
    Pace,
    PricedFootprint,
    prices_on,
    second_micro_step,
    step_seconds,
)
from oomph.records.gpu_model import GpuModel
from oomph.records.workload import GPUS_PER_NODE, Variant, holds_parameters_on_host

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]
    Flags = NDArray[np.bool_]


# ---- one footprint -> another variant's, without a rehearsal -------------------------------------
# Without accumulation the second micro-step is left out. With another optimizer only its step is
# exchanged: it sees parameters and gradients, and not how they were computed.

_WORKSPACE = CATEGORIES.index("workspace")
_GRADIENTS = CATEGORIES.index("gradients")
_SECOND = 2


class NotSpliceable(Exception):
    """The optimizer's step cannot be separated, or it sees other parameters."""


# ---- accumulation --------------------------------------------------------------------------------


def without_accumulation(footprint: Footprint) -> Footprint:
    """Return the footprint with a single micro-step per step.

    The loss and the batch of the first micro-step then live until the next step replaces them, as
    those of the second micro-step did.
    """
    import numpy as np

    event = footprint.event.copy()
    in_second = footprint.micro_step == _SECOND
    for step in (1, 2):
        of_step = in_second & (footprint.step == step)
        for left, replaced in _heirs(footprint, event, of_step):
            event[event == -(left + 1)] = -(replaced + 1)
    kept = ~in_second
    cut = replace(footprint, event=np.where(kept, event, 0)).keeping(kept)
    second = second_micro_step([kernel.phase for kernel in footprint.kernels], footprint.op)
    return replace(cut, op=np.delete(footprint.op, slice(second.start, second.stop)))


def _heirs(footprint: Footprint, event: Numbers, of_step: Flags) -> list[tuple[int, int]]:
    """Return what the second micro-step leaves behind, paired with what it replaced."""
    born = set((event[of_step & (event > 0)] - 1).tolist())
    died = set((-event[of_step & (event < 0)] - 1).tolist())
    left, replaced = sorted(born - died), sorted(died - born)
    pairs = []
    for one in left:
        alike = next((two for two in replaced if _is_alike(footprint, one, two)), None)
        if alike is not None:
            replaced.remove(alike)
            pairs.append((one, alike))
    return pairs


def _is_alike(footprint: Footprint, one: int, two: int) -> bool:
    return all(
        getattr(footprint, name)[one] == getattr(footprint, name)[two]
        for name in ("fixed_bytes", "grown_bytes", "born")
    )


# ---- the optimizer -------------------------------------------------------------------------------


def with_step_of(footprint: Footprint, other: Footprint) -> Footprint:
    """Return one footprint's forward and backward with another's optimizer step.

    Raises NotSpliceable.
    """
    import numpy as np

    if not _are_built_alike(footprint, other):
        raise NotSpliceable("the two train other parameters")
    rest, added = footprint.keeping(~_is_of_step(footprint)), other.keeping(_is_of_step(other))
    if (added.phase != _STEP).any():
        raise NotSpliceable("something that the optimizer's step makes is freed after it")
    # Allocations, names and kernels of the other's step are numbered after the footprint's own.
    numbered = added.event + np.sign(added.event) * len(rest.fixed_bytes)
    num_names, num_kernels = len(rest.names), len(footprint.kernels)
    added = replace(
        added,
        label=added.label + num_names,
        module=added.module + num_names,
        reduction=np.where(added.reduction, added.reduction + len(rest.reductions), 0),
    )
    ops = footprint.op[~footprint.is_op_of_step], other.op[other.is_op_of_step] + num_kernels
    return Footprint(
        **{
            name: np.concatenate([getattr(rest, name), getattr(added, name)])
            for name in OF_ALLOCATIONS
        },
        event=_interleaved(rest, added, rest.event, numbered),
        **{
            name: _interleaved(rest, added, getattr(rest, name), getattr(added, name))
            for name in OF_EVENTS
        },
        kernels=(*footprint.kernels, *other.kernels),
        op=np.concatenate(ops),
        names=(*rest.names, *added.names),
        reductions=(*rest.reductions, *added.reductions),
        host_bytes=(
            rest.host_bytes[0] + added.host_bytes[0],
            rest.host_bytes[1] + added.host_bytes[1],
        ),
    )


def without_gradients(footprint: Footprint) -> Footprint:
    """Return the footprint without the gradients of parameters."""
    import numpy as np

    return footprint.keeping(footprint.category[np.abs(footprint.event) - 1] != _GRADIENTS)


def workspaces(footprint: Footprint) -> set[tuple[int, int]]:
    """Return bytes and streams of the workspaces that libraries take once and never release."""
    places = (footprint.category == _WORKSPACE).nonzero()[0]
    sizes, streams = footprint.fixed_bytes[places].tolist(), footprint.stream[places].tolist()
    return set(zip(sizes, streams, strict=True))


def without_workspaces(footprint: Footprint, known: Iterable[tuple[int, int]]) -> Footprint:
    """Return the footprint without the workspaces that are already there.

    An optimizer that multiplies matrices (Adafactor) takes cuBLAS's workspace only if the forward
    has not.
    """
    import numpy as np

    columns = zip(footprint.fixed_bytes.tolist(), footprint.stream.tolist(), strict=True)
    have = set(known)
    is_there = np.array([each in have for each in columns], dtype=bool)
    is_there &= footprint.category == _WORKSPACE
    return footprint.keeping(~is_there[np.abs(footprint.event) - 1])


def _interleaved(rest: Footprint, added: Footprint, mine: Numbers, theirs: Numbers) -> Numbers:
    """Return one column with the other's inserted at the end of each training step."""
    import numpy as np

    first = int(np.searchsorted(rest.step, 1, side="right"))
    return np.concatenate(
        [mine[:first], theirs[added.step == 1], mine[first:], theirs[added.step == _SECOND]]
    )


def _are_built_alike(footprint: Footprint, other: Footprint) -> bool:
    """Return whether both hold the same memory before training, as one model would.

    For data that a script loads and that grows with the batch, the other footprint knows only one
    size.
    """
    mine, theirs = _built(footprint), _built(other)
    return len(mine) == len(theirs) and all(
        grown or fixed == its for (fixed, grown), (its, _) in zip(mine, theirs, strict=True)
    )


def _built(footprint: Footprint) -> list[tuple[int, int]]:
    """Return the sizes that the program takes before training, and how they grow.

    Workspaces of libraries do not count: a step that shares one with the forward is without it.
    """
    built = footprint.event[(footprint.step == 0) & (footprint.event > 0)] - 1
    built = built[footprint.category[built] != _WORKSPACE]
    sizes = footprint.fixed_bytes[built].tolist(), footprint.grown_bytes[built].tolist()
    return list(zip(*sizes, strict=True))


def _is_of_step(footprint: Footprint) -> Flags:
    """Return which events belong to allocations that the optimizer's step requests."""
    import numpy as np

    found: Flags = footprint.born[np.abs(footprint.event) - 1] == _STEP
    return found


# ---- the peak before the optimizer's step and during it ------------------------------------------
# With these two parts the peak with another optimizer is a sum: its state is there during all of
# forward and backward, and the memory of its step comes on top of what they leave.

_STEP = PHASES.index("step")


@dataclass(frozen=True, eq=False)
class Line:
    """Live bytes at some events: fixed + grown x micro-batch."""

    fixed: Numbers
    grown: Numbers

    def most(self, micro_batch: int) -> int:
        return int((self.fixed + self.grown * micro_batch).max(initial=0))


class StepPart(NamedTuple):
    """One training step: live bytes without the optimizer's own, and what the optimizer adds."""

    rest: Line  # outside of the optimizer's step
    before: Line  # at its start
    state_bytes: int  # the optimizer's, during forward and backward
    step_bytes: int  # the most that the optimizer's step adds to `before`


def parts_of(footprint: Footprint) -> tuple[StepPart, StepPart]:
    """Split a footprint of two training steps into its parts."""
    import numpy as np

    places = np.abs(footprint.event) - 1
    signs = np.sign(footprint.event)
    is_steps = footprint.born[places] == _STEP
    fixed, grown = (
        np.cumsum(np.where(is_steps, 0, column[places] * signs))
        for column in (footprint.fixed_bytes, footprint.grown_bytes)
    )
    of_step = np.cumsum(np.where(is_steps, footprint.fixed_bytes[places] * signs, 0))

    def part(inside: Flags) -> StepPart:
        outside = inside & (footprint.phase != _STEP)
        last = np.flatnonzero(outside)[-1:]
        return StepPart(
            rest=Line(fixed[outside], grown[outside]),
            before=Line(fixed[last], grown[last]),
            state_bytes=int(of_step[outside].max(initial=0)),
            step_bytes=int(of_step[inside & (footprint.phase == _STEP)].max(initial=0)),
        )

    return part(footprint.step <= 1), part(footprint.step == _SECOND)


def peak_bytes(passes: Iterable[StepPart], optimizer: Iterable[StepPart], micro_batch: int) -> int:
    """Return the peak of live bytes of forward and backward with another's optimizer."""
    return max(
        max(
            part.rest.most(micro_batch) + other.state_bytes,
            part.before.most(micro_batch) + other.step_bytes,
        )
        for part, other in zip(passes, optimizer, strict=True)
    )


_NEAR_RATIO = 1 / 64  # of the examples that fit: as near as a boundary is searched; judgement


class PassSettings(NamedTuple):
    """The settings that decide forward and backward. Variants that agree on them share both."""

    precision: str  # tf32 needs as much memory as fp32
    checkpointing: str
    attention: str
    loss: str
    adapters: str  # with their rank and targets
    offload_activations: bool
    in_backward: str  # the optimizer that steps in backward; empty if it steps after it
    # The optimizer on the host, if that changes the passes, too: ZeRO-Offload's weights have 16
    # bits, and FSDP's are on the host.
    on_host: str
    sharding: str
    num_gpus: int
    # The only micro-batch it is valid for; 0: all from 2 on. A single example has a structure of
    # its own, and what is worth offloading depends on the size.
    only_at: int
    channels_last: bool
    # On several GPUs gradients are sent after the last micro-step, so a single micro-step is
    # rehearsed separately.
    is_sent_at_once: bool
    gpus_per_node: int = GPUS_PER_NODE
    tensor_parallel: int = 1

    @property
    def accumulates(self) -> bool:
        """Return whether it was rehearsed with two micro-steps."""
        return not self.in_backward and not self.is_sent_at_once

    @property
    def has_step(self) -> bool:
        """Return whether the optimizer's step was rehearsed with these passes."""
        return bool(self.in_backward or self.on_host)


class Step(NamedTuple):
    """The settings that decide a variant's optimizer step."""

    precision: str
    adapters: str
    optimizer: str
    offload_optimizer: bool
    sharding: str
    num_gpus: int
    channels_last: bool  # of the weights
    gpus_per_node: int = GPUS_PER_NODE
    tensor_parallel: int = 1


def pass_settings_of(variant: Variant) -> PassSettings:
    is_alone = variant.micro_batch == 1 or variant.offload_activations
    is_on_host = variant.zero_offload or holds_parameters_on_host(variant)
    return PassSettings(
        precision="fp32" if variant.precision == "tf32" else variant.precision,
        checkpointing=variant.checkpointing,
        attention=variant.attention,
        loss=variant.loss,
        adapters=_adapters_of(variant),
        offload_activations=variant.offload_activations,
        in_backward=variant.optimizer if variant.optimizer_in_backward else "",
        on_host=variant.optimizer if is_on_host else "",
        sharding=variant.sharding,
        num_gpus=variant.num_gpus,
        only_at=variant.micro_batch if is_alone else 0,
        channels_last=variant.channels_last,
        is_sent_at_once=variant.num_gpus > 1 and variant.accumulation == 1,
        gpus_per_node=variant.gpus_per_node,
        tensor_parallel=variant.tensor_parallel,
    )


def _adapters_of(variant: Variant) -> str:
    if variant.adapters == "none":
        return "none"
    return f"{variant.adapters} {variant.lora_rank} {variant.lora_targets}"


def step_of(variant: Variant) -> Step:
    """Return the optimizer step. fp16 adds a loss scaler; other autocast steps are as in fp32.

    With adapters, the precision also decides how the frozen weights are stored.
    """
    is_own = variant.precision in ("fp16", "pure-bf16")
    is_stored_low = variant.precision == "bf16" and variant.adapters != "none"
    precision = variant.precision if is_own or is_stored_low else "fp32"
    return Step(
        precision=precision,
        adapters=_adapters_of(variant),
        optimizer=variant.optimizer,
        offload_optimizer=variant.offload_optimizer,
        sharding=variant.sharding,
        num_gpus=variant.num_gpus,
        channels_last=variant.channels_last,
        gpus_per_node=variant.gpus_per_node,
        tensor_parallel=variant.tensor_parallel,
    )


P = ParamSpec("P")
T = TypeVar("T")


def _once(
    ask: Callable[Concatenate[Combinations, P], T],
) -> Callable[Concatenate[Combinations, P], T]:
    """Cache a method's results on its object."""

    @functools.wraps(ask)
    def asked(self: Combinations, /, *args: P.args, **kwargs: P.kwargs) -> T:
        key = ask.__name__, *args, *kwargs.items()
        if key not in self._known:
            self._known[key] = ask(self, *args, **kwargs)
        answer: T = self._known[key]
        return answer

    return asked


@dataclass(eq=False, kw_only=True)
class Combinations:
    """Memory and time of any variant whose passes and step were rehearsed."""

    pass_footprints: Mapping[PassSettings, Footprint]
    steps: Mapping[Step, Footprint]
    model: GpuModel
    # False: accumulating passes were rehearsed without accumulation, because a step runs backward
    # several times by itself or alternates between optimizers.
    adds_up: bool = True
    multiprocessors: Multiprocessors = NONE  # of the GPU: they decide what reductions stage
    # Results of replays: the bytes reserved, 0 if memory ran out.
    known_replays: MutableMapping[str, int] = field(default_factory=dict)
    _known: dict[tuple[Any, ...], Any] = field(default_factory=dict)

    def knows(self, variant: Variant) -> bool:
        """Return whether all parts of the variant were rehearsed."""
        settings = pass_settings_of(variant)
        is_whole = settings.has_step or step_of(variant) in self.steps
        return settings in self.pass_footprints and is_whole

    # ---- memory

    def footprint(self, variant: Variant) -> Footprint:
        return self._footprint(*combination_of(variant))

    @_once
    def _footprint(self, settings: PassSettings, step: Step, is_single: bool) -> Footprint:
        found = self.pass_footprints[settings]
        if not self._has_step(settings, step):
            found = with_step_of(found, self._step_after(step, self._workspaces(settings)))
        return self._with_one_micro_step(found) if is_single and settings.accumulates else found

    def _has_step(self, settings: PassSettings, step: Step) -> bool:
        """Return whether the passes include the optimizer's step, as alternating steps must."""
        is_as_given = step.optimizer == "as-is" and not step.offload_optimizer
        return settings.has_step or (is_as_given and not self.adds_up)

    def _with_one_micro_step(self, found: Footprint) -> Footprint:
        return without_accumulation(found) if self.adds_up else found

    @_once
    def _workspaces(self, settings: PassSettings) -> tuple[tuple[int, int], ...]:
        return tuple(sorted(workspaces(self.pass_footprints[settings])))

    @_once
    def _step_after(self, step: Step, known: tuple[tuple[int, int], ...]) -> Footprint:
        """Return the optimizer's step after a forward and backward with these workspaces."""
        return without_workspaces(self.steps[step], known)

    def least_bytes(self, variant: Variant) -> int:
        """Return the peak of live bytes in torch's memory, without a replay."""
        return self._least_bytes(*combination_of(variant), variant.micro_batch)

    @_once
    def _least_bytes(
        self, settings: PassSettings, step: Step, is_single: bool, micro_batch: int
    ) -> int:
        if self._has_step(settings, step):
            return self._footprint(settings, step, is_single).live_bytes(micro_batch)
        parts = self._step_parts(step, self._workspaces(settings))
        return peak_bytes(self._pass_parts(settings, is_single), parts, micro_batch)

    @_once
    def _pass_parts(self, settings: PassSettings, is_single: bool) -> tuple[StepPart, StepPart]:
        found = self.pass_footprints[settings]
        is_cut = is_single and settings.accumulates
        return parts_of(self._with_one_micro_step(found) if is_cut else found)

    @_once
    def _step_parts(
        self, step: Step, known: tuple[tuple[int, int], ...]
    ) -> tuple[StepPart, StepPart]:
        return parts_of(self._step_after(step, known))

    def least_in_backward_bytes(self, variant: Variant) -> int:
        """Return a lower bound with this variant's optimizer stepping in backward.

        Gradients and the step's temporaries are left out, so no step in backward takes less.
        """
        settings = pass_settings_of(variant)
        _, stepped = self._step_parts(step_of(variant), self._workspaces(settings))
        return (
            self._rest_without_gradients(settings).most(variant.micro_batch) + stepped.state_bytes
        )

    @_once
    def _rest_without_gradients(self, settings: PassSettings) -> Line:
        """Return the second step's live bytes without gradients and without the optimizer's own."""
        found = self.pass_footprints[settings]
        found = self._with_one_micro_step(found) if settings.accumulates else found
        _, second = parts_of(without_gradients(found))
        return second.rest

    def host_bytes(self, variant: Variant) -> int:
        """Return the host memory of what was offloaded."""
        settings = pass_settings_of(variant)
        step = None if settings.has_step else self.steps.get(step_of(variant))
        parts = self.pass_footprints[settings], step
        return sum(part.host_bytes_at(variant.micro_batch) for part in parts if part is not None)

    # ---- time

    def seconds(self, variant: Variant, pace: Pace = LIKELY) -> float | None:
        """Return the seconds of one optimizer step; None if a needed rate is unknown."""
        return self._seconds(
            pass_settings_of(variant),
            step_of(variant),
            "tf32" if variant.precision == "tf32" else "fp32",
            variant.micro_batch,
            variant.accumulation,
            pace,
        )

    def paced_seconds(self, variant: Variant) -> tuple[float, ...]:
        """Return the seconds at each pace that host and bus may have; empty if unknown."""
        found = [self.seconds(variant, pace) for pace in SHARED]
        return tuple(seconds for seconds in found if seconds is not None)

    @_once
    def _seconds(
        self,
        settings: PassSettings,
        step: Step,
        matmul: MatmulPrecision,
        micro_batch: int,
        accumulation: int,
        pace: Pace,
    ) -> float | None:
        has_step = self._has_step(settings, step)
        return step_seconds(
            self._micro_steps(settings, matmul, has_step),
            None if has_step else self._optimizer_step(step, matmul),
            micro_batch,
            accumulation,
            pace,
        )

    @_once
    def _micro_steps(
        self, settings: PassSettings, matmul: MatmulPrecision, has_step: bool
    ) -> MicroSteps:
        priced = PricedFootprint(
            self.pass_footprints[settings],
            self._prices(matmul, _links_of(settings, self.model)),
        )
        return MicroSteps(priced, has_step=has_step, is_one=not self.adds_up)

    @_once
    def _optimizer_step(self, step: Step, matmul: MatmulPrecision) -> PricedFootprint:
        prices = self._prices(matmul, _links_of(step, self.model))
        return PricedFootprint(self.steps[step], prices)

    @_once
    def _prices(self, matmul: MatmulPrecision, links: Links) -> Prices:
        return prices_on(self.model, matmul, links)

    # ---- replays

    def reserved_bytes(self, variant: Variant) -> int:
        """Return what torch's allocator reserves without a limit."""
        return self._replayed_bytes(variant, None)

    def reserved_bytes_within(self, variant: Variant, limit_bytes: int) -> int:
        """Return what torch reserves on a device of `limit_bytes`, where it releases its cache.

        If the variant does not fit, return what it would reserve without a limit.
        """
        reserved = self.reserved_bytes(variant)
        if reserved <= limit_bytes or self.least_bytes(variant) > limit_bytes:
            return reserved
        return self._replayed_bytes(variant, limit_bytes) or reserved

    def passes(self, variant: Variant, limit_bytes: int) -> bool:
        """Return whether it runs on a device of this size, releasing the cache if necessary."""
        if self.least_bytes(variant) > limit_bytes:
            return False
        if self.reserved_bytes(variant) <= limit_bytes:
            return True
        return self._replayed_bytes(variant, limit_bytes) > 0

    def passes_with_outputs(self, variant: Variant, limit_bytes: int) -> bool:
        """As `passes`, for a loop that keeps the model's outputs until the next step."""
        return (
            self._replayed_bytes(variant, None, keeps_outputs=True) <= limit_bytes
            or self._replayed_bytes(variant, limit_bytes, keeps_outputs=True) > 0
        )

    def boundary(
        self, variant: Variant, limit_bytes: int, known: float, num_replays: int
    ) -> tuple[float, float]:
        """Return how many examples fit at a time and how many do not; more replays narrow the gap.

        `known` examples fit. Half an example stands for one of half the length, as far as memory
        grows with the length.
        """
        least = known
        beyond = self.footprint(variant).examples_within(limit_bytes)
        if not num_replays:
            return least, beyond
        # First guess: reserved and live bytes keep their ratio, with a small margin.
        beside_ratio = self.least_bytes(variant) / max(self.reserved_bytes(variant), 1)
        likely_bytes = int(limit_bytes * beside_ratio / (1 + _NEAR_RATIO))
        likely = self.footprint(variant).examples_within(likely_bytes)
        next_one = likely if likely > least else (least + beyond) / 2
        for _ in range(num_replays):
            if beyond - least <= _NEAR_RATIO * least or not isfinite(beyond):
                break
            if self._replayed_bytes(variant, limit_bytes, examples=next_one):
                least = next_one
            else:
                beyond = next_one
            next_one = (least + beyond) / 2
        return least, beyond

    def _replayed_bytes(
        self,
        variant: Variant,
        limit_bytes: int | None,
        *,
        examples: float | None = None,
        keeps_outputs: bool = False,
    ) -> int:
        """Replay once -> the bytes reserved on a device of `limit_bytes`; 0 if it runs out."""
        size = variant.micro_batch if examples is None else examples
        on = tuple(self.multiprocessors)
        key = f"{key_of(variant)} with {size:.4f} in {limit_bytes} on {on}, {keeps_outputs}"
        if key not in self.known_replays:
            requests = self.footprint(variant).requests(
                size, self.multiprocessors, keeps_outputs=keeps_outputs
            )
            found = replay_requests(requests, settings_for(variant), limit_bytes)
            has_run_out = found.ran_out_at is not None
            self.known_replays[key] = 0 if has_run_out else found.peak_reserved_bytes
        return self.known_replays[key]


def _links_of(settings: PassSettings | Step, model: GpuModel) -> Links:
    return links_of(model, grid_variant(settings))


def grid_variant(settings: PassSettings | Step) -> Variant:
    """Return a variant on the same GPUs, divided alike."""
    sharding: Any = settings.sharding
    return Variant(
        micro_batch=1,
        sharding=sharding,
        num_gpus=settings.num_gpus,
        gpus_per_node=settings.gpus_per_node,
        tensor_parallel=settings.tensor_parallel,
    )


def combination_of(variant: Variant) -> tuple[PassSettings, Step, bool]:
    """Return what decides which rehearsals make up a variant, at every micro-batch."""
    return pass_settings_of(variant), step_of(variant), variant.accumulation == 1


def key_of(variant: Variant) -> str:
    """Return a name for everything that decides the variant's requests."""
    rest = variant.micro_batch, variant.accumulation == 1, variant.expandable_segments
    return repr((*pass_settings_of(variant), *step_of(variant), *rest))
