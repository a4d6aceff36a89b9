"""A workload or a script -> all that its plans need to know about it, for any GPU.

Variants with the same forward and backward share one rehearsal, and so do optimizer steps.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from oomph.errors import CannotBePutOn, OomphError
from oomph.planning.choices import Choices, choices_for
from oomph.planning.deadline import Deadline
from oomph.predicting.combinations import (
    PassSettings,
    Step,
    grid_variant,
    pass_settings_of,
    step_of,
)
from oomph.predicting.demand import UnlimitedPeaks
from oomph.predicting.footprint import Footprint, Kernel, footprint_of
from oomph.predicting.residuals import Kind, kind_of
from oomph.predicting.scaling import AffineTrace, NotAffine, OpSlope, affine, ordered
from oomph.records.generation import DEFAULT_BYTES_PER_S, DEFAULT_MATMUL_FLOPS
from oomph.records.plan import PlanOptions
from oomph.records.trace import Op, Trace
from oomph.records.workload import (
    GPUS_PER_NODE,
    Possible,
    Variant,
    grid_of,
    holds_parameters_on_host,
)
from oomph.tricks.definition import Request
from oomph.tricks.trick import tricks_on

Say = Callable[[str], None]

_MOST_CHARACTERS = 200  # of an unexpected error; judgement: two lines on screen
_SMALL = 2  # examples in the smaller of the two rehearsals that define a line
# The ops of torch's scaled_dot_product_attention, whichever kernel it chooses. If no fused kernel
# supports the head's width, it runs plain ops, which look like a model's own attention.
_FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_")
_PLAIN = ("_softmax", "_safe_softmax")  # over attention scores; a loss uses _log_softmax
_ALL_REDUCE = "all_reduce"


class Rehearser(Protocol):
    """Rehearses a workload or a script in any variant, without training it."""

    @property
    def batch_size(self) -> int: ...
    @property
    def clips_gradients(self) -> bool: ...
    @property
    def files(self) -> tuple[str, ...]: ...
    @property
    def given(self) -> Variant | None: ...
    @property
    def refused(self) -> Mapping[str, str]: ...
    def look(self) -> Possible: ...
    def trace(self, variant: Variant, *, is_step_alone: bool = False) -> Trace: ...


@dataclass(kw_only=True)
class Rehearsed:
    """What is known of a workload. Footprints are added as they are needed."""

    possible: Possible
    batch_size: int
    clips_gradients: bool
    costs: Sequence[tuple[int, float]]  # bytes and seconds of recomputing each block
    torch_version: str
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # the user's own imported files
    pass_footprints: dict[PassSettings, Footprint] = field(default_factory=dict)
    steps: dict[Step, Footprint] = field(default_factory=dict)
    not_affine: set[PassSettings] = field(default_factory=set)
    exact: dict[Variant, Footprint] = field(default_factory=dict)  # from their own rehearsals
    replays: dict[str, int] = field(default_factory=dict)
    # keyed by the variant and the GPU's multiprocessors
    unlimited_peaks: dict[str, UnlimitedPeaks] = field(default_factory=dict)
    doubt: str | None = None  # why rehearsals may be wrong on this torch
    failed: dict[PassSettings | Step, str] = field(default_factory=dict)  # what failed, and why
    given: Variant | None = None  # the script's own variant
    # Tricks that cannot be applied, and why.
    refused: Mapping[str, str] = field(default_factory=dict)
    has_convolutions: bool = False
    kind: Kind = "other model"  # on one GPU
    example_elements: int | None = None  # summed over all tensors of one example

    @property
    def adds_up(self) -> bool:
        """Return whether rehearsals can use two micro-steps; some scripts cannot accumulate."""
        return "accumulation" not in self.refused


def choices_of(
    rehearsed: Rehearsed, options: PlanOptions, capability: tuple[int, int], least_micro_batch: int
) -> Choices:
    """Return the choices that the model and the user allow."""
    request = Request(
        batch_size=options.batch_size or rehearsed.batch_size,
        capability=capability,
        possible=rehearsed.possible,
        clips_gradients=rehearsed.clips_gradients,
        max_gpus=options.max_gpus,
        allow=options.allow,
        forbid=options.forbid,
        refused={**_refused_by_attention(rehearsed), **rehearsed.refused},
        precision="fp32" if rehearsed.given is None else rehearsed.given.precision,
        checked=options.checked,
        pairs_at=pairs_in(rehearsed),
        own_micro_batch=_own_micro_batch(rehearsed, options),
        lora_rank=options.lora_rank,
        lora_targets=options.lora_targets,
        gpus_per_node=options.gpus_per_node,
    )
    found = choices_for(request, ("selective", "blocks"))
    return replace(found, least_micro_batch=min(least_micro_batch, request.batch_size))


def _refused_by_attention(rehearsed: Rehearsed) -> dict[str, str]:
    """Return why fused attention is refused: every variant uses it, unless it fails alone."""
    for part, why in rehearsed.failed.items():
        if isinstance(part, PassSettings) and part.attention == "sdpa" and _is_plain(part):
            return {"sdpa": why}
    return {}


def _own_micro_batch(rehearsed: Rehearsed, options: PlanOptions) -> int | None:
    given = rehearsed.given
    is_divided = given is not None and given.accumulation > 1 and rehearsed.adds_up
    is_own_batch = options.batch_size in (None, rehearsed.batch_size)
    return given.micro_batch if given and is_divided and is_own_batch else None


def pairs_in(rehearsed: Rehearsed) -> str | None:
    """Return the module that compares examples with one another, if a rehearsed line shows one."""
    lines = (found for settings, found in rehearsed.pass_footprints.items() if not settings.only_at)
    return next(filter(None, (line.place_of_pairs() for line in lines)), None)


def _is_plain(settings: PassSettings) -> bool:
    others = settings.loss, settings.checkpointing, settings.adapters, settings.has_step
    return others == ("as-is", "none", "none", False) and not settings.offload_activations


def first_look(rehearser: Rehearser) -> Rehearsed:
    """Rehearse the model as given: which tricks apply, and what its blocks save."""
    found, given = rehearser.look(), rehearser.given
    small = Variant(micro_batch=2, accumulation=2)
    trace = rehearser.trace(small if given is None else replace(small, precision=given.precision))
    return Rehearsed(
        possible=with_seen_attention(found, trace),
        batch_size=rehearser.batch_size,
        clips_gradients=rehearser.clips_gradients,
        given=given,
        refused=rehearser.refused,
        costs=block_costs(trace, found.block_names, _seconds),
        torch_version=trace.torch_version,
        notes=trace.notes,
        files=rehearser.files,
        doubt=trace.doubt,
        has_convolutions=bool(trace.convolutions),
        kind=kind_of(trace.ops),
        example_elements=trace.example_elements,
    )


def _seconds(op: Op) -> float:
    # Only the order of the blocks matters, and it hardly depends on the GPU: the default GPU's
    # rates are enough.
    return max(op.flops / DEFAULT_MATMUL_FLOPS, op.moved_bytes / DEFAULT_BYTES_PER_S)


def complete(
    rehearsed: Rehearsed,
    rehearser: Rehearser | None,
    variants: Iterable[Variant],
    say: Say,
    deadline: Deadline,
) -> None:
    """Rehearse the parts of these variants that are still missing. Raises Unrehearsed."""
    passes, steps = missing(rehearsed, variants)
    parts: list[tuple[PassSettings | Step, Variant]] = [*passes.items(), *steps.items()]
    if not parts:
        deadline.has_base = True
        return
    if rehearser is None:
        raise Unrehearsed
    if deadline.limit_s is not None:  # what a plan needs at least, and the usual tricks, come first
        parts.sort(key=lambda pair: len(_tricks_of(pair[1])))
    least = len(_tricks_of(parts[0][1]))
    for number, (part, variant) in enumerate(parts, start=1):
        deadline.has_base |= len(_tricks_of(variant)) > least
        if deadline.is_over:
            deadline.leave_out(in_words(one) for _, one in parts[number - 1 :])
            return
        say(f"rehearsing {number} of {len(parts)}: {in_words(variant)}")
        with noting_failures(rehearsed, part, variant):
            if isinstance(part, PassSettings):
                like = pass_footprint_like(part, rehearsed.pass_footprints)
                found = like or _footprint(rehearser, variant)
                if found is None:
                    rehearsed.not_affine.add(part)
                else:
                    rehearsed.pass_footprints[part] = found
            else:
                known = step_like(part, rehearsed.steps)
                rehearsed.steps[part] = known or _step(rehearser, variant)
        _forget_what_torch_holds()
    deadline.has_base = True


class Unrehearsed(Exception):
    """A rehearsal is missing, and there is no rehearser to make it."""


@contextlib.contextmanager
def noting_failures(
    rehearsed: Rehearsed, part: PassSettings | Step, variant: Variant
) -> Iterator[None]:
    """Note the error of a model or a script, and let the rest be planned.

    The workload without tricks has to train, so its errors reach the user.
    """
    try:
        yield
    except CannotBePutOn as error:
        rehearsed.failed[part] = str(error)
    except Exception as error:
        if isinstance(error, Unrehearsed) or not _tricks_of(variant):
            raise
        rehearsed.failed[part] = in_short(error)


def in_short(error: Exception) -> str:
    """Return what went wrong and why, on one line."""
    if isinstance(error, CannotBePutOn):
        return str(error)
    if isinstance(error, OomphError):
        return error.what + (f" ({error.because})" if error.because else "")
    text = " ".join(str(error).split())[:_MOST_CHARACTERS]
    return f"an error in oomph itself, please report it: {type(error).__name__}: {text}"


def _step(rehearser: Rehearser, variant: Variant) -> Footprint:
    return footprint_of_one(rehearser.trace(variant, is_step_alone=True))


def _forget_what_torch_holds() -> None:
    """Collect garbage, then freeze what is left so that the next collection skips it."""
    gc.collect()
    gc.freeze()


def missing(
    rehearsed: Rehearsed, variants: Iterable[Variant]
) -> tuple[dict[PassSettings, Variant], dict[Step, Variant]]:
    """Return a variant to rehearse for the passes, and one for the step, that are not known yet."""
    passes: dict[PassSettings, Variant] = {}
    steps: dict[Step, Variant] = {}
    known = {*rehearsed.pass_footprints, *rehearsed.not_affine, *rehearsed.failed}
    for variant in variants:
        settings, step = pass_settings_of(variant), step_of(variant)
        if settings not in known and settings not in passes:
            passes[settings] = variant_for_passes(variant, settings.only_at or _SMALL)
        if settings.has_step:
            continue
        if step not in rehearsed.steps and step not in steps and step not in rehearsed.failed:
            steps[step] = _variant_for_step(variant)
    return passes, steps


def variant_for_passes(variant: Variant, micro_batch: int) -> Variant:
    """Return the variant to rehearse for a forward and backward at one micro-batch.

    The user's own optimizer steps after them. An optimizer that steps in backward is part of
    backward and stays.
    """
    settings = pass_settings_of(variant)
    return replace(
        variant,
        micro_batch=micro_batch,
        accumulation=2 if settings.accumulates else 1,
        optimizer=settings.in_backward or settings.on_host or "as-is",
        offload_optimizer=holds_parameters_on_host(variant),
        expandable_segments=False,
        precision="fp32" if variant.precision == "tf32" else variant.precision,
    )


def _variant_for_step(variant: Variant) -> Variant:
    """Return the variant to rehearse for an optimizer step: plainest forward and backward."""
    return replace(
        variant,
        micro_batch=_SMALL,
        accumulation=1,
        checkpointing="none",
        attention="as-is",
        loss="as-is",
        optimizer_in_backward=False,
        offload_activations=False,
        zero_offload=False,
        expandable_segments=False,
    )


def in_words(variant: Variant) -> str:
    """Describe a variant, short enough for a line of progress."""
    names = _tricks_of(variant)
    if variant.checkpointing != "none":
        names = [
            n if n != "checkpointing" else f"checkpointing {variant.checkpointing}" for n in names
        ]
    return ", ".join(names) or "as it is"


def _tricks_of(variant: Variant) -> list[str]:
    """Return the names of the variant's tricks, except accumulation."""
    return [trick.name for trick in tricks_on(variant) if trick.name != "accumulation"]


def _footprint(rehearser: Rehearser, variant: Variant) -> Footprint | None:
    """Return the footprint of the passes; None if memory is not linear in the micro-batch."""
    if pass_settings_of(variant).only_at:
        return footprint_of_one(rehearser.trace(variant))
    try:
        larger = replace(variant, micro_batch=variant.micro_batch + 1)
        return footprint_of(affine(rehearser.trace(variant), rehearser.trace(larger)))
    except NotAffine:
        return None


def footprint_of_one(trace: Trace) -> Footprint:
    """Return the footprint of one trace, valid only for its own micro-batch."""
    slopes = [0] * len(trace.allocations)
    return footprint_of(AffineTrace(ordered(trace), slopes, [OpSlope(0, 0)] * len(trace.ops)))


# ---- what the first rehearsal shows about the model ----------------------------------------------


def with_seen_attention(possible: Possible, trace: Trace) -> Possible:
    """Fill in an unknown kind of attention from the ops of a rehearsal."""
    if possible.attention_is != "unknown":
        return possible
    names = {op.name for op in trace.ops}
    if any(name.startswith(_FUSED) for name in names):
        return replace(possible, attention_is="sdpa")
    if names.isdisjoint(_PLAIN):
        return replace(possible, attention_is="none")
    return possible


def block_costs(
    trace: Trace, block_names: Sequence[str], seconds: Callable[[Op], float]
) -> list[tuple[int, float]]:
    """Return the bytes that recomputing each block would free, and the seconds that it would take.

    They are those of a micro-step of the last training step.
    """
    places = {name: place for place, name in enumerate(block_names)}
    saved = [0] * len(block_names)
    forward_s = [0.0] * len(block_names)
    requested = (event - 1 for event in trace.events[trace.step_starts[-1] :] if event > 0)
    for allocation in map(trace.allocations.__getitem__, requested):
        place = _block_of(allocation.module, places)
        if place is not None and allocation.category == "activations":
            saved[place] += allocation.size_bytes
    for op in trace.ops:
        place = _block_of(op.module, places)
        if place is not None and op.phase == "forward":
            forward_s[place] += seconds(op)
    return list(zip(saved, forward_s, strict=True))


def _block_of(module: str, places: dict[str, int]) -> int | None:
    """Return the place of the block that is, or contains, this module."""
    while module:
        if module in places:
            return places[module]
        module = module.rpartition(".")[0]
    return None


# ---- reuse for another number of GPUs ------------------------------------------------------------
# With DDP every GPU holds everything, however many there are: only the traffic differs. So it is
# with hybrid sharding on groups of the same size. The optimizer step sees the shards of one group
# and none of the replicas.


def pass_footprint_like(
    settings: PassSettings, known: Mapping[PassSettings, Footprint]
) -> Footprint | None:
    """Return the footprint with replicas, derived from one with another number of replicas."""
    copies, shards = _grid_of(settings)
    for other, footprint in known.items():
        copies_of_other, shards_of_other = _grid_of(other)
        is_alike = settings == other._replace(
            num_gpus=settings.num_gpus, gpus_per_node=settings.gpus_per_node
        )
        if not is_alike or shards_of_other != shards:
            continue
        if copies_of_other == copies:  # on other machines
            return footprint
        if copies > 1 and copies_of_other > 1:
            kernels = (_sent_among(each, copies_of_other, copies) for each in footprint.kernels)
            return replace(footprint, kernels=tuple(kernels))
    return None


def _grid_of(settings: PassSettings) -> tuple[int, int]:
    """Return the number of replicas of the model, and the GPUs that each is sharded among."""
    return grid_of(grid_variant(settings))


def step_like(step: Step, known: Mapping[Step, Footprint]) -> Footprint | None:
    """Return an optimizer step's footprint from one with the same number of shards."""
    alike = (key for key in known if _on_one_group(key) == _on_one_group(step))
    other = next(alike, None)
    return None if other is None else known[other]  # an optimizer step sends nothing


def _on_one_group(step: Step) -> Step:
    """Return the step on one replica of the model."""
    _, shards = grid_of(grid_variant(step))
    step = step._replace(gpus_per_node=GPUS_PER_NODE)  # it decides groups, and nothing else here
    if step.sharding == "ddp":
        return step._replace(num_gpus=0)  # for any number of GPUs
    if step.sharding == "hybrid":
        return step._replace(sharding="fsdp", num_gpus=shards * step.tensor_parallel)
    return step


def _sent_among(kernel: Kernel, num_before: int, num_gpus: int) -> Kernel:
    """Rescale an all-reduce of gradients to another number of replicas.

    In a ring of n each GPU sends 2 x (n - 1) / n of what is summed, rounded down. What is summed
    after backward, to clip gradients, is summed over the shards.
    """
    if kernel.name != _ALL_REDUCE or kernel.phase != "backward":
        return kernel
    summed = -(-kernel.fixed_moved_bytes * num_before // (2 * (num_before - 1)))
    return kernel._replace(fixed_moved_bytes=2 * summed * (num_gpus - 1) // num_gpus)
