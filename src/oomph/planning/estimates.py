"""A variant and a GPU -> its memory, its time and whether it fits.

An answer comes either from rehearsals of the variant's parts or from a rehearsal of the variant
itself.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from oomph.errors import CannotBePutOn
from oomph.planning.bounds import (
    held_by,
    sharing_limit,
    spared_by_freeing_gradients,
    without_hopeless,
)
from oomph.planning.deadline import Deadline
from oomph.planning.lines import Failed, Lines
from oomph.planning.ranking import Checked
from oomph.planning.rehearsal_store import RehearsalStore
from oomph.planning.rehearsals import (
    Rehearsed,
    Rehearser,
    Unrehearsed,
    footprint_of_one,
    in_words,
)
from oomph.predicting import speed
from oomph.predicting.allocator_settings import settings_for
from oomph.predicting.combinations import Combinations, key_of
from oomph.predicting.demand import Demand, demand_from, unlimited_peaks
from oomph.predicting.footprint import Footprint, Work, trace_at, work_of
from oomph.predicting.links import assumptions, links_of
from oomph.predicting.overhead import Interval
from oomph.predicting.prediction import (
    assemble_demand,
    bus_bytes,
    demand_on,
    doubt_on,
    room_for_figures,
    unseen_bytes,
)
from oomph.predicting.rates import MatmulPrecision
from oomph.predicting.reductions import sized_on
from oomph.predicting.replay import Replayed, replay_requests
from oomph.predicting.residuals import Kind
from oomph.predicting.scaling import ordered
from oomph.predicting.speed import StepTime
from oomph.records.gpu_model import GpuModel
from oomph.records.plan import MicroBatchLimits, Plan, PlanOptions, Rejected
from oomph.records.prediction import Prediction, Verdict
from oomph.records.trace import Op, Trace
from oomph.records.workload import Variant
from oomph.sensing.target import Target
from oomph.tricks.definition import Severity

# Allocator events to replay while looking for the largest micro-batch. Judgement: they take about
# 0.03 s of CPU per plan.
_MOST_EVENTS = 10_000

T = TypeVar("T")


def _failing_alone(
    method: Callable[[Estimates, Variant], T],
) -> Callable[[Estimates, Variant], T]:
    """Turn an error in one variant into Failed, so that the search can go on without it.

    The workload as given has to work, so its errors reach the user.
    """

    @functools.wraps(method)
    def guarded(estimates: Estimates, variant: Variant, /) -> T:
        try:
            return method(estimates, variant)
        except (Unrehearsed, Failed, CannotBePutOn):
            raise
        except Exception as error:
            raise Failed(variant, error) from error

    return guarded


class Estimates:
    """Memory and time of the variants of one workload on one GPU."""

    def __init__(
        self,
        options: PlanOptions,
        target: Target,
        rehearsed: Rehearsed,
        say: Callable[[str], None],
        rehearser: Rehearser | None = None,
        store: RehearsalStore | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Predict the workload as given. Raises Unrehearsed.

        `store` has traces of whole variants from earlier questions.
        """
        self.rehearsed, self._rehearser, self._say = rehearsed, rehearser, say
        self._store = store
        self._capability = target.capability
        self.limit_host_bytes = target.host_bytes  # None: unknown
        self._ready = target.with_torch(rehearsed.torch_version)
        self.card = self._ready.filled_to(options.target_ratio)
        on = self.card.multiprocessors
        self.lines = Lines(rehearsed, rehearser, self._ready.rated, say, on, deadline)
        self._has_workspaces = rehearsed.has_convolutions and not self.card.is_emulated
        self.refuted: set[Variant] = set()  # their own rehearsal showed that they do not fit
        self._checked: dict[Variant, Checked] = {}
        self._bar_ratios: dict[bool, float] = {}  # key: whether on several GPUs
        self._traces: dict[Variant, Trace] = {}  # rehearsed for this question
        self.as_is = self.predicted(_as_given(options, rehearsed), is_exact=True)

    # ---- from rehearsals of its parts ------------------------------------------------------------

    def without_hopeless(
        self,
        pairs: Sequence[tuple[Variant, Variant]],
        changes_in: Callable[[Variant], tuple[Severity, ...]],
    ) -> tuple[list[Variant], tuple[Rejected, ...]]:
        """Return the variants to compare, and why others cannot fit (see `bounds.py`)."""
        own = self.as_is.variant
        footprint, _ = self._footprint(own, is_exact=True)
        limit_bytes = self.card.usable.high_bytes - self.outside.low_bytes
        held = held_by(footprint, own.micro_batch)
        return without_hopeless(pairs, held, limit_bytes, changes_in)

    def sharing_limit(self, compared: Sequence[Variant], batch_size: int) -> str | None:
        """Return why FSDP on more GPUs is no help where nothing fits (see `bounds.py`)."""
        known = [one for one in compared if self.knows(one)]
        limit_bytes = self.card.usable.high_bytes
        return sharing_limit(known, batch_size, self.least_bytes, limit_bytes)

    def knows(self, variant: Variant) -> bool:
        return self.lines.knows(variant)

    @_failing_alone
    def seconds(self, variant: Variant) -> float | None:
        """Return the time of an optimizer step; None if unknown or not rehearsed."""
        return self.lines.of(variant).seconds(variant) if self.knows(variant) else None

    @_failing_alone
    def paced_seconds(self, variant: Variant) -> Sequence[float]:
        """Return the time at each pace that host and bus may have; empty if unknown."""
        return self.lines.of(variant).paced_seconds(variant) if self.knows(variant) else ()

    @_failing_alone
    def host_bytes(self, variant: Variant) -> int:
        return self.lines.of(variant).host_bytes(variant)

    def has_host_for(self, variant: Variant) -> bool:
        """Return whether the host has the memory for it, as far as that is known.

        Each GPU has a process of its own, all on one host.
        """
        limit = self.limit_host_bytes
        return limit is None or self.host_bytes(variant) * variant.num_gpus <= limit

    @_failing_alone
    def reserved_bytes(self, variant: Variant) -> int:
        return self.lines.of(variant).reserved_bytes(variant)

    @_failing_alone
    def least_bytes(self, variant: Variant) -> int:
        """Return a lower bound of the variant's device memory."""
        return self.lines.of(variant).least_bytes(variant) + self.outside.low_bytes

    @_failing_alone
    def spared_by_freeing_gradients(self, variant: Variant) -> int:
        """Return what the peak would shrink by if forward began without gradients."""
        if variant.num_gpus > 1:  # DDP's buckets stay anyway
            return 0
        footprint = self.lines.of(variant).footprint(variant)
        return spared_by_freeing_gradients(footprint, variant.micro_batch)

    def may_fit(self, variant: Variant) -> bool:
        """Return whether the variant's lower bound fits."""
        return self.least_bytes(variant) <= self.card.usable.high_bytes

    @_failing_alone
    def may_fit_in_backward(self, variant: Variant) -> bool:
        """Return whether the lower bound would fit with the optimizer stepping in backward."""
        least = self.lines.of(variant).least_in_backward_bytes(variant)
        return least + self.outside.low_bytes <= self.card.usable.high_bytes

    @_failing_alone
    def check(self, variant: Variant) -> Checked:
        """Replay the variant from its parts, unless its own rehearsal already refuted it."""
        if variant not in self._checked:
            outside, combinations = self.outside_of(variant), self.lines.of(variant)
            least = combinations.least_bytes(variant)
            if least > self.card.usable.high_bytes - outside.low_bytes:  # no replay can change that
                return Checked(device_bytes=least + outside.likely_bytes, fits="no")
            fits = "no" if variant in self.refuted else self._fits(variant, outside)
            device_bytes = combinations.reserved_bytes(variant) + outside.likely_bytes
            self._checked[variant] = Checked(device_bytes=device_bytes, fits=fits)
        return self._checked[variant]

    def check_anew(self) -> None:
        """Forget all checks, because a rehearsal made since may contradict them."""
        self._checked.clear()

    def _fits(self, variant: Variant, outside: Interval) -> Verdict:
        """Return the verdict as a prediction gives it: "yes" if it fits even in the worst case."""
        usable, combinations = self.card.usable, self.lines.of(variant)
        if not combinations.passes(variant, usable.high_bytes - outside.low_bytes):
            return "no"
        worst = usable.low_bytes - outside.high_bytes - self._unseen_bytes(variant, outside)
        fits = combinations.passes(variant, worst)
        if fits and not self._has_workspaces:  # with workspaces the learnt bar includes the outputs
            fits = combinations.passes_with_outputs(variant, worst)
        return "yes" if fits and not self.as_is.doubt else "uncertain"

    def _unseen_bytes(self, variant: Variant, outside: Interval) -> int:
        """Return how far the truth may lie above the variant's figure."""
        usable, combinations = self.card.usable, self.lines.of(variant)
        if self._has_workspaces:
            return int(combinations.reserved_bytes(variant) * self._bar_ratio_of(variant))
        limit_bytes = usable.likely_bytes - outside.likely_bytes
        reserved = combinations.reserved_bytes_within(variant, limit_bytes)
        return unseen_bytes(reserved, self.kind_of(variant), self.card)

    def kind_of(self, variant: Variant) -> Kind:
        """Return which of the error bars the variant has."""
        return "model on several GPUs" if variant.num_gpus > 1 else self.rehearsed.kind

    @property
    def room_bytes(self) -> int:
        """Return the bytes that torch may reserve in the worst case."""
        room = self.card.usable.low_bytes - self.outside.high_bytes
        return int(room / (1 + self._bar_ratios[False]))

    @property
    def outside(self) -> Interval:
        """Return the memory taken outside torch's allocator on one GPU."""
        return self.card.outside(has_convolutions=self._has_workspaces)

    def outside_of(self, variant: Variant) -> Interval:
        return self.card.among(variant).outside(has_convolutions=self._has_workspaces)

    def _bar_ratio_of(self, variant: Variant) -> float:
        """Return how far the error bar reaches above the figure, as a ratio, for this model."""
        return self._bar_ratios.get(variant.num_gpus > 1, self._bar_ratios[False])

    def _learn_bar(self, prediction: Prediction) -> None:
        """Learn the error bar from the first prediction for one GPU and the first for several.

        Memory outside torch's allocator has an interval of its own and is left out.
        """
        outside = self.outside_of(prediction.variant)
        above = prediction.high_bytes - prediction.device_bytes
        ratio = max(above - outside.high_bytes + outside.likely_bytes, 0)
        is_among_several = prediction.variant.num_gpus > 1
        self._bar_ratios.setdefault(is_among_several, ratio / max(prediction.reserved_bytes, 1))

    # ---- predictions -----------------------------------------------------------------------------

    def predicted(self, variant: Variant, *, is_exact: bool) -> Prediction:
        """Predict from a rehearsal of the variant itself (`is_exact`) or of its parts."""
        demand, work, host_bytes = self._demand(variant, is_exact=is_exact)
        found = assemble_demand(
            demand,
            variant,
            self.card.among(variant),
            kind=self.kind_of(variant),
            host_bytes=host_bytes,
            bus_bytes=bus_bytes(work, variant.accumulation),
            time=step_time(work, variant, self._ready.model),
            step_from=self._ready.step_from,
            notes=(
                *self.rehearsed.notes,
                *self._ready.notes,
                *assumptions(variant, self._ready.model),
            ),
            doubt=self.rehearsed.doubt or doubt_on(self.card, (op.name for op in work.kernels)),
        )
        if is_exact:
            self._learn_bar(found)
        return found

    def predicted_row(self, variant: Variant, *, is_exact: bool) -> Prediction:
        """Predict a plan for the table. Raises Failed, and then the plan is not shown."""
        try:
            return self.predicted(variant, is_exact=is_exact)
        except Unrehearsed:
            raise
        except Exception as error:
            raise Failed(variant, error) from error

    def _demand(self, variant: Variant, *, is_exact: bool) -> tuple[Demand, Work, int]:
        """Return torch's memory, the work to compute, and the host's peak memory."""
        if self._has_workspaces:
            # The parts do not include convolution workspaces, and the store does not keep them.
            trace = self.trace(variant, is_exact=True)
            demand = demand_on(self.card, trace, variant)
            return demand, work_of(trace.ops), trace.host_peak_bytes
        footprint, kind = self._footprint(variant, is_exact=is_exact)
        key = f"{kind} on {tuple(self.card.multiprocessors)}"
        known, size = self.rehearsed.unlimited_peaks.get(key), variant.micro_batch
        if known is None:
            demand = demand_on(self.card, self._as_trace(footprint, size), variant)
            self.rehearsed.unlimited_peaks[key] = unlimited_peaks(demand)
        else:
            settings = settings_for(variant)

            def replayed(limit_bytes: int, *, keeps_outputs: bool) -> Replayed:
                requests = footprint.requests(
                    size, self.card.multiprocessors, keeps_outputs=keeps_outputs
                )
                return replay_requests(requests, settings, limit_bytes)

            demand = demand_from(
                known,
                functools.cache(functools.partial(replayed, keeps_outputs=False)),
                functools.cache(functools.partial(replayed, keeps_outputs=True)),
            )
        return demand, footprint.work(size), footprint.host_bytes_at(size)

    def trace(self, variant: Variant, *, is_exact: bool) -> Trace:
        """Return the trace that the variant's prediction rests on."""
        if self._has_workspaces:
            trace = self._rehearsed_trace(variant)
        else:
            footprint, _ = self._footprint(variant, is_exact=is_exact)
            trace = self._as_trace(footprint, variant.micro_batch)
        return sized_on(trace, self.card.multiprocessors)

    def _footprint(self, variant: Variant, *, is_exact: bool) -> tuple[Footprint, str]:
        """Return the variant's own footprint or the one made from its parts, and its key."""
        combinations = self.lines.of(variant)
        if not is_exact:
            kind = "point" if self.lines.points else "line"
            return combinations.footprint(variant), f"{kind} {key_of(variant)}"
        key = _exact_key(variant)
        if key not in self.rehearsed.exact:
            self._rehearsed_trace(variant)
        return self.rehearsed.exact[key], f"exact {key_of(variant)}"

    def _rehearsed_trace(self, variant: Variant) -> Trace:
        """Return the trace of this exact variant, rehearsed now or earlier."""
        key = _exact_key(variant)
        if key not in self._traces:
            trace = self._store.find_trace(key) if self._store else None
            trace = trace or self._rehearse(variant, key)
            self._traces[key] = ordered(trace)
            self.rehearsed.exact[key] = footprint_of_one(trace)
        return self._traces[key]

    def _rehearse(self, variant: Variant, key: Variant) -> Trace:
        if self._rehearser is None:
            raise Unrehearsed
        self._say(f"rehearsing {in_words(variant)} itself")
        trace = self._rehearser.trace(variant)
        if self._store is not None:
            files, batch_size = self._rehearser.files, self._rehearser.batch_size
            self._store.keep_trace(key, trace, files, batch_size)
        return trace

    def _as_trace(self, footprint: Footprint, micro_batch: int) -> Trace:
        trace = trace_at(
            footprint,
            micro_batch,
            torch_version=self.rehearsed.torch_version,
            compute_capability=self._capability,
            notes=self.rehearsed.notes,
        )
        return replace(trace, doubt=self.rehearsed.doubt)


def _exact_key(variant: Variant) -> Variant:
    """Return the settings that a rehearsal depends on: later micro-steps repeat the second."""
    few = min(variant.accumulation, 2)
    return replace(variant, accumulation=few, expandable_segments=False)


def _as_given(options: PlanOptions, rehearsed: Rehearsed) -> Variant:
    given = rehearsed.given or Variant(micro_batch=rehearsed.batch_size)
    if options.batch_size in (None, rehearsed.batch_size):
        return given
    return replace(given, micro_batch=options.batch_size, accumulation=1)


# ---- the largest micro-batch that fits -----------------------------------------------------------


def micro_batch_limits(plan: Plan, estimates: Estimates) -> MicroBatchLimits | None:
    """Return the largest micro-batch that fits with a plan; None if unknown."""
    # a micro-batch of one is not on the line
    several = replace(plan.variant, micro_batch=max(plan.micro_batch, 2))
    if estimates.lines.points or not estimates.knows(several) or plan.prediction.doubt:
        return None
    combinations = estimates.lines.of(several)
    worst, best = _rooms(plan, estimates, combinations)
    if plan.fits != "yes" and not combinations.passes(plan.variant, worst):
        return None
    num_replays = _num_replays(plan, len(combinations.footprint(several).event))
    fit, _ = combinations.boundary(several, worst, plan.micro_batch, num_replays)
    _, too_many = combinations.boundary(several, best, fit, num_replays)
    if not math.isfinite(too_many):
        return None
    if num_replays:
        fit = max([fit, *_sizes_that_pass(plan, combinations, (fit, too_many), worst)])
    return MicroBatchLimits(
        fit=fit, too_many=too_many, elements=estimates.rehearsed.example_elements
    )


def _rooms(plan: Plan, estimates: Estimates, combinations: Combinations) -> tuple[int, int]:
    """Return the bytes that the line's reserved memory may take, in the worst and the best case.

    If the plan's own prediction is above its line, for example by workspaces, the difference is
    kept free.
    """
    outside = estimates.outside_of(plan.variant)
    worst, best = room_for_figures(estimates.kind_of(plan.variant), estimates.card, outside)
    predicted_bytes = max(plan.prediction.reserved_bytes, 1)
    return int(worst * min(combinations.reserved_bytes(plan.variant) / predicted_bytes, 1)), best


def _num_replays(plan: Plan, num_events: int) -> int:
    """Return how many replays to spend: none if the whole batch fits at once, few if they are long.

    Measuring is always possible instead.
    """
    return 0 if plan.accumulate == 1 else _MOST_EVENTS // num_events


def _sizes_that_pass(
    plan: Plan, combinations: Combinations, between: tuple[float, float], limit_bytes: int
) -> Iterator[int]:
    """Yield the micro-batches that divide the batch and pass between two replayed ones."""
    share = plan.batch_size // plan.gpus
    for size in range(math.floor(between[0]) + 1, min(math.ceil(between[1]), share)):
        variant = replace(plan.variant, micro_batch=size)
        if share % size == 0 and combinations.passes(variant, limit_bytes):
            yield size


# ---- time ----------------------------------------------------------------------------------------


def step_time(work: Sequence[Op] | Work, variant: Variant, model: GpuModel) -> StepTime | None:
    """Return the time of an optimizer step; None for a GPU whose rates are unknown."""
    precision: MatmulPrecision = "tf32" if variant.precision == "tf32" else "fp32"
    return speed.estimate(
        work,
        model,
        matmul_precision=precision,
        links=links_of(model, variant),
        num_micro_steps=variant.accumulation,
    )
