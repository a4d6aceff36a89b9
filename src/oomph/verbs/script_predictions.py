"""A script -> Prediction: rehearsed at the very batch and with the tricks that are asked for."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from oomph.records.prediction import Prediction
    from oomph.records.script import Script, Seen
    from oomph.records.trace import Trace
    from oomph.records.workload import Variant
    from oomph.tracing.traces import Wish
    from oomph.verbs.scripts import ScriptRehearser
    from oomph.verbs.targets import Target

NO_STEP = (
    "the script made no optimizer step while it was rehearsed: what is told is a lower bound, the"
    " optimizer's state and step are not in it"
)


def predict_script(
    script: Script,
    target: Target,
    wish: Wish,
    *,
    has_own_precision: bool,
    expandable_segments: bool,
    say: Callable[[str], None],
    is_unprotected: bool,
    is_fresh: bool,
) -> Prediction:
    from oomph.predicting import assembly
    from oomph.predicting.allocator_settings import AllocatorSettings
    from oomph.verbs.scripts import rehearser_of
    from oomph.verbs.step_times import step_time

    with rehearser_of(
        script, target, say, is_unprotected=is_unprotected, is_fresh=is_fresh
    ) as rehearser:
        if has_own_precision:
            wish = replace(wish, precision=rehearser.own.precision)
        variant = _variant(rehearser, wish)
        if variant != rehearser.given:
            say("rehearsing it with what is asked for")
        trace = _traced(rehearser, variant)
    trace = bounded(trace, rehearser.seen)
    ready = target.with_torch(trace.torch_version)
    found = assembly.assemble(
        trace,
        replace(variant, expandable_segments=expandable_segments),
        ready.card.among(variant),
        settings=AllocatorSettings(expandable_segments=expandable_segments),
        time=step_time(trace.ops, variant, ready.model),
        step_from=ready.step_from,
        notes=[*rehearser.seen.approximations, *ready.notes],
    )
    if not rehearser.seen.is_batch_known:  # so many steps a second are not so many samples
        found = replace(found, samples_per_s=None)
    return replace(found, seen=rehearser.seen)


def _traced(rehearser: ScriptRehearser, variant: Variant) -> Trace:
    """Raises what the script raised."""
    from oomph.verbs.rehearsals import CannotBePutOn

    try:
        return rehearser.trace(variant)
    except CannotBePutOn as error:
        raise error.error from None


def bounded(trace: Trace, seen: Seen) -> Trace:
    """A trace without an optimizer's step is no more than a lower bound, and says so."""
    return trace if seen.has_stepped else replace(trace, doubt=trace.doubt or NO_STEP)


def _variant(rehearser: ScriptRehearser, wish: Wish) -> Variant:
    """The script's own split of its batch, or another that makes the same batch."""
    from oomph.records.workload import How
    from oomph.tracing.traces import variant_for_batch

    if wish.micro_batch is not None:
        return variant_for_batch(rehearser.batch_size, wish)
    how = {field.name: getattr(wish, field.name) for field in fields(How)}
    return replace(rehearser.given, **how)
