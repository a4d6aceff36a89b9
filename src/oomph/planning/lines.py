"""Rehearsals at two micro-batches -> the micro-batches for which the line through them is valid.

A line goes through any two points, so a third rehearsal, far away, checks it before a plan with the
same forward and backward is shown. If nothing follows its line, a few micro-batches are rehearsed
directly, and only those are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from oomph.planning.deadline import Deadline
from oomph.planning.rehearsals import (
    Rehearsed,
    Rehearser,
    Unrehearsed,
    complete,
    footprint_of_one,
    in_short,
    in_words,
    noting_failures,
    variant_for_passes,
)
from oomph.predicting.combinations import (
    Combinations,
    PassSettings,
    combination_of,
    pass_settings_of,
)
from oomph.predicting.footprint import Footprint
from oomph.predicting.reductions import NONE, Multiprocessors
from oomph.predicting.scaling import NotAffine, affine, ordered
from oomph.predicting.timeline import find_peak
from oomph.records.gpu_model import GpuModel
from oomph.records.trace import Trace
from oomph.records.workload import Variant

# How far a rehearsal may lie off the line, as a share of its peak: some workspaces grow in steps.
# It is a fifth of the error bar's allowance for unexplained differences. Judgement.
OFF_RATIO = 0.01
# If each micro-batch needs its own rehearsals and there are this many or more, every other one is
# skipped. Judgement.
_MANY = 4


def is_on_line(line_bytes: int, seen_bytes: int) -> bool:
    """Return whether a rehearsal's peak agrees with the line through two others."""
    return abs(line_bytes - seen_bytes) <= OFF_RATIO * seen_bytes


def trace_at(traces: Sequence[Trace], micro_batch: int) -> Trace | None:
    """Return the trace at a micro-batch: its own if there is one, else from the line.

    The line goes through the first two traces. None if there is no such line, or if the last trace,
    which is farther away, is not on it.
    """
    itself = next((trace for trace in traces if trace.micro_batch == micro_batch), None)
    if itself is not None:
        return ordered(itself)
    try:
        line, far = affine(*traces[:2]), traces[-1]
        line_bytes = find_peak(line.at(far.micro_batch)).live_bytes
        is_true = is_on_line(line_bytes, find_peak(far).live_bytes)
        return line.at(micro_batch) if is_true else None
    except NotAffine:
        return None


class Failed(Exception):
    """The parts of one variant could not be put together, so it is not compared."""

    def __init__(self, variant: Variant, error: Exception) -> None:
        self.variant, self.error = variant, error
        super().__init__(str(error))


class Lines:
    """Memory and time of every variant that lies on a line or was rehearsed itself."""

    def __init__(
        self,
        rehearsed: Rehearsed,
        rehearser: Rehearser | None,
        model: GpuModel,
        say: Callable[[str], None],
        multiprocessors: Multiprocessors = NONE,
        deadline: Deadline | None = None,
    ) -> None:
        self.deadline = deadline or Deadline()
        self.rehearsed, self._rehearser, self._model, self._say = rehearsed, rehearser, model, say
        self._multiprocessors = multiprocessors
        self._line = Combinations(
            pass_footprints=rehearsed.pass_footprints,
            steps=rehearsed.steps,
            model=model,
            known_replays=rehearsed.replays,
            adds_up=rehearsed.adds_up,
            multiprocessors=multiprocessors,
        )
        self.broken: set[PassSettings] = set()  # their own rehearsals were off the line
        self.points: dict[int, Combinations] = {}  # by micro-batch, if there are no lines
        # combinations that could not be put together
        self.failed: dict[tuple[object, ...], Failed] = {}

    def of(self, variant: Variant) -> Combinations:
        """Return the combinations that hold a known variant."""
        return self.points.get(variant.micro_batch, self._line)

    def knows(self, variant: Variant) -> bool:
        if self.why_failed(variant) is not None:
            return False
        if self.points and variant.micro_batch > 1:
            return variant.micro_batch in self.points and self.of(variant).knows(variant)
        return self._line.knows(variant) and pass_settings_of(variant) not in self.broken

    def why_failed(self, variant: Variant) -> Failed | None:
        return self.failed.get(combination_of(variant)) if self.failed else None

    def why_nothing_is_known(self) -> str:
        """Return why there might be no variant to compare: what the first of them failed with."""
        if self.failed:
            first = next(iter(self.failed.values()))
            return f"their rehearsals could not be put together ({first})"
        if self.rehearsed.failed:
            return next(iter(self.rehearsed.failed.values()))
        return "the model's memory does not grow linearly with the micro-batch"

    def leave_out(self, failed: Failed) -> None:
        """Drop a variant at every micro-batch. Raises `failed` if it was dropped before."""
        key = combination_of(failed.variant)
        if key in self.failed:
            raise failed.error
        self.failed[key] = failed

    def complete(self, wanted: Sequence[Variant]) -> None:
        """Rehearse the parts of these variants that are still missing. Raises Unrehearsed."""
        complete(self.rehearsed, self._rehearser, wanted, self._say, self.deadline)

    def _required(self) -> Rehearser:
        if self._rehearser is None:
            raise Unrehearsed
        return self._rehearser

    # ---- checking a line with a third rehearsal --------------------------------------------------

    def holds(self, far: Variant) -> bool:
        """Return whether the line holds up to this variant. A line that fails is dropped."""
        settings = pass_settings_of(far)
        if settings in self.broken:
            return False
        if settings.only_at:  # it was rehearsed at exactly this micro-batch
            return True
        try:
            is_true = self._is_seen_on_line(settings, variant_for_passes(far, far.micro_batch))
        except Unrehearsed:
            raise
        except Exception as error:  # noqa: BLE001 - this large a micro-batch cannot be trained
            self.rehearsed.failed[settings] = in_short(error)
            del self.rehearsed.pass_footprints[settings]
            return False
        if not is_true:
            self.broken.add(settings)
        return is_true

    def has_confirmed(self, far: Variant) -> bool:
        """Return whether a rehearsal that was made already shows that the line holds so far."""
        settings = pass_settings_of(far)
        if settings.only_at:
            return True
        is_seen = variant_for_passes(far, far.micro_batch) in self.rehearsed.exact
        return is_seen and self.holds(far)

    def _is_seen_on_line(self, settings: PassSettings, wanted: Variant) -> bool:
        """Return whether a rehearsal at least this far away is on the line, with any optimizer."""
        for variant, seen in self.rehearsed.exact.items():
            size = variant.micro_batch
            is_alike = size >= wanted.micro_batch and pass_settings_of(variant) == settings
            is_known = is_alike and self._line.knows(variant)
            if is_known and is_on_line(self._line.least_bytes(variant), seen.live_bytes(size)):
                return True
        size = wanted.micro_batch
        line_bytes = self.rehearsed.pass_footprints[settings].live_bytes(size)
        return is_on_line(line_bytes, self._seen(wanted).live_bytes(size))

    def _seen(self, variant: Variant) -> Footprint:
        """Return the forward and backward of the variant's own rehearsal."""
        if variant not in self.rehearsed.exact:
            rehearser = self._required()
            self._say(f"rehearsing {in_words(variant)} with {variant.micro_batch} examples")
            self.rehearsed.exact[variant] = footprint_of_one(rehearser.trace(variant))
        return self.rehearsed.exact[variant]

    # ---- rehearsing single micro-batches without a line ------------------------------------------

    def use_points_for(self, wanted: Iterable[Variant]) -> None:
        """Rehearse a few of these variants directly if none of them has a line."""
        several = [variant for variant in wanted if variant.micro_batch > 1]
        if not several or any(self.knows(variant) for variant in several):
            return
        sizes = sorted({variant.micro_batch for variant in several}, reverse=True)
        for micro_batch in sizes[::2] if len(sizes) >= _MANY else sizes:
            if self.points and self.deadline.is_over:
                self.deadline.leave_out([f"micro-batches of {micro_batch}"])
                continue
            chosen = [variant for variant in several if variant.micro_batch == micro_batch]
            self.points[micro_batch] = self._point(micro_batch, chosen)

    def _point(self, micro_batch: int, variants: Sequence[Variant]) -> Combinations:
        """Rehearse forward and backward of these variants at one micro-batch."""
        alike = {variant_for_passes(variant, micro_batch) for variant in variants}
        pass_footprints: dict[PassSettings, Footprint] = {}
        for variant in sorted(alike, key=repr):
            with noting_failures(self.rehearsed, pass_settings_of(variant), variant):
                pass_footprints[pass_settings_of(variant)] = self._seen(variant)
        return Combinations(
            pass_footprints=pass_footprints,
            steps=self.rehearsed.steps,
            model=self._model,
            adds_up=self.rehearsed.adds_up,
            multiprocessors=self._multiprocessors,
        )
