"""A variant, a GPU -> what it takes of it, and whether it fits: by its parts, or by itself."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Concatenate, ParamSpec, TypeVar

from oomph.verbs.plan_lines import Failed, Lines
from oomph.verbs.rehearsals import CannotBePutOn, Unrehearsed, footprint_of_one, in_words

if TYPE_CHECKING:
    from oomph.planning.search import Checked
    from oomph.predicting.allocator_settings import AllocatorSettings
    from oomph.predicting.footprint import Footprint
    from oomph.predicting.overhead import Interval
    from oomph.predicting.weighing import Weights
    from oomph.predicting.work import Work
    from oomph.records.prediction import Prediction, Verdict
    from oomph.records.trace import Trace
    from oomph.records.workload import Variant
    from oomph.verbs.rehearsals import Asked, Rehearsed, Rehearser
    from oomph.verbs.targets import Target


P = ParamSpec("P")
T = TypeVar("T")


def _of_one(
    ask: Callable[Concatenate[Figures, Variant, P], T],
) -> Callable[Concatenate[Figures, Variant, P], T]:
    """Whatever goes wrong with one way to train is told apart from what ends a search.

    As it was given it has to be known: an error then is the user's to know.
    """

    @functools.wraps(ask)
    def asked(figures: Figures, variant: Variant, /, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return ask(figures, variant, *args, **kwargs)
        except (Unrehearsed, Failed, CannotBePutOn):
            raise
        except Exception as error:
            raise Failed(variant, error) from error

    return asked


class Figures:
    """Answers for the variants of one workload on one GPU."""

    def __init__(
        self,
        asked: Asked,
        target: Target,
        rehearsed: Rehearsed,
        rehearser: Rehearser | None,
        say: Callable[[str], None],
        recall: Callable[[Variant], Trace | None] = lambda _: None,
    ) -> None:
        """Raises Unrehearsed. `recall` knows rehearsals of whole variants from before."""
        self._recall = recall
        self.rehearsed_anew: dict[Variant, Trace] = {}
        self.rehearsed, self._rehearser, self._say = rehearsed, rehearser, say
        self._capability = target.capability
        self._ready = target.with_torch(rehearsed.torch_version)
        self.card = self._ready.filled_to(asked.target_ratio)
        self.lines = Lines(rehearsed, rehearser, self._ready.rated, say)
        self._has_workspaces = rehearsed.has_convolutions and not self.card.is_emulated
        self.refuted: set[Variant] = set()  # whose own rehearsal said otherwise
        self._checked: dict[Variant, Checked] = {}
        self._bar_ratios: dict[bool, float] = {}  # of one GPU, of several
        self._traces: dict[Variant, Trace] = {}  # of rehearsals that were made for this question
        self.as_is = self.predicted(_as_given(asked, rehearsed), is_exact=True)

    # ---- by its parts ----------------------------------------------------------------------------

    @_of_one
    def seconds(self, variant: Variant) -> float | None:
        """None, too, for what was not rehearsed."""
        return self.lines.of(variant).seconds(variant) if self.lines.knows(variant) else None

    @_of_one
    def host_bytes(self, variant: Variant) -> int:
        return self.lines.of(variant).host_bytes(variant)

    @_of_one
    def reserved_bytes(self, variant: Variant) -> int:
        return self.lines.of(variant).reserved_bytes(variant)

    @_of_one
    def least_bytes(self, variant: Variant) -> int:
        """Of the device: never more than the truth."""
        return self.lines.of(variant).least_bytes(variant) + self.outside.low_bytes

    def may_fit(self, variant: Variant) -> bool:
        """Whether its lower bound fits."""
        return self.least_bytes(variant) <= self.card.usable.high_bytes

    @_of_one
    def may_fit_in_backward(self, variant: Variant) -> bool:
        """The same, if its optimizer stepped in backward."""
        least = self.lines.of(variant).least_in_backward_bytes(variant)
        return least + self.outside.low_bytes <= self.card.usable.high_bytes

    @_of_one
    def check(self, variant: Variant) -> Checked:
        """By replays of what was rehearsed, and by its own rehearsal where there was one."""
        from oomph.planning.search import Checked

        if variant not in self._checked:
            outside, ways = self.outside_of(variant), self.lines.of(variant)
            least = ways.least_bytes(variant)
            if least > self.card.usable.high_bytes - outside.low_bytes:  # whatever is replayed
                return Checked(device_bytes=least + outside.likely_bytes, fits="no")
            fits = "no" if variant in self.refuted else self._fits(variant, outside)
            device_bytes = ways.reserved_bytes(variant) + outside.likely_bytes
            self._checked[variant] = Checked(device_bytes=device_bytes, fits=fits)
        return self._checked[variant]

    def check_anew(self) -> None:
        """What was rehearsed since may say otherwise."""
        self._checked.clear()

    def _fits(self, variant: Variant, outside: Interval) -> Verdict:
        """As a prediction says it: at the worst of what is unknown, or at its best, or not."""
        usable, ways = self.card.usable, self.lines.of(variant)
        if not ways.passes(variant, usable.high_bytes - outside.low_bytes):
            return "no"
        worst = usable.low_bytes - outside.high_bytes - self._unseen_bytes(variant, outside)
        fits = ways.passes(variant, worst)
        if fits and not self._has_workspaces:  # else it is in what was learnt
            fits = ways.passes_with_outputs(variant, worst)
        return "yes" if fits and not self.as_is.doubt else "uncertain"

    def _unseen_bytes(self, variant: Variant, outside: Interval) -> int:
        """How far above its figure a variant may be."""
        from oomph.predicting.assembly import unseen_above_bytes

        usable, ways = self.card.usable, self.lines.of(variant)
        if self._has_workspaces:
            return int(ways.reserved_bytes(variant) * self._bar_ratio_of(variant))
        limit_bytes = usable.likely_bytes - outside.likely_bytes
        reserved = ways.reserved_bytes_within(variant, limit_bytes)
        return unseen_above_bytes(reserved, variant, self.card)

    @property
    def room_bytes(self) -> int:
        """For what torch reserves, at the worst."""
        room = self.card.usable.low_bytes - self.outside.high_bytes
        return int(room / (1 + self._bar_ratios[False]))

    @property
    def outside(self) -> Interval:
        """What is taken beside torch's allocator, on one GPU."""
        return self.card.outside(has_convolutions=self._has_workspaces)

    def outside_of(self, variant: Variant) -> Interval:
        return self.card.among(variant).outside(has_convolutions=self._has_workspaces)

    def _bar_ratio_of(self, variant: Variant) -> float:
        """What a bar reaches above its figure, for this model."""
        return self._bar_ratios.get(variant.num_gpus > 1, self._bar_ratios[False])

    def _learn_bar(self, prediction: Prediction) -> None:
        """From the first of one GPU, and the first of several, the context aside."""
        outside = self.outside_of(prediction.variant)
        above = prediction.high_bytes - prediction.device_bytes
        ratio = max(above - outside.high_bytes + outside.likely_bytes, 0)
        is_among_several = prediction.variant.num_gpus > 1
        self._bar_ratios.setdefault(is_among_several, ratio / max(prediction.reserved_bytes, 1))

    # ---- as a prediction -------------------------------------------------------------------------

    def predicted(self, variant: Variant, *, is_exact: bool) -> Prediction:
        """By a rehearsal of the very variant, or by what was rehearsed of its parts."""
        from oomph.predicting.assembly import assemble_weights, bus_bytes, doubt_on
        from oomph.verbs.step_times import step_time

        weights, work, host_bytes = self._weights(variant, is_exact=is_exact)
        found = assemble_weights(
            weights,
            variant,
            self.card.among(variant),
            host_bytes=host_bytes,
            bus_bytes=bus_bytes(work, variant.accumulation),
            time=step_time(work, variant, self._ready.model),
            notes=(*self.rehearsed.notes, *self._ready.notes),
            doubt=self.rehearsed.doubt or doubt_on(self.card, (op.name for op in work.kernels)),
        )
        if is_exact:
            self._learn_bar(found)
        return found

    def predicted_row(self, variant: Variant, *, is_exact: bool) -> Prediction:
        """The same of a plan that is to be shown. Raises Failed: then it is not."""
        try:
            return self.predicted(variant, is_exact=is_exact)
        except Unrehearsed:
            raise
        except Exception as error:
            raise Failed(variant, error) from error

    def _weights(self, variant: Variant, *, is_exact: bool) -> tuple[Weights, Work, int]:
        """What torch takes, what is computed, and what the host holds."""
        from oomph.predicting.footprint_replays import FootprintReplays
        from oomph.predicting.weighing import weighed, weights_kept
        from oomph.predicting.work import work_of

        if self._has_workspaces:
            # What convolutions take beside their tensors is not among the parts, nor is it kept.
            trace = self.trace(variant, is_exact=True)
            return self._weighed_anew(variant, trace), work_of(trace.ops), trace.host_peak_bytes
        footprint, key = self._footprint(variant, is_exact=is_exact)
        known, size = self.rehearsed.weighed.get(key), variant.micro_batch
        if known is None:
            weights = self._weighed_anew(variant, self._as_trace(footprint, size))
            self.rehearsed.weighed[key] = weighed(weights)
        else:
            replays = FootprintReplays(footprint, size, _settings_of(variant))
            weights = weights_kept(known, replays.under, replays.under_with_outputs)
        return weights, footprint.work(size), footprint.host_bytes_at(size)

    def _weighed_anew(self, variant: Variant, trace: Trace) -> Weights:
        from oomph.predicting.assembly import weights_on

        return weights_on(self.card, trace, _settings_of(variant))

    def trace(self, variant: Variant, *, is_exact: bool) -> Trace:
        """What a prediction of it rests on."""
        if self._has_workspaces:
            return self._rehearsed_trace(variant)
        return self._as_trace(self._footprint(variant, is_exact=is_exact)[0], variant.micro_batch)

    def _footprint(self, variant: Variant, *, is_exact: bool) -> tuple[Footprint, str]:
        """Its own or that of its parts, and a name for it."""
        from oomph.predicting.ways import key_of

        ways = self.lines.of(variant)
        if not is_exact:
            kind = "point" if self.lines.points else "line"
            return ways.footprint(variant), f"{kind} {key_of(variant)}"
        key = _exact_key(variant)
        if key not in self.rehearsed.exact:
            self._rehearsed_trace(variant)
        return self.rehearsed.exact[key], f"exact {key_of(variant)}"

    def _rehearsed_trace(self, variant: Variant) -> Trace:
        """Of a rehearsal of the very variant, or of an earlier one."""
        from oomph.predicting.scaling import ordered

        key = _exact_key(variant)
        if key not in self._traces:
            trace = self._recall(key)
            if trace is None:
                if self._rehearser is None:
                    raise Unrehearsed
                self._say(f"rehearsing {in_words(variant)} itself")
                self.rehearsed_anew[key] = trace = self._rehearser.trace(variant)
            self._traces[key] = ordered(trace)
            self.rehearsed.exact[key] = footprint_of_one(trace)
        return self._traces[key]

    def _as_trace(self, footprint: Footprint, micro_batch: int) -> Trace:
        from oomph.predicting.footprint_trace import trace_at

        trace = trace_at(
            footprint,
            micro_batch,
            torch_version=self.rehearsed.torch_version,
            compute_capability=self._capability,
            notes=self.rehearsed.notes,
        )
        return replace(trace, doubt=self.rehearsed.doubt)


def _settings_of(variant: Variant) -> AllocatorSettings:
    from oomph.predicting.allocator_settings import AllocatorSettings

    return AllocatorSettings(expandable_segments=variant.expandable_segments)


def _exact_key(variant: Variant) -> Variant:
    """All that a rehearsal of it depends on: more micro-steps are like the second."""
    few = min(variant.accumulation, 2)
    return replace(variant, accumulation=few, expandable_segments=False)


def _as_given(asked: Asked, rehearsed: Rehearsed) -> Variant:
    from oomph.records.workload import Variant

    given = rehearsed.given or Variant(micro_batch=rehearsed.batch_size)
    if asked.batch_size in (None, rehearsed.batch_size):
        return given
    return replace(given, micro_batch=asked.batch_size, accumulation=1)
