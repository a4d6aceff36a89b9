"""Asked, what is known of a workload -> the search for its plans, and the plans that it shows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, isfinite
from typing import TYPE_CHECKING, NamedTuple

from oomph.verbs.plan_figures import Figures
from oomph.verbs.plan_told import Searched, told

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oomph.planning.choices import Choices
    from oomph.planning.planner import Found
    from oomph.predicting.ways import Family
    from oomph.records.plan import Plans, Timeline
    from oomph.records.prediction import Prediction
    from oomph.records.script import ScriptChanges
    from oomph.records.trace import Trace
    from oomph.records.workload import Variant
    from oomph.verbs.rehearsals import Asked, Rehearsed, Rehearser
    from oomph.verbs.targets import Target

_MOST_SHOWN = 5  # plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Plans, and what is needed to draw them."""

    plans: Plans
    timelines: tuple[Timeline, ...] = ()  # of each plan, where they are to be drawn
    code: tuple[str, ...] = ()  # a training loop for each plan, as well
    changes: ScriptChanges | None = None  # of a script, for the best plan


class _Rank(NamedTuple):
    """How good a way to train is, before its memory is looked at: the less the better."""

    num_changes: int
    num_gpus: int
    batch_s: float


class Search:
    """One search: in the child that can rehearse, or where all is known already."""

    def __init__(
        self,
        asked: Asked,
        target: Target,
        workload: str,
        say: Callable[[str], None],
        *,
        draws: bool = True,
        recall: Callable[[Variant], Trace | None] = lambda _: None,
    ) -> None:
        self.recall = recall
        self.asked, self.target, self.workload, self.say = asked, target, workload, say
        self.draws = draws
        self.rehearser: Rehearser | None = None

    def run(self, rehearser: Rehearser, known: Rehearsed | None = None) -> tuple[Drawn, Rehearsed]:
        """The answer, and what was rehearsed for it."""
        from oomph.verbs.rehearsals import first_look

        self.rehearser = rehearser
        self.say("looking at the model")
        rehearsed = known or first_look(rehearser)
        return self.answer(rehearsed), rehearsed

    def answer(self, rehearsed: Rehearsed) -> Drawn:
        """The answer. Raises Unrehearsed.

        One way to train that cannot be put together is left out, and the others are compared.
        """
        from oomph.verbs.plan_lines import Failed

        self.rehearsed = rehearsed
        self.figures = Figures(
            self.asked, self.target, rehearsed, self.rehearser, self.say, self.recall
        )
        while True:
            self.figures.check_anew()
            try:
                searched = self._searched()
                drawn = self._drawn(searched) if self._is_true(searched) else None
            except Failed as failed:
                self.figures.lines.leave_out(failed)
                continue
            if drawn is not None:
                return drawn

    # ---- searching -------------------------------------------------------------------------------

    def _searched(self) -> Searched:
        """Among all micro-batches but one example, and with that where nothing else will do."""
        smallest = 1 if self.asked.prefer == "memory" else 2
        searched = self._with_micro_batches_from(smallest)
        if searched.found.is_certain or smallest == 1:
            return searched
        return self._with_micro_batches_from(1)

    def _with_micro_batches_from(self, least: int) -> Searched:
        from oomph.planning.choices import variants
        from oomph.verbs.rehearsals import choices_of

        choices = choices_of(self.rehearsed, self.asked, self.target.capability, least)
        every = list(variants(choices))
        usual = [variant for variant in every if variant == _usual(variant)]
        lines = self.figures.lines
        lines.complete(usual)
        left = choices_of(self.rehearsed, self.asked, self.target.capability, least)
        if left != choices:  # what was to be on all of them is not borne
            return self._with_micro_batches_from(least)
        lines.use_points_for(usual)
        found = self._compared(choices, usual)
        if lines.points:
            return Searched(choices=choices, compared=usual, num_skipped=0, found=found)
        compared, found = self._with_finer(choices, every, usual, found)
        num_skipped = len(every) - len(compared)
        compared, found = self._with_partial(choices, compared, found)
        return Searched(choices=choices, compared=compared, num_skipped=num_skipped, found=found)

    def _compared(self, choices: Choices, every: Sequence[Variant]) -> Found:
        from oomph.planning.planner import Known, search

        self.say("comparing")
        figures = self.figures
        known = Known(
            is_known=figures.lines.knows,
            least_bytes=figures.least_bytes,
            seconds=figures.seconds,
            check=figures.check,
            host_bytes=figures.host_bytes,
        )
        limit_bytes = figures.card.usable.high_bytes
        return search(choices, known, limit_bytes, self.asked.prefer, _MOST_SHOWN, every)

    def _with_finer(
        self, choices: Choices, every: Sequence[Variant], usual: Sequence[Variant], found: Found
    ) -> tuple[Sequence[Variant], Found]:
        """Compare again, with what only saves memory: as long as it may help.

        With the fewest changes and on few GPUs first, and there what could be fastest: once that
        fits, little else is left that may help, and it need not be rehearsed.
        """
        finer = [
            (self._rank(variant, choices, _usual(variant)), variant)
            for variant in every
            if variant != _usual(variant)
        ]
        reached = None
        if found.best is not None and found.is_certain:
            reached = self._rank(found.best, choices, found.best)
        compared = list(usual)
        for rank, variant in sorted(finer, key=lambda pair: pair[0]):
            if not self._may_help(variant, rank, reached):
                continue
            self.figures.lines.complete([variant])
            compared.append(variant)
            if self.asked.prefer != "memory" and self._fits(variant):
                own = self._rank(variant, choices, variant)
                reached = own if reached is None else min(reached, own)
        return compared, self._compared(choices, compared)

    def _rank(self, variant: Variant, choices: Choices, like: Variant) -> _Rank:
        """The less the better; the time is that of another, which may be known already."""
        from oomph.planning.planner import num_changes

        seconds = self.figures.seconds(like)
        return _Rank(
            num_changes=num_changes(variant, choices),
            num_gpus=0 if self.asked.prefer == "time" else variant.num_gpus,
            batch_s=inf if seconds is None else seconds * choices.batch_size / variant.batch_size,
        )

    def _may_help(self, variant: Variant, rank: _Rank, reached: _Rank | None) -> bool:
        """Whether a trick that only saves memory could make something better fit.

        It does where that changes less of training, and where memory itself is what counts. Nothing
        is gained in time by it: where the same without it is no faster than what fits, it is of no
        use.
        """
        from oomph.planning.search import NEAR_RATIO

        figures, usual = self.figures, _usual(variant)
        if not figures.lines.knows(usual):
            return True
        if variant.optimizer_in_backward and not figures.may_fit_in_backward(usual):
            return False
        if reached is None or rank.num_changes < reached.num_changes:
            return True
        if rank.num_changes > reached.num_changes:
            return False
        if self.asked.prefer == "memory":
            return True
        if rank.num_gpus > reached.num_gpus or not isfinite(rank.batch_s):
            return False
        is_faster = rank.batch_s < reached.batch_s / (1 + NEAR_RATIO)
        return is_faster and not self._fits(usual)

    def _fits(self, variant: Variant) -> bool:
        """For certain, by what was rehearsed of it."""
        return self.figures.lines.knows(variant) and self.figures.check(variant).fits == "yes"

    def _with_partial(
        self, choices: Choices, every: Sequence[Variant], found: Found
    ) -> tuple[Sequence[Variant], Found]:
        """Compare again, with a set of blocks where that may be faster than all or none."""
        from oomph.planning.partial import Measures, best_partial
        from oomph.planning.planner import num_changes

        if found.best is None or "blocks" not in choices.checkpointings:
            return every, found
        figures = self.figures
        measures = Measures(
            reserved_bytes=figures.reserved_bytes,
            seconds=figures.seconds,
            room_bytes=figures.room_bytes,
        )
        num = num_changes(found.best, choices)
        alike = [v for v in every if num_changes(v, choices) == num]
        kept = [v for v in alike if v.checkpointing == "none" and self._is_like(v, found.best)]
        partial = best_partial(kept, self.rehearsed.costs, measures, found.best_s or 0.0)
        if partial is None:
            return every, found
        figures.lines.complete([partial])
        more = [*every, partial]
        return more, self._compared(choices, more)

    def _is_like(self, variant: Variant, best: Variant) -> bool:
        """On as many GPUs, and known with all blocks recomputed, too."""
        return (
            variant.num_gpus == best.num_gpus
            and variant == _usual(variant)
            and not variant.expandable_segments
            and self.figures.lines.knows(variant)
            and self.figures.lines.knows(replace(variant, checkpointing="blocks"))
        )

    # ---- holding what was found against rehearsals -----------------------------------------------

    def _is_true(self, searched: Searched) -> bool:
        """Whether a rehearsal far away says the same of every plan that would be shown.

        What one family does, others may do: if one is refuted, all are asked.
        """
        from oomph.predicting.ways import family_of

        lines = self.figures.lines
        if lines.points:
            return True
        if searched.found.best is not None:  # which has to be rehearsed anyhow, and may say it all
            self.figures.predicted_row(searched.found.best, is_exact=True)
        farthest = self._farthest(searched.compared)
        shown = dict.fromkeys(family_of(variant) for variant in searched.found.shown)
        if all(lines.holds(farthest[family]) for family in shown if family in farthest):
            return True
        for variant in farthest.values():
            lines.holds(variant)
        return False

    def _farthest(self, compared: Sequence[Variant]) -> dict[Family, Variant]:
        """Of each family the largest micro-batch that may fit."""
        from oomph.predicting.ways import family_of

        found: dict[Family, Variant] = {}
        for variant in sorted(compared, key=lambda one: one.micro_batch):
            is_asked = variant.micro_batch > 1 and self.figures.lines.knows(variant)
            if is_asked and self.figures.may_fit(variant):
                found[family_of(variant)] = variant
        return found

    def _drawn(self, searched: Searched) -> Drawn | None:
        """The plans, the best by its own rehearsal; None if that says otherwise."""
        from oomph.planning.planned import Planned
        from oomph.predicting.timeline import timeline_of

        predicted = []
        for number, variant in enumerate(searched.found.shown):
            prediction = self.figures.predicted_row(variant, is_exact=number == 0)
            if number == 0 and not _is_confirmed(prediction, searched.found):
                self.figures.refuted.add(variant)
                return None
            if prediction.fits != "no":
                predicted.append((variant, prediction))
        plans = told(self.workload, self.asked, self.figures, searched, predicted)
        if not self.draws:
            return Drawn(plans=plans)
        best = searched.found.best
        traces = (self.figures.trace(variant, is_exact=variant == best) for variant, _ in predicted)
        return Drawn(
            plans=plans,
            timelines=tuple(timeline_of(trace) for trace in traces),
            code=tuple(Planned.of(plan).to_code() for plan in plans),
        )


def _is_confirmed(prediction: Prediction, found: Found) -> bool:
    """Whether a rehearsal of the best itself says what its parts had said."""
    return prediction.fits == "yes" or (prediction.fits == "uncertain" and not found.is_certain)


def _usual(variant: Variant) -> Variant:
    """The same without the tricks that save memory and never time.

    On several GPUs each way is rehearsed for each number of them: there recomputing a part of each
    block is one of these, too.
    """
    is_finer = variant.checkpointing == "selective" and variant.num_gpus > 1
    return replace(
        variant,
        checkpointing="none" if is_finer else variant.checkpointing,
        optimizer_in_backward=False,
        offload_activations=False,
        offload_optimizer=False,
    )
