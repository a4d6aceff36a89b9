"""The verb predict: Workload -> Trace -> Prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from pathlib import Path

    from oomph.predicting.speed import StepTime
    from oomph.records.prediction import Prediction
    from oomph.records.script import Script
    from oomph.records.trace import Trace
    from oomph.records.workload import (
        Adapters,
        Attention,
        Keeps,
        Loss,
        Precision,
        Variant,
        Workload,
    )
    from oomph.tracing.traces import Traced, Wish
    from oomph.verbs.targets import Target


def predict(
    workload: Workload | Script | str,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    micro_batch: int | None = None,
    precision: Precision | None = None,
    checkpointing: str = "none",
    optimizer: str = "as-is",
    attention: Attention = "as-is",
    loss: Loss = "as-is",
    optimizer_in_backward: bool = False,
    offload: Collection[str] = (),
    adapters: Adapters = "none",
    expandable_segments: bool = False,
    measured_step_s: float | None = None,
    measured_micro_batch: int | None = None,
    measured_precision: Precision | None = None,
    measured_checkpointing: str | None = None,
    num_gpus: int = 1,
    sharding: str | None = None,
    keeps: Keeps | None = None,
    unprotected: bool = False,
    fresh: bool = False,
    say: Callable[[str], None] | None = None,
) -> Prediction:
    """What a training step will take on a GPU that need not be here.

    `workload` is a Workload, or the place of one: "train.py:workload"; or a script as it is: its
    path, or a Script with its arguments. A script runs in a sandbox, up to its second optimizer
    step; `unprotected` lets it run where there can be none, `fresh` rehearses it again though the
    answer is kept. `precision` is by default that of the
    script, and "fp32" of a workload. `checkpointing` is "none",
    "blocks" (every block is recomputed), "every-2" (every second), "blocks:0,3" (the first and the
    fourth) or "selective" (what is cheap to recompute). `optimizer` is "as-is", the user's own as
    "fused", "foreach" or "for-loop", or with state in "8-bit", or another: "adafactor", "sgd".
    `attention="sdpa"` exchanges eager attention for torch's fused one, `loss="chunked"` computes a
    language model's loss in pieces, `optimizer_in_backward` uses each gradient up at once,
    `offload` moves "activations" or the "optimizer" to the host, `adapters` trains "lora" or
    "qlora" instead of the whole model.
    On several GPUs, `sharding` is "ddp" (the default: each holds everything), "fsdp" (the model
    and its optimizer are divided among all) or "hybrid" (divided within groups of GPUs); the
    micro-batch and all memory are those of one GPU.
    `keeps="outputs"` is for a loop that keeps what the model returned until the next step, as
    `outputs = model(...)` does, "nothing" for one that does not; by default as the workload says.
    Nothing is trained and no memory of the model's size is used; the rehearsal runs in a child
    process. `say` is told when something takes seconds.

    `measured_step_s` is what one whole optimizer step took on that GPU, at the `measured_`
    micro-batch, precision and checkpointing; what is not given is as asked for. The time of the
    prediction is then scaled to it.
    """
    from dataclasses import replace

    from oomph.records.checkpointing import check_checkpointing
    from oomph.records.script import Script
    from oomph.records.sharding import check_sharding
    from oomph.records.workload import check_keeps, check_optimizer
    from oomph.tracing.traces import Wish
    from oomph.verbs.targets import find_target

    offload = (offload,) if isinstance(offload, str) else tuple(offload)
    _check_tricks(attention, loss, adapters, offload)
    target = find_target(gpu, gpu_memory)
    script = as_script(workload)
    wish = Wish(
        micro_batch=micro_batch,
        precision=precision or "fp32",
        checkpointing=check_checkpointing(checkpointing),
        optimizer=check_optimizer(optimizer),
        attention=attention,
        loss=loss,
        optimizer_in_backward=optimizer_in_backward,
        offload_activations="activations" in offload,
        offload_optimizer="optimizer" in offload,
        adapters=adapters,
        num_gpus=num_gpus,
        sharding=check_sharding(sharding, num_gpus),
        keeps=check_keeps(keeps),
    )
    like = replace(
        wish,
        micro_batch=measured_micro_batch or micro_batch,
        precision=measured_precision or wish.precision,
        checkpointing=check_checkpointing(measured_checkpointing or checkpointing),
    )
    described = (measured_micro_batch, measured_precision, measured_checkpointing)
    _check_measured_step(measured_step_s, described, is_named=gpu is not None)
    measured = None if measured_step_s is None else (like, measured_step_s)
    if script is not None:
        from oomph.verbs.script_predictions import predict_script

        _refuse_measured_step(measured)
        refuse_keeps(keeps)
        return predict_script(
            script,
            target,
            wish,
            has_own_precision=precision is None,
            expandable_segments=expandable_segments,
            say=say or _say_nothing,
            is_unprotected=unprotected,
            is_fresh=fresh,
        )
    assert not isinstance(workload, Script)  # noqa: S101 - as_script has taken those
    asked = _Asked(find_place(workload), target, expandable_segments, measured)
    return asked.predict(wish, say or _say_nothing)


def _check_tricks(attention: str, loss: str, adapters: str, offload: Sequence[str]) -> None:
    _check_one_of("attention", attention, ("as-is", "sdpa"))
    _check_one_of("loss", loss, ("as-is", "chunked"))
    _check_one_of("adapters", adapters, ("none", "lora", "qlora"))
    for what in offload:
        _check_one_of("offload", what, ("activations", "optimizer"))


class _Asked(NamedTuple):
    """A question, as far as it is not about how to train."""

    place: Workload | tuple[Path, str]
    target: Target
    expandable_segments: bool
    measured: tuple[Wish, float] | None  # a way to train, and the seconds that its step took

    def predict(self, wish: Wish, say: Callable[[str], None]) -> Prediction:
        from dataclasses import replace

        from oomph.predicting import assembly
        from oomph.predicting.allocator_settings import AllocatorSettings
        from oomph.predicting.communication import assumptions
        from oomph.tracing.traces import kind_of
        from oomph.verbs.step_times import step_time

        capability = kind_of(self.target.capability)
        notes: list[str] = []
        trace, variant = _trace_for(self.place, wish, capability, say, notes)
        ready = self.target.with_torch(trace.torch_version)
        time = step_time(trace.ops, variant, ready.model)
        if self.measured is not None:
            like, seconds = self.measured
            measured, with_ = _trace_for(self.place, like, capability, say, [])
            time = _anchored(time, step_time(measured.ops, with_, ready.model), seconds)
        return assembly.assemble(
            trace,
            replace(variant, expandable_segments=self.expandable_segments),
            ready.card.among(variant),
            settings=AllocatorSettings(expandable_segments=self.expandable_segments),
            time=time,
            step_from=ready.step_from if self.measured is None else "measured step",
            notes=[*notes, *ready.notes, *assumptions(variant, ready.model)],
        )


def _trace_for(
    place: Workload | tuple[Path, str],
    wish: Wish,
    capability: tuple[int, int],
    say: Callable[[str], None],
    notes: list[str],
) -> tuple[Trace, Variant]:
    """The trace at the very micro-batch that is wished for; what is to be said is added."""
    from oomph.tracing import traces
    from oomph.training import apply

    traced = _traced(place, wish, capability, say)
    chosen = _at_micro_batch(traced)
    if chosen is None:
        notes.append("the micro-batch changes the order of allocations: traced at this very size")
        chosen = traces.trace_exactly(place, wish, capability, apply).traces[0]
    return chosen, traced.variant


def _say_nothing(_: str) -> None: ...


def _check_one_of(name: str, value: str, known: tuple[str, ...]) -> None:
    from oomph.errors import UsageError

    if value not in known:
        raise UsageError(f"{value!r:.40} is no way for {name}", attempt=" or ".join(known))


def _traced(
    place: Workload | tuple[Path, str],
    wish: Wish,
    capability: tuple[int, int],
    say: Callable[[str], None],
) -> Traced:
    """Rehearse, unless the same was rehearsed before."""
    from oomph.tracing import kept, traces
    from oomph.training import apply

    if not isinstance(place, tuple):
        return traces.trace(place, wish, capability, apply)
    found = kept.find(place, wish, capability)
    if found is None:
        say(f"rehearsing {place[0]}:{place[1]}; other GPUs and micro-batches are then at once")
        found = traces.trace(place, wish, capability, apply)
        kept.keep(place, wish, capability, found)
    return found


def as_script(workload: Workload | Script | str) -> Script | None:
    """The script that is meant; None: it is a workload."""
    from pathlib import Path

    from oomph.records.script import Script, names_workload

    if isinstance(workload, Script):
        return workload
    if isinstance(workload, str) and not names_workload(workload):
        return Script(path=workload, directory=str(Path.cwd()))
    return None


def _refuse_measured_step(measured: object) -> None:
    from oomph.errors import UsageError

    if measured is not None:
        raise UsageError(
            "a measured step cannot be held against a script yet",
            because="the step that was measured would have to be rehearsed as well",
            attempt="a Workload, or the prediction without --measured-step",
        )


def refuse_keeps(keeps: str | None) -> None:
    """Raises UsageError where it is said of a script."""
    from oomph.errors import UsageError

    if keeps is not None:
        raise UsageError(
            "`keeps` applies to workloads, not to scripts",
            because="a script is rehearsed as it is, and `seen:` says what its loop keeps",
            attempt="leaving it out",
        )


def find_place(workload: Workload | str) -> Workload | tuple[Path, str]:
    from oomph.tracing import loading

    return loading.split(workload) if isinstance(workload, str) else workload


def _at_micro_batch(traced: Traced) -> Trace | None:
    """The trace for the micro-batch that was asked for; None if no line goes through them."""
    from oomph.predicting.scaling import NotAffine, affine, ordered

    wanted = traced.variant.micro_batch
    itself = next((trace for trace in traced.traces if trace.micro_batch == wanted), None)
    if itself is not None:
        return ordered(itself)
    try:
        line = affine(*traced.traces[:2])
        far = traced.traces[-1]
        return line.at(wanted) if _is_alike(line.at(far.micro_batch), far) else None
    except NotAffine:
        return None


def _is_alike(told: Trace, seen: Trace) -> bool:
    """Whether a rehearsal far away says what the line through two others told."""
    from oomph.predicting.timeline import find_peak
    from oomph.verbs.plan_lines import OFF_RATIO

    seen_bytes = find_peak(seen).live_bytes
    return abs(find_peak(told).live_bytes - seen_bytes) <= OFF_RATIO * seen_bytes


def _check_measured_step(
    step_s: float | None, described: tuple[object, ...], *, is_named: bool
) -> None:
    """Before anything is rehearsed, which takes seconds."""
    import math

    from oomph.errors import UsageError

    if step_s is None:
        if any(each is not None for each in described):
            raise UsageError(
                "it is said how a step was measured, and not what it took",
                attempt="--measured-step 0.45, in seconds",
            )
        return
    micro_batch = described[0]
    if isinstance(micro_batch, int) and micro_batch < 1:
        raise UsageError(
            f"a step cannot have been measured at a micro-batch of {micro_batch}",
            attempt="the number of examples at a time, as in 4",
        )
    if not (math.isfinite(step_s) and step_s > 0):
        raise UsageError(
            f"a measured step of {step_s} s makes no sense",
            because="it is the time of one whole optimizer step, in seconds",
            attempt="the mean of some steps after the first, as in 0.45",
        )
    if not is_named:
        raise UsageError(
            "a measured step is of no use without the GPU's name",
            because="other settings are scaled by the rates of the GPU that it was measured on",
            attempt="--gpu, with a GPU of oomph gpus --catalog",
        )


def _anchored(
    time: StepTime | None, reference: StepTime | None, measured_s: float
) -> StepTime | None:
    from oomph.predicting import speed

    return (
        None if time is None or reference is None else speed.anchored(time, reference, measured_s)
    )
