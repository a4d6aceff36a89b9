"""Trace, card, unknowns -> Prediction.

Tensors and allocator are exact for the trace. The CUDA context, the convolution workspaces, the
card's real capacity and, on several GPUs, NCCL's memory are intervals. Whether it fits is decided
by replaying the requests under the card's limit, at both ends of the unknowns and with every
workspace rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from oomph.predicting.allocator_settings import settings_for
from oomph.predicting.demand import Demand, demand_of
from oomph.predicting.footprint import Work, work_of
from oomph.predicting.overhead import NOTHING, Interval, nccl, together
from oomph.predicting.pricing import BUS
from oomph.predicting.reductions import NONE, Multiprocessors, sized_on
from oomph.predicting.residuals import AROUND_ANY_BYTES, Kind, kind_of, width_of
from oomph.predicting.speed import StepTime, parts_of_work
from oomph.records.gpu_model import Tf32
from oomph.records.prediction import Prediction, StepFrom, Unknown, Verdict
from oomph.records.trace import Trace
from oomph.records.workload import Variant, num_groups

# The emulated GPU runs the CPU's kernels: most keep for backward what CUDA's keep (the tests
# compare every request), and some do not. Judgement.
_UNSEEN_RATIO_OF_EMULATED = 0.01
_RECURRENT = "_cudnn_rnn"  # the CPU's kernels keep far more than cuDNN's


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU of a prediction: its name, its usable memory, and what CUDA takes first."""

    name: str
    usable: Interval
    context: Interval
    cudnn: Interval = NOTHING  # from the first convolution on
    tf32: Tf32 = "none"
    multiprocessors: Multiprocessors = NONE  # how many blocks its kernels can run at once
    nccl: Interval = NOTHING  # if training on several GPUs
    is_emulated: bool = False  # without cuDNN's workspaces and unknown kernels

    def among(self, variant: Variant) -> Card:
        """Return the card as one of a variant's GPUs."""
        return replace(self, nccl=nccl(num_groups(variant)) if variant.num_gpus > 1 else NOTHING)

    def outside(self, *, has_convolutions: bool) -> Interval:
        """Return all memory taken outside torch's allocator."""
        found = together(self.context, self.cudnn) if has_convolutions else self.context
        return found if self.nccl is NOTHING else together(found, self.nccl)


def assemble(
    trace: Trace,
    variant: Variant,
    card: Card,
    *,
    time: StepTime | None = None,
    step_from: StepFrom = "datasheet",
    notes: Sequence[str] = (),
) -> Prediction:
    """Return the prediction for one trace on one card."""
    return assemble_demand(
        demand_on(card, trace, variant),
        variant,
        card,
        kind=kind_of(trace.ops, variant.num_gpus),
        host_bytes=trace.host_peak_bytes,
        bus_bytes=bus_bytes(work_of(trace.ops), variant.accumulation),
        time=time,
        step_from=step_from,
        notes=(*trace.notes, *notes),
        doubt=trace.doubt or doubt_on(card, (op.name for op in trace.ops)),
        example_tokens=trace.example_tokens,
    )


def demand_on(card: Card, trace: Trace, variant: Variant) -> Demand:
    """Return what a trace needs on a card."""
    if card.is_emulated:
        trace = replace(trace, convolutions=())
    sized = sized_on(trace, card.multiprocessors)
    return demand_of(sized, settings_for(variant), card.tf32)


def doubt_on(card: Card, op_names: Iterable[str]) -> str | None:
    """Return why a rehearsal with CUDA's kernels is not valid for a card; None if it is."""
    if not card.is_emulated or _RECURRENT not in op_names:
        return None
    return "the emulated GPU's recurrent layers are the CPU's, which keep more than cuDNN's"


def assemble_demand(
    demand: Demand,
    variant: Variant,
    card: Card,
    *,
    kind: Kind,
    host_bytes: int = 0,
    bus_bytes: int = 0,
    time: StepTime | None = None,
    step_from: StepFrom = "datasheet",
    notes: tuple[str, ...] = (),
    doubt: str | None = None,
    example_tokens: int | None = None,
) -> Prediction:
    """Return the prediction from a trace's known demand."""
    samples_per_s = None if time is None else variant.batch_size / time.step_s
    outside = card.outside(has_convolutions=demand.has_convolutions)
    limit_bytes = card.usable.likely_bytes - outside.likely_bytes
    on_card, replayed = demand.replays.likely(limit_bytes)
    reserved = replayed.peak_reserved_bytes
    least, most = demand.replays.reserved_bytes(limit_bytes)
    if demand.measures_convolutions:
        most = max(most, limit_bytes)
    with_outputs = demand.with_outputs.likely(limit_bytes)[1].peak_reserved_bytes
    of_outputs = max(with_outputs - reserved, 0)
    unseen = unseen_bytes(reserved, kind, card)
    verdict = _verdict(demand, card.usable, outside, unseen)
    return Prediction(
        gpu=card.name,
        variant=variant,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + outside.likely_bytes,
        low_bytes=least + outside.low_bytes - unseen,
        high_bytes=most + of_outputs + outside.high_bytes + unseen,
        capacity_bytes=card.usable.likely_bytes,
        fits="uncertain" if doubt and verdict == "yes" else verdict,
        num_retries=on_card.num_retries,
        by_category=demand.by_category,
        by_module=demand.by_module,
        peak_at=demand.peak_at,
        host_bytes=host_bytes,
        bus_bytes=bus_bytes,
        step_s=None if time is None else time.step_s,
        step_low_s=None if time is None else time.low_s,
        step_high_s=None if time is None else time.high_s,
        step_from=None if time is None else step_from,
        samples_per_s=samples_per_s,
        tokens_per_s=samples_per_s and example_tokens and samples_per_s * example_tokens,
        unknowns=tuple(
            _unknowns(demand, card, kind, unseen, of_outputs, (least - reserved, most - reserved))
        ),
        notes=notes,
        doubt=doubt,
        outputs_bytes=of_outputs,
    )


def unseen_bytes(reserved_bytes: int, kind: Kind, card: Card) -> int:
    """Return how far from a figure the truth may be, either way, for unexplained reasons."""
    ratio, around_bytes = _unseen_parts(kind, card)
    return int(ratio * reserved_bytes) + around_bytes


def _unseen_parts(kind: Kind, card: Card) -> tuple[float, int]:
    """Return the share of a figure, and the bytes beside it."""
    if card.is_emulated:
        return _UNSEEN_RATIO_OF_EMULATED, 0
    return width_of(kind).ratio, AROUND_ANY_BYTES


def room_for_figures(kind: Kind, card: Card, outside: Interval) -> tuple[int, int]:
    """Return how large torch's predicted figure may be to fit in the worst and the best case.

    Model outputs that a loop keeps are not included, because they depend on the loop.
    """
    ratio, around_bytes = _unseen_parts(kind, card)
    worst = (card.usable.low_bytes - outside.high_bytes - around_bytes) / (1 + ratio)
    best = (card.usable.high_bytes - outside.low_bytes + around_bytes) / (1 - ratio)
    return max(int(worst), 0), max(int(best), 0)


def _verdict(demand: Demand, usable: Interval, outside: Interval, unseen_bytes: int) -> Verdict:
    """Return whether it fits in the best and in the worst case of the unknowns."""
    if not demand.replays.any_fits(usable.high_bytes - outside.low_bytes):
        return "no"
    worst = usable.low_bytes - outside.high_bytes - unseen_bytes
    # The check that fails most often comes first: it is one replay at most.
    fits = (
        demand.with_outputs.likely_fits(worst)
        and demand.replays.all_fit(worst)
        and demand.with_outputs.all_fit(worst)  # outputs and workspaces leave holes together
    )
    return "yes" if fits else "uncertain"


def bus_bytes(work: Work, num_micro_steps: int) -> int:
    """Return the bytes that cross the bus in a step of this many micro-steps."""
    moved = [op.moved_bytes if op.name in BUS else 0 for op in work.kernels]
    if not any(moved):
        return 0
    return sum(
        repeats * sum(moved[number] for number in numbers.tolist())
        for numbers, repeats in parts_of_work(work, num_micro_steps)
    )


def _unknowns(
    demand: Demand,
    card: Card,
    kind: Kind,
    unseen_bytes: int,
    outputs_bytes: int,
    workspace: tuple[int, int],
) -> Iterator[Unknown]:
    """Yield the parts of the error bar."""
    context, usable, convolves = card.context, card.usable, demand.has_convolutions
    of_gpus = (
        f"what kernels and library versions take that no rule here knows ({width_of(kind).because})"
    )
    of_emulated = "what the CPU's kernels keep for backward unlike CUDA's"
    measures = ", which cuDNN measures here (torch.backends.cudnn.benchmark)"
    keeps = (
        "whether your loop keeps the model's outputs (`outputs = model(...)`) until the next step"
    )
    calibrate = "oomph calibrate, once, on a machine with this GPU"
    rows: tuple[tuple[bool, str, Interval | tuple[int, int], str], ...] = (
        (
            True,
            of_emulated if card.is_emulated else of_gpus,
            (-unseen_bytes, unseen_bytes),
            "torch.cuda.max_memory_reserved() after two steps on the card",
        ),
        (
            outputs_bytes > 0,
            keeps,
            (0, outputs_bytes),
            "--keeps outputs or --keeps nothing",
        ),
        (
            context.low_bytes != context.high_bytes,
            f"the CUDA context ({context.because})",
            context,
            calibrate,
        ),
        (
            card.nccl is not NOTHING,
            f"the buffers of NCCL ({card.nccl.because})",
            card.nccl,
            "nvidia-smi before and after the first all-reduce of all ranks",
        ),
        (
            usable.low_bytes != usable.high_bytes,
            f"what the driver leaves of the card's memory ({usable.because})",
            usable,
            calibrate,
        ),
        (
            convolves,
            "the workspace of cuDNN's convolutions, and the holes that it leaves"
            + (measures if demand.measures_convolutions else ""),
            workspace,
            "torch.cuda.max_memory_reserved() after one step on the card",
        ),
        (
            convolves and card.cudnn.high_bytes > 0,
            f"cuDNN's own kernels ({card.cudnn.because})",
            card.cudnn,
            "one nvidia-smi reading after a first convolution",
        ),
    )
    for is_open, what, size, settled_by in rows:
        if is_open:
            low, high = size if isinstance(size, tuple) else (size.low_bytes, size.high_bytes)
            yield Unknown(what=what, low_bytes=low, high_bytes=high, settled_by=settled_by)
