"""Workload -> all that a plan needs to know of it, whatever the GPU: one rehearsal per family."""

from __future__ import annotations

import contextlib
import gc
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from oomph.errors import OomphError
    from oomph.planning.choices import Choices
    from oomph.predicting.footprint import Footprint
    from oomph.predicting.ways import Family, Step
    from oomph.predicting.weighing import Weighed
    from oomph.records.plan import Preference, Stability
    from oomph.records.possible import Possible
    from oomph.records.trace import Op, Trace
    from oomph.records.workload import Keeps, Variant

    Say = Callable[[str], None]

# Time against memory is what decides which block to recompute, not the GPU: of a block's ops the
# share that is arithmetic and the share that is traffic, at the rates of an A100.
_FLOPS, _BANDWIDTH = 250e12, 1.6e12
_MOST_SAID = 200  # characters of an error that nobody foresaw
_SMALL = 2  # examples, of the smaller of the two rehearsals that a line goes through


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is to be planned, the GPU aside."""

    batch_size: int | None = None
    max_gpus: int = 1
    allow: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    prefer: Preference = "balance"
    target_ratio: float = 1.0  # of what CUDA can have of the GPU
    checked: Mapping[str, Stability] = field(default_factory=dict)  # of tricks, by oomph check
    keeps: Keeps | None = None  # of what the model returns; None: as the workload says


class Rehearser(Protocol):
    """Whoever can train a workload or a script in any variant, without training it."""

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
    def look(self, inspect: Callable[[Any, Any], Possible]) -> Possible: ...
    def trace(self, variant: Variant, *, is_step_alone: bool = False) -> Trace: ...


@dataclass(kw_only=True)
class Rehearsed:
    """What is known of a workload. Families and steps are added as they are needed."""

    possible: Possible
    batch_size: int
    clips_gradients: bool
    costs: Sequence[tuple[int, float]]  # of recomputing each block
    torch_version: str
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()  # the user's own, that were imported
    families: dict[Family, Footprint] = field(default_factory=dict)
    steps: dict[Step, Footprint] = field(default_factory=dict)
    not_affine: set[Family] = field(default_factory=set)
    exact: dict[Variant, Footprint] = field(default_factory=dict)  # of their own rehearsals
    replays: dict[str, int] = field(default_factory=dict)
    weighed: dict[str, Weighed] = field(default_factory=dict)  # predictions, the card aside
    doubt: str | None = None  # about rehearsals on this torch
    failed: dict[Family | Step, str] = field(default_factory=dict)  # what it does not bear, and why
    given: Variant | None = None  # how a script trains by itself
    refused: Mapping[str, str] = field(
        default_factory=dict
    )  # tricks that cannot be put on, and why
    has_convolutions: bool = False
    example_elements: int | None = None  # in all tensors of one example

    @property
    def adds_up(self) -> bool:
        """Whether rehearsals with two micro-steps have two: a script may refuse."""
        return "accumulation" not in self.refused


def choices_of(
    rehearsed: Rehearsed, asked: Asked, capability: tuple[int, int], least_micro_batch: int
) -> Choices:
    """The choices that the model and the user leave."""
    from oomph.planning.choices import Question, choices_for

    question = Question(
        batch_size=asked.batch_size or rehearsed.batch_size,
        capability=capability,
        possible=rehearsed.possible,
        clips_gradients=rehearsed.clips_gradients,
        max_gpus=asked.max_gpus,
        allow=asked.allow,
        forbid=asked.forbid,
        refused={**_refused_by_attention(rehearsed), **rehearsed.refused},
        precision="fp32" if rehearsed.given is None else rehearsed.given.precision,
        checked=asked.checked,
        pairs_at=pairs_in(rehearsed),
        own_micro_batch=_own_micro_batch(rehearsed, asked),
    )
    found = choices_for(question, ("selective", "blocks"))
    return replace(found, least_micro_batch=min(least_micro_batch, question.batch_size))


def _refused_by_attention(rehearsed: Rehearsed) -> dict[str, str]:
    """Fused attention is put on every way to train: where it fails by itself, it is on none."""
    from oomph.predicting.ways import Family

    for part, why in rehearsed.failed.items():
        if isinstance(part, Family) and part.attention == "sdpa" and _is_plain(part):
            return {"sdpa": why}
    return {}


def _own_micro_batch(rehearsed: Rehearsed, asked: Asked) -> int | None:
    given = rehearsed.given
    is_divided = given is not None and given.accumulation > 1 and rehearsed.adds_up
    is_own_batch = asked.batch_size in (None, rehearsed.batch_size)
    return given.micro_batch if given and is_divided and is_own_batch else None


def pairs_in(rehearsed: Rehearsed) -> str | None:
    """Where examples are compared with one another, as far as lines were rehearsed."""
    lines = (found for family, found in rehearsed.families.items() if not family.only_at)
    return next(filter(None, (line.place_of_pairs() for line in lines)), None)


def _is_plain(family: Family) -> bool:
    others = family.loss, family.checkpointing, family.adapters, family.in_backward
    return others == ("as-is", "none", "none", "") and not family.offload_activations


def first_look(rehearser: Rehearser) -> Rehearsed:
    """The model as it is given: what can be put on it, and what its blocks keep."""
    from oomph.predicting.attention import with_seen_attention
    from oomph.predicting.block_costs import block_costs
    from oomph.records.workload import Variant

    found, given = rehearser.look(_inspect), rehearser.given
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
        example_elements=trace.example_elements,
    )


def _inspect(model: Any, optimizer: Any) -> Possible:
    """Where the model is, torch is, too; who knows it already need not import that."""
    from oomph.training.possible import possible

    return possible(model, optimizer)


def _seconds(op: Op) -> float:
    return max(op.flops / _FLOPS, op.moved_bytes / _BANDWIDTH)


def complete(
    rehearsed: Rehearsed, rehearser: Rehearser, variants: Iterable[Variant], say: Say
) -> None:
    """Rehearse what of these variants is not known yet."""
    from oomph.verbs.plan_reuse import family_like, step_like

    families, steps = missing(rehearsed, variants)
    number, of = 0, len(families) + len(steps)
    for family, variant in families.items():
        number += 1
        say(f"rehearsing {number} of {of}: {in_words(variant)}")
        with what_fails(rehearsed, family, variant):
            found = family_like(family, rehearsed.families) or _footprint(rehearser, variant)
            if found is None:
                rehearsed.not_affine.add(family)
            else:
                rehearsed.families[family] = found
        _forget_what_torch_holds()
    for step, variant in steps.items():
        number += 1
        say(f"rehearsing {number} of {of}: {in_words(variant)}")
        with what_fails(rehearsed, step, variant):
            known = step_like(step, rehearsed.steps)
            rehearsed.steps[step] = known or _step(rehearser, variant)
        _forget_what_torch_holds()


class Unrehearsed(Exception):
    """Something is needed that was not rehearsed, and there is nobody to rehearse it."""


class CannotBePutOn(Exception):
    """A script does not run with a trick: that one is left out, and the error says why."""

    def __init__(self, error: OomphError) -> None:
        self.error = error
        super().__init__(error.in_one_line())


@contextlib.contextmanager
def what_fails(rehearsed: Rehearsed, part: Family | Step, variant: Variant) -> Iterator[None]:
    """What a model or a script does not bear is noted, and the rest is planned with.

    As it is, it has to train: an error then is the user's to know.
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
    """What went wrong, and because of what."""
    from oomph.errors import OomphError

    if isinstance(error, CannotBePutOn):
        return str(error)
    if isinstance(error, OomphError):
        return error.what + (f" ({error.because})" if error.because else "")
    said = " ".join(str(error).split())[:_MOST_SAID]
    return f"an error in oomph itself, please report it: {type(error).__name__}: {said}"


def _step(rehearser: Rehearser, variant: Variant) -> Footprint:
    is_alone = variant.sharding == "none"  # else its gradients are cut in pieces
    return footprint_of_one(rehearser.trace(variant, is_step_alone=is_alone))


def _forget_what_torch_holds() -> None:
    """Hooks on parameters keep a rehearsed model alive where Python's collector cannot see it.

    The next rehearsal collects before it begins, and would look at all models so far.
    """
    gc.collect()
    gc.freeze()


def missing(
    rehearsed: Rehearsed, variants: Iterable[Variant]
) -> tuple[dict[Family, Variant], dict[Step, Variant]]:
    """A representative of each family and of each step that is not known yet."""
    from oomph.predicting.ways import family_of, step_of

    families: dict[Family, Variant] = {}
    steps: dict[Step, Variant] = {}
    known = {*rehearsed.families, *rehearsed.not_affine, *rehearsed.failed}
    for variant in variants:
        family, step = family_of(variant), step_of(variant)
        if family not in known and family not in families:
            families[family] = _for_family(variant)
        if family.in_backward:  # the step is in it
            continue
        if step not in rehearsed.steps and step not in steps and step not in rehearsed.failed:
            steps[step] = _for_step(variant)
    return families, steps


def _for_family(variant: Variant) -> Variant:
    from oomph.predicting.ways import family_of

    return for_family(variant, family_of(variant).only_at or _SMALL)


def for_family(variant: Variant, micro_batch: int) -> Variant:
    """Its forward and backward at one micro-batch, with the user's optimizer after them.

    One that steps in backward is a part of it, and stays what it is.
    """
    from oomph.predicting.ways import family_of

    family = family_of(variant)
    return replace(
        variant,
        micro_batch=micro_batch,
        accumulation=2 if family.accumulates else 1,
        optimizer=family.in_backward or "as-is",
        offload_optimizer=False,
        expandable_segments=False,
        precision="fp32" if variant.precision == "tf32" else variant.precision,
    )


def _for_step(variant: Variant) -> Variant:
    """Its optimizer's step, after the plainest forward and backward."""
    return replace(
        variant,
        micro_batch=_SMALL,
        accumulation=1,
        checkpointing="none",
        attention="as-is",
        loss="as-is",
        optimizer_in_backward=False,
        offload_activations=False,
        expandable_segments=False,
    )


def in_words(variant: Variant) -> str:
    """A way to train, short enough for a line of progress."""
    names = _tricks_of(variant)
    if variant.checkpointing != "none":
        names = [
            n if n != "checkpointing" else f"checkpointing {variant.checkpointing}" for n in names
        ]
    return ", ".join(names) or "as it is"


def _tricks_of(variant: Variant) -> list[str]:
    """What is put on, the split of the batch aside."""
    from oomph.planning.tricks import levers_of

    return [lever.name for lever in levers_of(variant) if lever.name != "accumulation"]


def _footprint(rehearser: Rehearser, variant: Variant) -> Footprint | None:
    """None if no line goes through two micro-batches."""
    from oomph.predicting.footprint import footprint_of
    from oomph.predicting.scaling import NotAffine, affine
    from oomph.predicting.ways import family_of

    if family_of(variant).only_at:
        return footprint_of_one(rehearser.trace(variant))
    try:
        larger = replace(variant, micro_batch=variant.micro_batch + 1)
        return footprint_of(affine(rehearser.trace(variant), rehearser.trace(larger)))
    except NotAffine:
        return None


def footprint_of_one(trace: Trace) -> Footprint:
    """The footprint of one trace, for its own micro-batch."""
    from oomph.predicting.footprint import footprint_of
    from oomph.predicting.scaling import AffineTrace, ordered

    slopes = [0] * len(trace.allocations)
    return footprint_of(AffineTrace(ordered(trace), slopes, [(0, 0)] * len(trace.ops)))
