"""The verb predict: Workload -> Trace -> Prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from oomph.predicting.assembly import Card
    from oomph.predicting.speed import StepTime
    from oomph.records.catalog import GpuModel
    from oomph.records.prediction import Prediction
    from oomph.records.trace import Trace
    from oomph.records.workload import Precision, Variant, Workload
    from oomph.tracing.traces import Traced, Wish


def predict(
    workload: Workload | str,
    *,
    gpu: str | None = None,
    gpu_memory: int | str | None = None,
    micro_batch: int | None = None,
    precision: Precision = "fp32",
    checkpointing: str = "none",
    say: Callable[[str], None] | None = None,
) -> Prediction:
    """What a training step will take on a GPU that need not be here.

    `workload` is a Workload, or the place of one: "train.py:workload". `checkpointing` is "none",
    "blocks" (every block is recomputed), "every-2" (every second), "blocks:0,3" (the first and the
    fourth) or "selective" (what is cheap to recompute).
    Nothing is trained and no memory of the model's size is used; the rehearsal runs in a child
    process. `say` is told when something takes seconds.
    """
    from oomph.predicting import assembly
    from oomph.records.checkpointing import check_checkpointing
    from oomph.tracing import traces
    from oomph.training import apply

    model, memory_bytes, assumed = find_model(gpu, gpu_memory)
    capability = traces.kind_of(model.compute_capability or (8, 0))
    place = find_place(workload)
    wish = traces.Wish(
        micro_batch=micro_batch,
        precision=precision,
        checkpointing=check_checkpointing(checkpointing),
    )
    traced = _traced(place, wish, capability, say or (lambda _: None))
    notes = [assumed] if assumed and memory_bytes is None else []
    chosen = _at_micro_batch(traced)
    if chosen is None:
        notes.append("the micro-batch changes the order of allocations: traced at this very size")
        chosen = traces.trace_exactly(place, wish, capability, apply).traces[0]
    return assembly.assemble(
        chosen,
        traced.variant,
        card_of(model, gpu or f"a GPU of {gpu_memory}", memory_bytes, chosen.torch_version),
        time=step_time(chosen, traced.variant, model),
        notes=notes,
    )


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


def find_place(workload: Workload | str) -> Workload | tuple[Path, str]:
    from oomph.tracing import loading

    return loading.split(workload) if isinstance(workload, str) else workload


def _at_micro_batch(traced: Traced) -> Trace | None:
    """The trace for the micro-batch that was asked for; None if no line goes through the two."""
    from oomph.predicting.scaling import NotAffine, affine

    if len(traced.traces) == 1:
        return traced.traces[0]
    try:
        return affine(*traced.traces).at(traced.variant.micro_batch)
    except NotAffine:
        return None


def find_model(
    name: str | None, memory: int | str | None
) -> tuple[GpuModel, int | None, str | None]:
    """The GPU to predict for, its memory where that is given apart, and what its name left open."""
    from oomph.errors import UsageError
    from oomph.units import parse_bytes
    from oomph.verbs.readings import find_gpu

    if name is None and memory is None:
        raise UsageError("no GPU is named", attempt="--gpu v100-16gb, or --gpu-memory 12GiB")
    memory_bytes = parse_bytes(memory) if isinstance(memory, str) else memory
    if name is None:
        return _unnamed_gpu(), memory_bytes, None
    found = find_gpu(name)
    return found.model, memory_bytes, found.assumed


def card_of(model: GpuModel, name: str, memory_bytes: int | None, torch_version: str) -> Card:
    from oomph.predicting.assembly import Card
    from oomph.predicting.overhead import Interval, context, usable_bytes

    usable = usable_bytes(model)
    if memory_bytes is not None:
        usable = Interval(memory_bytes, memory_bytes, memory_bytes, "as given")
    return Card(name=name, usable=usable, context=context(model, torch_version))


def _unnamed_gpu() -> GpuModel:
    """A GPU of which only the memory is known."""
    from oomph.records.catalog import GpuModel

    return GpuModel(
        name="unnamed",
        title="an unnamed GPU",
        architecture="unknown",
        memory_bytes=0,
        measured_bytes=None,
        memory_bandwidth_bytes_per_s=None,
        fp32_flops=None,
        tf32_flops=None,
        fp16_flops=None,
        bf16_flops=None,
        matmul_bf16_flops=None,
        num_sms=None,
        compute_capability=None,
        nvlink_bytes_per_s=None,
        pcie=None,
        sources={},
    )


def step_time(trace: Trace, variant: Variant, model: GpuModel) -> StepTime | None:
    from oomph.predicting import speed

    ops = speed.with_micro_steps(trace.ops, variant.accumulation)
    if variant.precision == "tf32":
        return speed.estimate(ops, model, matmul_precision="tf32")
    return speed.estimate(ops, model)
