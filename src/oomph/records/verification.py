"""Verification: what oomph predicted for training on one GPU, beside what was measured there.

It is written to a file that people attach to a public issue, so nothing in it names the user, the
machine, a path or a line of a script (`without_private_parts`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from oomph.records.alignment import Unmatched
from oomph.records.prediction import Verdict
from oomph.records.trace import Phase

Scale = Literal["full", "tiny"]
Kind = Literal["zoo", "workload", "script"]
Figure = Literal["allocated", "reserved", "device"]
Outcome = Literal["right", "wrong", "not measured"]
_PATH = re.compile(r"\S*[/\\]\S*")
_MOST_OF_PROBLEM = 300  # characters
VERSION = 1  # of the file; a change that an older reader would misunderstand counts it up


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The GPU and the software that something was measured with. None: not known."""

    gpu_name: str
    is_emulated: bool
    total_bytes: int  # as torch reports it
    compute_capability: tuple[int, int]
    num_sms: int | None
    driver_version: str | None
    torch_version: str
    cuda_version: str | None  # that torch was built for
    cudnn_version: str | None
    python_version: str
    oomph_version: str
    allocator: str  # PYTORCH_ALLOC_CONF while it was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class OnGpu:
    """The GPU that a process trains on: by UUID, or emulated with this much memory."""

    uuid: str | None = None
    driver_version: str | None = None
    emulated_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """What a measured run asked of the allocator, from the build of its model on.

    Event i+1 requests sizes[i] bytes, -(i+1) frees them. A mark is the number of events after the
    build, and after each step that the optimizer made.
    """

    sizes: tuple[int, ...]
    lines: tuple[str, ...]  # "train.py:12" for each of `sizes`, as far as known; "" if not
    events: tuple[int, ...]
    marks: tuple[int, ...]
    is_whole: bool = True  # False: the history was too short for it


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What training on the GPU really took. None: not known, or not comparable here."""

    allocated_bytes: int | None  # torch.cuda.max_memory_allocated
    reserved_bytes: int | None  # torch.cuda.max_memory_reserved
    device_bytes: int | None  # the driver's figure of the process, at the allocator's peak
    step_s: float | None  # median
    num_steps: int  # that the optimizer made
    num_timed: int  # steps in `step_s`
    ran_out: bool = False  # of the GPU's memory; the figures are then those until it did
    tf32: bool | None = None  # torch.backends.cuda.matmul.allow_tf32, after training
    cudnn_benchmark: bool | None = None
    notes: tuple[str, ...] = ()  # what limits the comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The answer of the process that trained."""

    site: Site
    measured: Measured
    recorded: Recorded
    reserved_bytes: int  # at the end; the driver's figure of the process belongs to it


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What oomph predicted, with the error bar of each figure."""

    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    low_bytes: int  # of device_bytes
    high_bytes: int
    outside_low_bytes: int  # what CUDA takes outside torch's allocator
    outside_high_bytes: int
    step_s: float | None
    step_low_s: float | None
    step_high_s: float | None
    fits: Verdict
    doubt: str | None

    def bar(self, figure: Figure) -> tuple[int, int]:
        """Return the least and the most that the measured figure may be.

        The bar of the device without what lies outside of torch's allocator is the bar of what
        torch reserves. What it allocates has the same distance to both ends.
        """
        if figure == "device":
            return self.low_bytes, self.high_bytes
        low, high = (
            self.low_bytes - self.outside_low_bytes,
            self.high_bytes - self.outside_high_bytes,
        )
        if figure == "reserved":
            return low, high
        shift = self.allocated_bytes - self.reserved_bytes
        return low + shift, high + shift


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How a model was trained, in the words of `oomph plan`. Files last longer than `Variant`."""

    micro_batch: int
    accumulation: int
    precision: str
    tricks: tuple[str, ...]  # by name, those of the precision and the batch included


@dataclass(frozen=True, slots=True, kw_only=True)
class Located:
    """A predicted block, and what in the model requests it."""

    op: str
    module: str  # "" is the model itself
    phase: Phase
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstDifference:
    """The first place at which the predicted and the recorded requests part."""

    when: str  # "while the model is built", "in step 1"
    predicted: Located | None  # None: the GPU's run requests a block more
    recorded_bytes: int | None  # None: oomph predicts a block more
    recorded_at: str | None  # the user's line
    after: Located | None  # the last block before it that both request


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """The requests to the allocator, predicted and recorded, matched in order by size."""

    num_predicted: int
    num_recorded: int
    num_matched: int
    explained: tuple[Unmatched, ...]  # only recorded; the prediction counts them in its error bar
    only_predicted: tuple[Unmatched, ...]
    only_recorded: tuple[Unmatched, ...]
    first_difference: FirstDifference | None

    @property
    def matched_ratio(self) -> float:
        """Return the share of all blocks on either side that have a partner or an explanation."""
        num_explained = sum(each.num_blocks for each in self.explained)
        whole = max(self.num_predicted, self.num_recorded - num_explained)
        return self.num_matched / whole if whole else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """One model: predicted, trained, compared."""

    name: str
    settings: Settings | None  # None: it could not be rehearsed
    predicted: Predicted | None
    measured: Measured | None  # None: it could not be trained
    sequence: Sequence | None
    problem: str | None = None  # why something is None
    assumed: tuple[str, ...] = ()  # for values that a rehearsal does not have

    def pairs(self) -> Iterator[tuple[Figure, int, int]]:
        """Yield each figure that is known on both sides: its name, predicted, measured."""
        if self.predicted is None or self.measured is None or self.measured.ran_out:
            return
        figures: tuple[Figure, ...] = ("allocated", "reserved", "device")
        for figure in figures:
            measured = getattr(self.measured, f"{figure}_bytes")
            if measured is not None:
                yield figure, getattr(self.predicted, f"{figure}_bytes"), measured

    def error_ratio(self, figure: Figure) -> float | None:
        """Return predicted / measured - 1; None if one of them is not known."""
        for name, predicted, measured in self.pairs():
            if name == figure and measured:
                return predicted / measured - 1
        return None

    @property
    def worst_error_ratio(self) -> float | None:
        errors = [predicted / measured - 1 for _, predicted, measured in self.pairs() if measured]
        return max(errors, key=abs, default=None)

    @property
    def outside(self) -> tuple[Figure, ...]:
        """Return the figures whose measurement lies outside the error bar."""
        if self.predicted is None:
            return ()
        found = []
        for figure, _, measured in self.pairs():
            low, high = self.predicted.bar(figure)
            if not low <= measured <= high:
                found.append(figure)
        return tuple(found)

    @property
    def outcome(self) -> Outcome:
        """Return whether the prediction of the memory was right. Times do not count."""
        predicted, measured = self.predicted, self.measured
        if predicted is None or measured is None:
            return "not measured"
        if measured.ran_out:
            return "wrong" if predicted.fits == "yes" else "right"
        if measured.reserved_bytes is None:
            return "not measured"
        return "wrong" if predicted.fits == "no" or self.outside else "right"

    @property
    def is_time_in_range(self) -> bool | None:
        """Return whether the step time lies in the predicted range; None if it is not known."""
        predicted, measured = self.predicted, self.measured
        if predicted is None or measured is None or measured.step_s is None:
            return None
        if predicted.step_low_s is None or predicted.step_high_s is None:
            return None
        return predicted.step_low_s <= measured.step_s <= predicted.step_high_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What was verified on one GPU in one go."""

    site: Site | None  # None: nothing was measured
    kind: Kind
    scale: Scale  # of the zoo's models
    verified: tuple[Verified, ...]
    num_asked: int
    version: int = VERSION
    was_interrupted: bool = False
    notes: tuple[str, ...] = ()

    @property
    def num_right(self) -> int:
        return sum(each.outcome == "right" for each in self.verified)

    @property
    def num_measured(self) -> int:
        return sum(each.outcome != "not measured" for each in self.verified)

    @property
    def is_right(self) -> bool | None:
        """Return whether every measured prediction is right; None if nothing was measured."""
        return self.num_right == self.num_measured if self.num_measured else None

    @property
    def worst_error_ratio(self) -> float | None:
        errors = [each.worst_error_ratio for each in self.verified]
        return max((error for error in errors if error is not None), key=abs, default=None)


def without_private_parts(verification: Verification) -> Verification:
    """Return a verification that can be posted: without lines, file names and error texts.

    Names of modules stay, because a difference cannot be found without them.
    """
    return replace(
        verification,
        verified=tuple(
            _without_private_parts(each, verification) for each in verification.verified
        ),
    )


def _without_private_parts(each: Verified, of: Verification) -> Verified:
    problem = each.problem
    if of.kind != "zoo":
        problem = None if problem is None else problem.partition(":")[0]
        each = replace(each, name=f"a {of.kind}", assumed=())
    elif problem is not None:
        problem = _PATH.sub("...", problem)[:_MOST_OF_PROBLEM]
    each = replace(each, problem=problem)
    sequence = each.sequence
    if sequence is None:
        return each
    first = sequence.first_difference
    if first is not None:
        first = replace(first, recorded_at=None)
    recorded = _without_labels(sequence.only_recorded)
    return replace(each, sequence=replace(sequence, first_difference=first, only_recorded=recorded))


def _without_labels(blocks: tuple[Unmatched, ...]) -> tuple[Unmatched, ...]:
    """Return the blocks without the user's lines, those of one size together."""
    counts: dict[int, int] = {}
    for each in blocks:
        counts[each.size_bytes] = counts.get(each.size_bytes, 0) + each.num_blocks
    return tuple(
        Unmatched(label="", size_bytes=size_bytes, num_blocks=num_blocks)
        for size_bytes, num_blocks in counts.items()
    )
