"""A workload or a script, a variant and a GPU -> Prediction."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from oomph.errors import CannotBePutOn, NotOnThisSystem, UsageError
from oomph.planning.estimates import step_time
from oomph.planning.lines import trace_at
from oomph.predicting import prediction, speed
from oomph.predicting.links import assumptions
from oomph.records.prediction import Prediction
from oomph.records.script import Script, names_workload
from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.sensing.target import Target

if TYPE_CHECKING:
    from oomph.rehearsing.script.sandboxed import ScriptRehearser
    from oomph.rehearsing.traces import Request

Say = Callable[[str], None]

_NO_STEP = (
    "the script made no optimizer step while it was rehearsed, so this is a lower bound: the"
    " optimizer's state and step are missing"
)
_CHOICES = {
    "attention": ("as-is", "sdpa"),
    "loss": ("as-is", "chunked"),
    "adapters": ("none", "lora", "qlora"),
    "offload": ("activations", "optimizer", "zero"),
}


# ---- checking the request ------------------------------------------------------------------------


def what_to_train(workload: Workload | Script | str) -> Workload | Script | tuple[Path, str]:
    """Return the script, the workload, or the workload's place in a file. Raises UsageError."""
    from oomph.rehearsing.models_by_name import is_name, workload_file
    from oomph.rehearsing.traces import check_script, split

    if isinstance(workload, str):
        if is_name(workload):
            workload = workload_file(workload)
        if names_workload(workload):
            return split(workload)
        workload = Script(path=workload, directory=str(Path.cwd()))
    if isinstance(workload, Script) and workload.path is not None:
        check_script(Path(workload.directory, workload.path), workload.path)
    if isinstance(workload, Script) and sys.platform != "linux":
        raise NotOnThisSystem(
            "rehearsing a script",
            because="it runs in a sandbox of Linux's, in processes that are forked",
            attempt="a Workload in a file, oomph plan train.py:workload; or, on Windows, WSL",
        )
    return workload


def check_tricks(
    attention: str,
    loss: str,
    adapters: str,
    offload: Sequence[str],
    of_adapters: tuple[int | None, str | None] = (None, None),
) -> None:
    """Raise UsageError for the first unknown value, and for settings of adapters without any."""
    given = [("attention", attention), ("loss", loss), ("adapters", adapters)]
    for name, value in (*given, *(("offload", what) for what in offload)):
        if value not in _CHOICES[name]:
            raise UsageError(f"unknown {name} {value!r:.40}", attempt=" or ".join(_CHOICES[name]))
    if adapters == "none" and of_adapters != (None, None):
        raise UsageError(
            "rank and targets are those of adapters, and none are asked for",
            attempt="--adapters lora, or qlora",
        )


def refuse_measured_step(measured: object) -> None:
    """Raise UsageError if a measured step is given for a script."""
    if measured is not None:
        raise UsageError(
            "a measured step works only with a Workload, not yet with a script",
            because="oomph would have to rehearse the measured settings as well",
            attempt="a Workload, or leaving the measured step out",
        )


def refuse_keeps(keeps: str | None) -> None:
    """Raise UsageError if `keeps` is given for a script."""
    if keeps is not None:
        raise UsageError(
            "`keeps` applies to workloads, not to scripts",
            because="a script is rehearsed as it is, and `seen:` says what its loop keeps",
            attempt="leaving it out",
        )


def check_measured_step(
    step_s: float | None, described: tuple[object, ...], *, is_named: bool
) -> None:
    """Raise UsageError for an incomplete measured step, before a rehearsal of seconds."""
    if step_s is None:
        if any(each is not None for each in described):
            raise UsageError(
                "the settings of a measured step are given, but not its time",
                attempt="--measured-step 0.45s",
            )
        return
    micro_batch = described[0]
    if isinstance(micro_batch, int) and micro_batch < 1:
        raise UsageError(
            f"a measured step cannot have a micro-batch of {micro_batch}",
            attempt="the number of examples per forward pass, such as 4",
        )
    if not (math.isfinite(step_s) and step_s > 0):
        raise UsageError(
            f"a step cannot take {step_s} s",
            because="a measured step is the time of one whole optimizer step, in seconds",
            attempt="the mean of several steps after the first, such as 0.45",
        )
    if not is_named:
        raise UsageError(
            "a measured step needs the GPU's name",
            because="oomph scales other settings by the rates of the GPU that it was measured on",
            attempt="--gpu, with a name from oomph gpus --catalog",
        )


# ---- a workload ----------------------------------------------------------------------------------


def predict_workload(
    workload: Workload | tuple[Path, str],
    target: Target,
    request: Request,
    *,
    expandable_segments: bool,
    measured: tuple[Request, float] | None,
    say: Say,
) -> Prediction:
    """Rehearse a workload, or load its rehearsal, and predict one step.

    `measured` describes a measured step and its seconds: the predicted times are scaled to it.
    """
    return predict_workload_by_trace(
        workload,
        target,
        request,
        expandable_segments=expandable_segments,
        measured=measured,
        say=say,
    )[0]


def predict_workload_by_trace(
    workload: Workload | tuple[Path, str],
    target: Target,
    request: Request,
    *,
    expandable_segments: bool,
    measured: tuple[Request, float] | None,
    say: Say,
) -> tuple[Prediction, Trace]:
    """Return the prediction for a workload, and the trace that it was made from."""
    from oomph.records.generation import trace_capability

    capability = trace_capability(target.capability)
    trace, variant, notes = _traced(workload, request, capability, say)
    ready = target.with_torch(trace.torch_version)
    time, step_from = step_time(trace.ops, variant, ready.model), ready.step_from
    if measured is not None:
        like, seconds = measured
        known, with_, _ = _traced(workload, like, capability, say)
        reference = step_time(known.ops, with_, ready.model)
        time = speed.anchored(time, reference, seconds) if time and reference else None
        step_from = "measured step"
    variant = replace(variant, expandable_segments=expandable_segments)
    notes = [*notes, *ready.notes, *assumptions(variant, ready.model)]
    card = ready.card.among(variant)
    found = prediction.assemble(trace, variant, card, time=time, step_from=step_from, notes=notes)
    return found, trace


def _traced(
    workload: Workload | tuple[Path, str],
    request: Request,
    capability: tuple[int, int],
    say: Say,
) -> tuple[Trace, Variant, list[str]]:
    """Return the trace at the requested micro-batch, its variant, and notes on it."""
    from oomph.rehearsing import trace_store, traces

    found = None
    if isinstance(workload, tuple):
        found = trace_store.find(workload, request, capability)
    if found is None:
        if isinstance(workload, tuple):
            file, name = workload
            say(f"rehearsing {file}:{name}; other GPUs and micro-batches will not need it again")
        found = traces.trace(workload, request, capability)
        if isinstance(workload, tuple):
            trace_store.keep(workload, request, capability, found)
    chosen = trace_at(found.traces, found.variant.micro_batch)
    if chosen is not None:
        return chosen, found.variant, []
    exact = traces.trace(workload, request, capability, is_linear=False).traces[0]
    note = "allocations change order with the micro-batch, so exactly this size was rehearsed"
    return exact, found.variant, [note]


# ---- a script ------------------------------------------------------------------------------------


def predict_script(
    script: Script,
    target: Target,
    request: Request,
    *,
    has_own_precision: bool,
    expandable_segments: bool,
    say: Say,
    is_unprotected: bool,
    is_fresh: bool,
) -> Prediction:
    """Rehearse a script with the requested batch and tricks, and predict one step."""
    return predict_script_by_trace(
        script,
        target,
        request,
        has_own_precision=has_own_precision,
        expandable_segments=expandable_segments,
        say=say,
        is_unprotected=is_unprotected,
        is_fresh=is_fresh,
    )[0]


def predict_script_by_trace(
    script: Script,
    target: Target,
    request: Request,
    *,
    has_own_precision: bool,
    expandable_segments: bool,
    say: Say,
    is_unprotected: bool,
    is_fresh: bool,
) -> tuple[Prediction, Trace]:
    """Return the prediction for a script, and the trace that it was made from."""
    from oomph.rehearsing.script.sandboxed import rehearser_of

    with rehearser_of(
        script, target, say, is_unprotected=is_unprotected, is_fresh=is_fresh
    ) as rehearser:
        if has_own_precision:
            tricks = replace(request.tricks, precision=rehearser.own.precision)
            request = replace(request, tricks=tricks)
        variant = _variant(rehearser, request)
        if variant != rehearser.given:
            say("rehearsing it with the requested settings")
        try:
            trace = rehearser.trace(variant)
        except CannotBePutOn as error:
            raise error.error from None
    seen = rehearser.seen
    if not seen.has_stepped:
        trace = replace(trace, doubt=trace.doubt or _NO_STEP)
    ready = target.with_torch(trace.torch_version)
    time = step_time(trace.ops, variant, ready.model)
    expandable_segments = expandable_segments or seen.expandable_segments
    variant = replace(variant, expandable_segments=expandable_segments)
    notes = [*seen.approximations, *ready.notes]
    card, step_from = ready.card.among(variant), ready.step_from
    found = prediction.assemble(trace, variant, card, time=time, step_from=step_from, notes=notes)
    if not seen.is_batch_known:  # steps per second do not give samples per second then
        found = replace(found, samples_per_s=None)
    return replace(found, seen=seen), trace


def _variant(rehearser: ScriptRehearser, request: Request) -> Variant:
    """Return the script's own split of its batch, or the requested one for the same batch."""
    from oomph.rehearsing.traces import variant_for_batch

    if request.micro_batch is not None:
        return variant_for_batch(rehearser.batch_size, request)
    given = rehearser.given
    return replace(request.tricks, micro_batch=given.micro_batch, accumulation=given.accumulation)
