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
from oomph.predicting.speed import BUS, StepTime, with_micro_steps
from oomph.predicting.timeline import by_category, by_module, find_peak, moment_of
from oomph.records.prediction import Prediction, StepFrom, Unknown, Verdict
from oomph.records.trace import Op, Trace
from oomph.records.workload import Variant
from oomph.units import MIB

_CONVOLUTIONS = ("convolution", "convolution_backward")

# The widths of the bar are not derived. They were chosen after the rows of `make accuracy` had
# been seen, so that "within the bar" there is no test of them: all rows of transformers but one, of
# unknown lengths, lie within 1 % and 40 MiB; a CNN (MNASNet) took 4 % less than its replay.
_UNSEEN_RATIO = 0.01
_UNSEEN_BYTES = 40 * MIB
_REORDERED_RATIO = 0.04


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
    step_from: StepFrom = "datasheet",
    notes: Sequence[str] = (),
) -> Prediction:
    """The prediction for one trace on one card."""
    settings = settings or AllocatorSettings()
    on_card = replay_trace(trace, settings, card.usable.likely_bytes - card.context.likely_bytes)
    # Where the card's end is met, the allocator gives its cache back and reserves less than it
    # would on a larger one; where even that is too much, the larger one shows by how much.
    replayed = on_card if on_card.ran_out_at is None else replay_trace(trace, settings, None)
    peak = find_peak(trace)
    workspace = _convolution_workspace(trace.ops)
    reserved = replayed.peak_reserved_bytes
    reordered = _lower_with_convolutions(trace.ops, reserved)
    unseen = int(_UNSEEN_RATIO * reserved) + _UNSEEN_BYTES
    verdict = _verdict(trace, settings, card, workspace + unseen)
    if trace.doubt and verdict == "yes":
        verdict = "uncertain"
    samples = variant.micro_batch * variant.accumulation
    return Prediction(
        gpu=card.name,
        variant=variant,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + card.context.likely_bytes,
        low_bytes=reserved + card.context.low_bytes - unseen - reordered,
        high_bytes=reserved + card.context.high_bytes + unseen + workspace,
        capacity_bytes=card.usable.likely_bytes,
        fits=verdict,
        num_retries=on_card.num_retries,
        by_category=by_category(peak.holders),
        by_module=by_module(peak.holders),
        peak_at=moment_of(trace, peak.at_event),
        host_bytes=trace.host_peak_bytes,
        bus_bytes=_bus_bytes(trace.ops, variant.accumulation),
        step_s=None if time is None else time.step_s,
        step_low_s=None if time is None else time.low_s,
        step_high_s=None if time is None else time.high_s,
        step_from=None if time is None else step_from,
        samples_per_s=None if time is None else samples / time.step_s,
        unknowns=_unknowns(card, unseen, workspace, reordered),
        notes=(*trace.notes, *notes),
        doubt=trace.doubt,
    )


def replay_trace(
    trace: Trace, settings: AllocatorSettings | None = None, limit_bytes: int | None = None
) -> Replayed:
    """What becomes of a trace on a device of so many bytes; None: of one that has no end."""
    device = SimulatedDevice() if limit_bytes is None else SimulatedDevice(max(limit_bytes, 0))
    sizes = [allocation.size_bytes for allocation in trace.allocations]
    requested = [size or 1 for size in sizes]  # torch asks for nothing where a tensor is empty
    events = [event for event in trace.events if sizes[abs(event) - 1]]
    streams = [allocation.stream for allocation in trace.allocations]
    return replay(
        CachingAllocator(settings or AllocatorSettings(), device),
        requested,
        events,
        streams if any(streams) else None,
    )


def _verdict(trace: Trace, settings: AllocatorSettings, card: Card, unknown_bytes: int) -> Verdict:
    """Does it fit at the best of what is unknown, and at the worst?"""
    usable, context = card.usable, card.context
    best = usable.high_bytes - context.low_bytes
    worst = usable.low_bytes - context.high_bytes - unknown_bytes
    if replay_trace(trace, settings, best).ran_out_at is not None:
        return "no"
    return "yes" if replay_trace(trace, settings, worst).ran_out_at is None else "uncertain"


def _bus_bytes(ops: Sequence[Op], num_micro_steps: int) -> int:
    ops = with_micro_steps(ops, num_micro_steps)
    return sum(op.moved_bytes for op in ops if op.name in BUS)


def _convolution_workspace(ops: Sequence[Op]) -> int:
    """The most that cuDNN may add: a copy of the tensors of the largest convolution.

    Its choice of algorithm, and so its workspace, cannot be known from the model; it frees it
    after each call, and does without where there is no room.
    """
    return max((op.moved_bytes for op in ops if op.name in _CONVOLUTIONS), default=0)


def _lower_with_convolutions(ops: Sequence[Op], reserved_bytes: int) -> int:
    """cuDNN's choices also move the order of requests, and so the cache that is left over."""
    has_convolutions = any(op.name in _CONVOLUTIONS for op in ops)
    return int(_REORDERED_RATIO * reserved_bytes) if has_convolutions else 0


def _unknowns(
    card: Card, unseen_bytes: int, workspace_bytes: int, reordered_bytes: int
) -> tuple[Unknown, ...]:
    context, usable = card.context, card.usable
    found = [
        Unknown(
            what="what kernels and library versions take that no rule here knows",
            low_bytes=-unseen_bytes,
            high_bytes=unseen_bytes,
            settled_by="torch.cuda.max_memory_reserved() after two steps on the card",
        ),
    ]
    if context.low_bytes != context.high_bytes:
        found.append(
            Unknown(
                what=f"the CUDA context ({context.because})",
                low_bytes=context.low_bytes,
                high_bytes=context.high_bytes,
                settled_by="oomph calibrate, once, on a machine with this GPU",
            )
        )
    if usable.low_bytes != usable.high_bytes:
        found.append(
            Unknown(
                what=f"what the driver leaves of the card's memory ({usable.because})",
                low_bytes=usable.low_bytes,
                high_bytes=usable.high_bytes,
                settled_by="oomph calibrate, once, on a machine with this GPU",
            )
        )
    if workspace_bytes:
        found.append(
            Unknown(
                what="the workspace of cuDNN's convolutions, and the order that it brings",
                low_bytes=-reordered_bytes,
                high_bytes=workspace_bytes,
                settled_by="torch.cuda.max_memory_reserved() after one step on the card",
            )
        )
    return tuple(found)
