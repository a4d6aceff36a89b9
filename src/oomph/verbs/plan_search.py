"""Asked, what is known of a workload -> the search for its plans, and the plans that it shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from oomph.verbs.rehearsals import in_words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oomph.planning.choices import Choices
    from oomph.planning.planner import Found
    from oomph.planning.search import Checked
    from oomph.predicting.footprint import Footprint
    from oomph.predicting.overhead import Interval
    from oomph.records.plan import Plans, Rejected, Shortfall, Timeline
    from oomph.records.prediction import Prediction, Verdict
    from oomph.records.trace import Trace
    from oomph.records.workload import Variant
    from oomph.tracing.many import Rehearser
    from oomph.verbs.rehearsals import Asked, Rehearsed
    from oomph.verbs.targets import Target

_MOST_SHOWN = 5  # plans


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Plans, and what is needed to draw them."""

    plans: Plans
    timelines: tuple[Timeline, ...]  # of each plan
    code: tuple[str, ...]  # a training loop for each plan


class Unrehearsed(Exception):
    """Something is needed that was not rehearsed, and there is nobody to rehearse it."""


class Search:
    """One search: in the child that can rehearse, or where all is known already."""

    def __init__(
        self, asked: Asked, target: Target, workload: str, say: Callable[[str], None]
    ) -> None:
        self.asked, self.target, self.workload, self.say = asked, target, workload, say
        self.rehearser: Rehearser | None = None
        self.refuted: set[Variant] = set()  # whose own rehearsal said otherwise
        self._checked: dict[Variant, Checked] = {}

    def run(self, rehearser: Rehearser, known: Rehearsed | None = None) -> tuple[Drawn, Rehearsed]:
        """The answer, and what was rehearsed for it."""
        from oomph.verbs.rehearsals import first_look

        self.rehearser = rehearser
        self.say("looking at the model")
        rehearsed = known or first_look(rehearser)
        return self.answer(rehearsed), rehearsed

    def answer(self, rehearsed: Rehearsed) -> Drawn:
        """The answer. Raises Unrehearsed."""
        self.rehearsed = rehearsed
        self.ready = self.target.with_torch(rehearsed.torch_version)
        self.card = self.ready.filled_to(self.asked.target_ratio)
        self.as_is = self._predicted(self._as_given(), is_exact=True)[0]
        smallest = 1 if self.asked.prefer == "memory" else 2
        choices, found = self._found(least_micro_batch=smallest)
        if not found.is_certain and smallest > 1:
            choices, found = self._found(least_micro_batch=1)
        return self._drawn(choices, found)

    def _as_given(self) -> Variant:
        from oomph.records.workload import Variant

        return Variant(micro_batch=self.asked.batch_size or self.rehearsed.batch_size)

    # ---- searching -------------------------------------------------------------------------------

    def _found(self, least_micro_batch: int) -> tuple[Choices, Found]:
        from oomph.planning.choices import variants
        from oomph.predicting.ways import Ways
        from oomph.verbs.rehearsals import choices_of

        self.ways = Ways(
            families=self.rehearsed.families,
            steps=self.rehearsed.steps,
            model=self.ready.rated,
            known_replays=self.rehearsed.replays,
        )
        choices = choices_of(self.rehearsed, self.asked, self.target.capability, least_micro_batch)
        every = list(variants(choices))
        usual = [variant for variant in every if variant == _usual(variant)]
        self._complete(usual)
        found = self._compared(choices, usual)
        hopeful = [v for v in every if v != _usual(v) and self._may_help(v, found)]
        self.num_skipped = len(every) - len(usual) - len(hopeful)
        if hopeful:
            self._complete(hopeful)
            found = self._compared(choices, [*usual, *hopeful])
        return choices, self._with_partial(choices, [*usual, *hopeful], found)

    def _complete(self, wanted: Sequence[Variant]) -> None:
        """Rehearse what of these is not known yet."""
        from oomph.verbs.rehearsals import complete, missing

        if any(missing(self.rehearsed, wanted)):
            if self.rehearser is None:
                raise Unrehearsed
            complete(self.rehearsed, self.rehearser, wanted, self.say)

    def _may_help(self, variant: Variant, found: Found) -> bool:
        """Whether a trick that only saves memory could make something faster fit.

        Nothing is gained in time by it: where the same without it is no faster than what fits, it
        is of no use, unless memory itself is what counts.
        """
        from oomph.planning.search import NEAR_RATIO

        usual = _usual(variant)
        if not self.ways.knows(usual):
            return True
        if variant.optimizer_in_backward and not self._could_fit(variant):
            return False
        if found.best_s is None or not found.is_certain or self.asked.prefer == "memory":
            return True
        is_faster = (self.ways.seconds(usual) or 0.0) < found.best_s / (1 + NEAR_RATIO)
        return is_faster and self._check(usual).fits != "yes"

    def _compared(self, choices: Choices, every: Sequence[Variant]) -> Found:
        from oomph.planning.planner import Known, search

        self.say("comparing")
        known = Known(
            is_known=self.ways.knows,
            least_bytes=lambda variant: self.ways.least_bytes(variant) + self._outside.low_bytes,
            seconds=self.ways.seconds,
            check=self._check,
            host_bytes=self.ways.host_bytes,
        )
        limit_bytes = self.card.usable.high_bytes
        return search(choices, known, limit_bytes, self.asked.prefer, _MOST_SHOWN, every)

    def _with_partial(self, choices: Choices, every: Sequence[Variant], found: Found) -> Found:
        """Compare again, with a set of blocks where that may be faster than all or none."""
        from oomph.planning.partial import Measures, best_partial

        if found.best is None or "blocks" not in choices.checkpointings:
            return found
        room = self.card.usable.low_bytes - self._outside.high_bytes
        measures = Measures(
            reserved_bytes=self.ways.reserved_bytes,
            seconds=self.ways.seconds,
            room_bytes=int(room / (1 + self.bar_ratio)),
        )
        kept = [
            v
            for v in every
            if v.checkpointing == "none" and v == _usual(v) and self._is_like(v, found.best)
        ]
        partial = best_partial(kept, self.rehearsed.costs, measures, found.best_s or 0.0)
        if partial is None:
            return found
        self._complete([partial])
        return self._compared(choices, [*every, partial])

    def _is_like(self, variant: Variant, best: Variant) -> bool:
        """On as many GPUs, and known with all blocks recomputed, too."""
        from dataclasses import replace

        return (
            variant.num_gpus == best.num_gpus
            and variant == _usual(variant)
            and not variant.expandable_segments
            and self.ways.knows(variant)
            and self.ways.knows(replace(variant, checkpointing="blocks"))
        )

    def _could_fit(self, variant: Variant) -> bool:
        """Whether it could if all gradients were gone, which is all that it can save."""
        usual = _usual(variant)
        least = self.ways.least_bytes(usual) - self.rehearsed.possible.parameter_bytes
        return least + self._outside.low_bytes <= self.card.usable.high_bytes

    def _check(self, variant: Variant) -> Checked:
        """By replays of what was rehearsed, and by its own rehearsal where there was one."""
        from oomph.planning.search import Checked

        if variant not in self._checked:
            outside = self._outside_of(variant)
            least = self.ways.least_bytes(variant)
            if least > self.card.usable.high_bytes - outside.low_bytes:  # whatever is replayed
                return Checked(device_bytes=least + outside.likely_bytes, fits="no")
            reserved = self.ways.reserved_bytes(variant)
            fits = "no" if variant in self.refuted else self._fits(variant, outside, reserved)
            device_bytes = reserved + outside.likely_bytes
            self._checked[variant] = Checked(device_bytes=device_bytes, fits=fits)
        return self._checked[variant]

    def _fits(self, variant: Variant, outside: Interval, reserved_bytes: int) -> Verdict:
        """At the worst of what is unknown, or at its best, or not at all."""
        usable = self.card.usable
        unseen_bytes = int(reserved_bytes * self.bar_ratio)
        if self.ways.passes(variant, usable.low_bytes - outside.high_bytes - unseen_bytes):
            return "yes"
        is_possible = self.ways.passes(variant, usable.high_bytes - outside.low_bytes)
        return "uncertain" if is_possible else "no"

    @property
    def _outside(self) -> Interval:
        """What is taken beside torch's allocator, on one GPU."""
        return self.card.outside(has_convolutions=self.rehearsed.has_convolutions)

    def _outside_of(self, variant: Variant) -> Interval:
        return self.card.among(variant).outside(has_convolutions=self.rehearsed.has_convolutions)

    @property
    def bar_ratio(self) -> float:
        """What a bar reaches above its figure, the context aside, for this model."""
        above = self.as_is.high_bytes - self.as_is.device_bytes
        outside = self._outside.high_bytes - self._outside.likely_bytes
        return max(above - outside, 0) / max(self.as_is.reserved_bytes, 1)

    def _predicted(self, variant: Variant, *, is_exact: bool) -> tuple[Prediction, Trace]:
        """By a rehearsal of the very variant, or by what was rehearsed of its parts."""
        from oomph.predicting.allocator_settings import AllocatorSettings
        from oomph.predicting.assembly import assemble
        from oomph.verbs.predictions import step_time

        # What convolutions take beside their tensors is not among the parts.
        is_exact = is_exact or self.rehearsed.has_convolutions
        trace = self._rehearsed_trace(variant) if is_exact else self._trace_of(variant)
        settings = AllocatorSettings(expandable_segments=variant.expandable_segments)
        time = step_time(trace, variant, self.ready.model)
        card = self.card.among(variant)
        notes = self.ready.notes
        return assemble(trace, variant, card, settings=settings, time=time, notes=notes), trace

    def _rehearsed_trace(self, variant: Variant) -> Trace:
        from dataclasses import replace

        from oomph.verbs.rehearsals import footprint_of_one

        key = replace(variant, accumulation=min(variant.accumulation, 2), expandable_segments=False)
        known = self.rehearsed.exact.get(key)
        if known is not None and not self.rehearsed.has_convolutions:
            return self._as_trace(known, variant.micro_batch)
        if self.rehearser is None:
            raise Unrehearsed
        self.say(f"rehearsing {in_words(variant)} itself")
        trace = self.rehearser.trace(variant)
        self.rehearsed.exact[key] = footprint_of_one(trace)
        return trace

    def _trace_of(self, variant: Variant) -> Trace:
        return self._as_trace(self.ways.footprint(variant), variant.micro_batch)

    def _as_trace(self, footprint: Footprint, micro_batch: int) -> Trace:
        from dataclasses import replace

        from oomph.predicting.footprint_trace import trace_at

        trace = trace_at(
            footprint,
            micro_batch,
            torch_version=self.rehearsed.torch_version,
            compute_capability=self.target.capability,
            notes=self.rehearsed.notes,
        )
        return replace(trace, doubt=self.rehearsed.doubt)

    # ---- answering -------------------------------------------------------------------------------

    def _drawn(self, choices: Choices, found: Found) -> Drawn:
        """The plans of a search, the best by its own rehearsal."""
        from oomph.planning.planned import Planned
        from oomph.predicting.timeline import timeline_of

        predicted = []
        for number, variant in enumerate(found.shown):
            prediction, trace = self._predicted(variant, is_exact=number == 0)
            if number == 0 and not self._is_confirmed(prediction, found):
                self.refuted.add(variant)
                self._checked.pop(variant, None)
                return self._drawn(*self._found(choices.least_micro_batch))
            if prediction.fits != "no":
                predicted.append((variant, prediction, trace))
        plans = self._plans(choices, found, [(v, p) for v, p, _ in predicted])
        return Drawn(
            plans=plans,
            timelines=tuple(timeline_of(trace) for _, _, trace in predicted),
            code=tuple(Planned.of(plan).to_code() for plan in plans),
        )

    def _is_confirmed(self, prediction: Prediction, found: Found) -> bool:
        """Whether a rehearsal of the best itself says what its parts had said."""
        return prediction.fits == "yes" or (prediction.fits == "uncertain" and not found.is_certain)

    def _largest_as_is(self) -> int | None:
        """The largest micro-batch that fits as the workload was given."""
        from oomph.records.workload import Variant

        if self.as_is.fits != "yes":
            return None
        fits = self._as_given().micro_batch
        if not self.ways.knows(Variant(micro_batch=fits)):
            return None
        beyond = 2 * fits
        while self._check(Variant(micro_batch=beyond)).fits == "yes":
            fits, beyond = beyond, 2 * beyond
        while beyond - fits > max(fits // 16, 1):
            middle = (fits + beyond) // 2
            is_small_enough = self._check(Variant(micro_batch=middle)).fits == "yes"
            fits, beyond = (middle, beyond) if is_small_enough else (fits, middle)
        return fits

    def _plans(
        self, choices: Choices, found: Found, kept: Sequence[tuple[Variant, Prediction]]
    ) -> Plans:
        from oomph.planning import answers
        from oomph.records.plan import Plans
        from oomph.stability.rates import new_rate

        possible = self.rehearsed.possible
        facts = answers.Facts(
            workload=self.workload,
            as_is=self.as_is,
            fastest_s=found.fastest_s,
            changing=found.changing,
            prefer=self.asked.prefer,
            batch_norm_names=possible.batch_norm_names,
            has_dropout=possible.has_dropout,
            block_names=possible.block_names,
            batch_size=choices.batch_size,
            rate_advice=lambda ratio: new_rate(possible.optimizer_class, ratio).advice,
        )
        plans = answers.told_apart(
            [answers.plan_of(v, p, self.ways.seconds(v), facts) for v, p in kept], facts
        )
        return Plans(
            workload=self.workload,
            gpu=self.card.name,
            batch_size=choices.batch_size,
            capacity_bytes=self.card.usable.likely_bytes,
            fits_as_is=self.as_is.fits,
            as_is=self.as_is,
            plans=plans,
            rejected=(*choices.rejected, *self._not_compared(found)),
            shortfall=None if plans else self._shortfall(found),
            caveats=answers.caveats(plans[0] if plans else None, facts, self.ways.seconds),
            largest_micro_batch=self._largest_as_is(),
            num_candidates=found.num_candidates,
        )

    def _not_compared(self, found: Found) -> list[Rejected]:
        from oomph.records.plan import Rejected

        skipped = []
        if self.num_skipped:
            skipped.append(
                Rejected(
                    what=f"{self.num_skipped} ways with offload or the optimizer in backward",
                    why="they only save memory, and without them something as fast fits:"
                    " --prefer memory"
                    if found.is_certain
                    else "what they save would not be enough",
                )
            )
        return skipped + [
            Rejected(
                what=", ".join(str(part) for part in family if part),
                why="its allocations are no line in the micro-batch: ask oomph predict",
            )
            for family in sorted(self.rehearsed.not_affine)
        ]

    def _shortfall(self, found: Found) -> Shortfall:
        from oomph.planning import answers
        from oomph.predicting.overhead import usable_bytes
        from oomph.verbs.readings import catalog

        smallest = self._predicted(found.smallest, is_exact=False)[0]
        sizes = [(model.name, usable_bytes(model).low_bytes) for model in catalog()]
        return answers.shortfall(smallest, sizes, answers.gpus_that_would_do(smallest))


def _usual(variant: Variant) -> Variant:
    """The same without the tricks that save memory and never time."""
    from dataclasses import replace

    return replace(
        variant, optimizer_in_backward=False, offload_activations=False, offload_optimizer=False
    )
