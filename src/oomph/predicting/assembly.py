"""Trace, a card, what is unknown -> Prediction.

Tensors and allocator are exact for the trace; the CUDA context, the convolutions' workspace and
the card's real capacity are intervals. Whether it fits is decided by replaying the requests under
the card's limit, at both ends of what is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomph.predicting.allocator import CachingAllocator
from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.device import SimulatedDevice
from oomph.predicting.overhead import Interval
from oomph.predicting.replay import Replayed, replay
from oomph.predicting.speed import StepTime
from oomph.predicting.timeline import by_category, by_module, find_peak, moment_of
from oomph.records.prediction import Prediction, Unknown, Verdict
from oomph.records.trace import Op, Trace
from oomph.records.workload import Variant

_CONVOLUTIONS = ("convolution", "convolution_backward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU of a prediction: its name, what CUDA can have of it, and what CUDA takes first."""

    name: str
    usable: Interval
    context: Interval


def assemble(
    trace: Trace,
    variant: Variant,
    card: Card,
    *,
    settings: AllocatorSettings | None = None,
    time: StepTime | None = None,
    notes: Sequence[str] = (),
) -> Prediction:
    """The prediction for one trace on one card."""
    settings = settings or AllocatorSettings()
    replayed = _replayed(trace, settings, None)
    peak = find_peak(trace)
    workspace = _convolution_workspace(trace.ops)
    unknowns = _unknowns(card, workspace)
    verdict, num_retries = _verdict(trace, settings, card, workspace)
    reserved = replayed.peak_reserved_bytes
    samples = variant.micro_batch * variant.accumulation
    return Prediction(
        gpu=card.name,
        variant=variant,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + card.context.likely_bytes,
        low_bytes=reserved + card.context.low_bytes,
        high_bytes=reserved + card.context.high_bytes + workspace,
        capacity_bytes=card.usable.likely_bytes,
        fits=verdict,
        num_retries=num_retries,
        by_category=by_category(peak.holders),
        by_module=by_module(peak.holders),
        peak_at=moment_of(trace, peak.at_event),
        step_s=None if time is None else time.step_s,
        samples_per_s=None if time is None else samples / time.step_s,
        unknowns=unknowns,
        notes=(*trace.notes, *notes),
    )


def _replayed(trace: Trace, settings: AllocatorSettings, limit_bytes: int | None) -> Replayed:
    device = SimulatedDevice() if limit_bytes is None else SimulatedDevice(max(limit_bytes, 0))
    sizes = [allocation.size_bytes for allocation in trace.allocations]
    requested = [size or 1 for size in sizes]  # torch asks for nothing where a tensor is empty
    events = [event for event in trace.events if sizes[abs(event) - 1]]
    return replay(CachingAllocator(settings, device), requested, events)


def _verdict(
    trace: Trace, settings: AllocatorSettings, card: Card, workspace_bytes: int
) -> tuple[Verdict, int]:
    """Does it fit at the worst of what is unknown, at the best, and with how many retries?"""
    usable, context = card.usable, card.context
    worst = usable.low_bytes - context.high_bytes - workspace_bytes
    best = usable.high_bytes - context.low_bytes
    likely = _replayed(trace, settings, usable.likely_bytes - context.likely_bytes)
    if _replayed(trace, settings, best).ran_out_at is not None:
        return "no", likely.num_retries
    fits_at_worst = _replayed(trace, settings, worst).ran_out_at is None
    return ("yes" if fits_at_worst else "uncertain"), likely.num_retries


def _convolution_workspace(ops: Sequence[Op]) -> int:
    """The most that cuDNN may add: a copy of the tensors of the largest convolution.

    Its choice of algorithm, and so its workspace, cannot be known from the model; it frees it
    after each call, and does without where there is no room.
    """
    return max((op.moved_bytes for op in ops if op.name in _CONVOLUTIONS), default=0)


def _unknowns(card: Card, workspace_bytes: int) -> tuple[Unknown, ...]:
    context, usable = card.context, card.usable
    found = [
        Unknown(
            what=f"the CUDA context ({context.because})",
            low_bytes=context.low_bytes,
            high_bytes=context.high_bytes,
            settled_by="one nvidia-smi reading after torch.ones(1, device='cuda')",
        )
    ]
    if usable.low_bytes != usable.high_bytes:
        found.append(
            Unknown(
                what=f"what the driver leaves of the card's memory ({usable.because})",
                low_bytes=usable.low_bytes,
                high_bytes=usable.high_bytes,
                settled_by="torch.cuda.get_device_properties(0).total_memory",
            )
        )
    if workspace_bytes:
        found.append(
            Unknown(
                what="the workspace of cuDNN's convolutions",
                low_bytes=0,
                high_bytes=workspace_bytes,
                settled_by="torch.cuda.max_memory_reserved() after one step on the card",
            )
        )
    return tuple(found)
