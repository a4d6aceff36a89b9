"""Trace, a card, what is unknown -> Prediction.

Tensors and allocator are exact for the trace; the CUDA context, the convolutions' workspace and
the card's real capacity are intervals, and so is what NCCL takes on several GPUs. Whether it fits
is decided by replaying the requests under the card's limit, at both ends of what is unknown and
with every rule for workspaces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from oomph.predicting.allocator_settings import AllocatorSettings
from oomph.predicting.kernels import BUS
from oomph.predicting.micro_steps import parts_of_work
from oomph.predicting.overhead import NOTHING, Interval, nccl, together
from oomph.predicting.speed import StepTime
from oomph.predicting.weighing import Weights, weights_of
from oomph.predicting.work import Work, work_of
from oomph.records.prediction import Prediction, StepFrom, Unknown, Verdict
from oomph.records.sharding import num_groups
from oomph.records.trace import Trace
from oomph.records.workload import How, Variant
from oomph.units import MIB

# What is left beside the unknowns that have names, as a share of what torch reserves.
# One GPU: a study that predicted further published runs of transformers, a part of them seen, was
# never more than 5 % below them; encoder-decoders came out too high, and it advises 10 % there. The
# rows of `make accuracy` need less: of 29 runs of transformers on one GPU, by five sources, 28 lie
# within 1 %, 40 MiB and their rounding. That a width chosen from four sources holds for the fifth
# fails for one row only, which is 3.5 % above, and whose lengths are not published.
# Several GPUs: nine rows of one source need up to 5.6 %, the only other row 0.0 %. No other source
# would have foretold the nine, so this is them and a margin, and no blind width.
_UNSEEN_BELOW_RATIO = 0.10
_UNSEEN_ABOVE_RATIO = 0.05
_UNSEEN_ABOVE_RATIO_OF_SEVERAL = 0.08
_UNSEEN_BYTES = 40 * MIB
# The emulated GPU has the CPU's kernels: most keep for backward what CUDA's keep (the tests compare
# every request), and some do not. Judgement.
_UNSEEN_RATIO_OF_EMULATED = 0.01
_RECURRENT = "_cudnn_rnn"  # the CPU's kernels keep far more than its


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The GPU of a prediction: its name, what CUDA can have of it, and what CUDA takes first."""

    name: str
    usable: Interval
    context: Interval
    cudnn: Interval = NOTHING  # what cuDNN takes beside, from the first convolution on
    has_fast_tf32: bool = False  # whether tensor cores are faster than fp32 units
    nccl: Interval = NOTHING  # of a GPU that does not train alone
    is_emulated: bool = False  # without workspaces of cuDNN, and kernels that nobody has seen

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
    weights = weights_on(card, trace, settings or AllocatorSettings())
    return assemble_weights(
        weights,
        variant,
        card,
        host_bytes=trace.host_peak_bytes,
        bus_bytes=bus_bytes(work_of(trace.ops), variant.accumulation),
        time=time,
        step_from=step_from,
        notes=(*trace.notes, *notes),
        doubt=trace.doubt or doubt_on(card, (op.name for op in trace.ops)),
    )


def weights_on(card: Card, trace: Trace, settings: AllocatorSettings) -> Weights:
    """What a trace weighs on a card."""
    if card.is_emulated:
        trace = replace(trace, convolutions=())
    return weights_of(trace, settings, has_fast_tf32=card.has_fast_tf32)


def doubt_on(card: Card, op_names: Iterable[str]) -> str | None:
    """Why a rehearsal with CUDA's kernels does not speak for a card."""
    if not card.is_emulated or _RECURRENT not in op_names:
        return None
    return "the emulated GPU's recurrent layers are the CPU's, which keep more than cuDNN's"


def assemble_weights(
    weights: Weights,
    variant: Variant,
    card: Card,
    *,
    host_bytes: int = 0,
    bus_bytes: int = 0,
    time: StepTime | None = None,
    step_from: StepFrom = "datasheet",
    notes: tuple[str, ...] = (),
    doubt: str | None = None,
) -> Prediction:
    """The same for a trace of which all that counts is known already."""
    outside = card.outside(has_convolutions=weights.has_convolutions)
    limit_bytes = card.usable.likely_bytes - outside.likely_bytes
    on_card, replayed = weights.replays.likely(limit_bytes)
    reserved = replayed.peak_reserved_bytes
    least, most = weights.replays.reserved_bytes(limit_bytes)
    if weights.measures_convolutions:
        most = max(most, limit_bytes)
    with_outputs = weights.with_outputs.likely(limit_bytes)[1].peak_reserved_bytes
    of_outputs = max(with_outputs - reserved, 0)
    below, above = _unseen(reserved, variant, card)
    verdict = _verdict(weights, card.usable, outside, above)
    return Prediction(
        gpu=card.name,
        variant=variant,
        allocated_bytes=replayed.peak_allocated_bytes,
        reserved_bytes=reserved,
        device_bytes=reserved + outside.likely_bytes,
        low_bytes=least + outside.low_bytes - below,
        high_bytes=most + of_outputs + outside.high_bytes + above,
        capacity_bytes=card.usable.likely_bytes,
        fits="uncertain" if doubt and verdict == "yes" else verdict,
        num_retries=on_card.num_retries,
        by_category=weights.by_category,
        by_module=weights.by_module,
        peak_at=weights.peak_at,
        host_bytes=host_bytes,
        bus_bytes=bus_bytes,
        step_s=None if time is None else time.step_s,
        step_low_s=None if time is None else time.low_s,
        step_high_s=None if time is None else time.high_s,
        step_from=None if time is None else step_from,
        samples_per_s=None if time is None else variant.batch_size / time.step_s,
        unknowns=(
            _unseen_as_unknown(below, above, card),
            *_of_outputs(of_outputs),
            *_unknowns(weights, card, (least - reserved, most - reserved)),
        ),
        notes=notes,
        doubt=doubt,
        outputs_bytes=of_outputs,
    )


def _unseen(reserved_bytes: int, how: How, card: Card) -> tuple[int, int]:
    """How far below and above a figure the truth may be, for reasons that have no name."""
    below_ratio, above_ratio, both_bytes = _unseen_parts(how, card)
    return (
        int(below_ratio * reserved_bytes) + both_bytes,
        int(above_ratio * reserved_bytes) + both_bytes,
    )


def unseen_above_bytes(reserved_bytes: int, how: How, card: Card) -> int:
    """How far above a figure the truth may be, for reasons that have no name."""
    return _unseen(reserved_bytes, how, card)[1]


def _unseen_parts(how: How, card: Card) -> tuple[float, float, int]:
    """Shares of a figure, below and above, and bytes either way."""
    if card.is_emulated:
        return _UNSEEN_RATIO_OF_EMULATED, _UNSEEN_RATIO_OF_EMULATED, 0
    above_ratio = _UNSEEN_ABOVE_RATIO if how.num_gpus == 1 else _UNSEEN_ABOVE_RATIO_OF_SEVERAL
    return _UNSEEN_BELOW_RATIO, above_ratio, _UNSEEN_BYTES


def room_for_figures(how: How, card: Card, outside: Interval) -> tuple[int, int]:
    """What torch may reserve by its figure, so that it fits at the worst, and at the best.

    What a loop keeps of the model's outputs is not in it: whoever has the loop knows that.
    """
    below_ratio, above_ratio, both_bytes = _unseen_parts(how, card)
    worst = (card.usable.low_bytes - outside.high_bytes - both_bytes) / (1 + above_ratio)
    best = (card.usable.high_bytes - outside.low_bytes + both_bytes) / (1 - below_ratio)
    return max(int(worst), 0), max(int(best), 0)


def _verdict(weights: Weights, usable: Interval, context: Interval, unseen_bytes: int) -> Verdict:
    """Does it fit at the best of what is unknown, and at the worst?"""
    if not weights.replays.any_fits(usable.high_bytes - context.low_bytes):
        return "no"
    worst = usable.low_bytes - context.high_bytes - unseen_bytes
    # First what is one replay at most, and seldom needs less.
    fits = weights.with_outputs.likely_fits(worst) and weights.replays.all_fit(worst)
    return "yes" if fits else "uncertain"


def bus_bytes(work: Work, num_micro_steps: int) -> int:
    """What goes over the bus in a step of so many micro-steps."""
    moved = [op.moved_bytes if op.name in BUS else 0 for op in work.kernels]
    if not any(moved):
        return 0
    return sum(
        repeats * sum(moved[number] for number in numbers.tolist())
        for numbers, repeats in parts_of_work(work, num_micro_steps)
    )


def _unseen_as_unknown(below_bytes: int, above_bytes: int, card: Card) -> Unknown:
    of_gpus = "what kernels and library versions take that no rule here knows"
    of_emulated = "what the CPU's kernels keep for backward unlike CUDA's"
    return Unknown(
        what=of_emulated if card.is_emulated else of_gpus,
        low_bytes=-below_bytes,
        high_bytes=above_bytes,
        settled_by="torch.cuda.max_memory_reserved() after two steps on the card",
    )


def _of_outputs(more_bytes: int) -> list[Unknown]:
    if not more_bytes:
        return []
    keeps = (
        "whether your loop keeps the model's outputs (`outputs = model(...)`) until the next step"
    )
    return [
        Unknown(
            what=keeps,
            low_bytes=0,
            high_bytes=more_bytes,
            settled_by="--keeps outputs or --keeps nothing",
        )
    ]


def _unknowns(weights: Weights, card: Card, workspace: tuple[int, int]) -> list[Unknown]:
    context, usable = card.context, card.usable
    found = []
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
    return found + (_of_convolutions(weights, card, workspace) if weights.has_convolutions else [])


def _of_convolutions(weights: Weights, card: Card, workspace: tuple[int, int]) -> list[Unknown]:
    measures = ", which cuDNN measures here (torch.backends.cudnn.benchmark)"
    found = [
        Unknown(
            what="the workspace of cuDNN's convolutions, and the holes that it leaves"
            + (measures if weights.measures_convolutions else ""),
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
