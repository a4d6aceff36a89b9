"""A workload or a script, a question and a GPU -> Plans.

Rehearsals of a workload in a file are stored, so another question about it rehearses only what is
new. Each variant of a script is the script itself with tricks applied around it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from oomph.errors import CannotBePutOn, UsageError, UserCodeError
from oomph.planning.choices import Choices, check_names, variants
from oomph.planning.deadline import Deadline
from oomph.planning.estimates import Estimates
from oomph.planning.lines import Failed
from oomph.planning.offers import find_offers
from oomph.planning.ranking import NEAR_RATIO, Found, best_partial, changes_in, search
from oomph.planning.reasons import OF_LOADING, as_plans
from oomph.planning.rehearsal_store import RehearsalStore
from oomph.planning.rehearsals import (
    Rehearsed,
    Rehearser,
    Unrehearsed,
    choices_of,
    first_look,
    in_words,
)
from oomph.predicting.combinations import PassSettings, pass_settings_of
from oomph.predicting.timeline import timeline_of
from oomph.records.plan import Offer, PlanOptions, Plans
from oomph.records.prediction import Prediction
from oomph.records.script import Script
from oomph.records.workload import LORA_RANK, Variant, Workload, check_gpus_per_node, check_sharding
from oomph.sensing.target import Target
from oomph.tricks.definition import Severity

if TYPE_CHECKING:
    from oomph.planning.changes import Effort
    from oomph.rehearsing.script.sandboxed import ScriptRehearser


# ---- searching the plans of a workload -----------------------------------------------------------


class _Rank(NamedTuple):
    """How good a variant is before its memory is known. Less is better."""

    changes: tuple[Severity, ...]
    num_gpus: int
    batch_s: float


class Search:
    """One search for plans, with a rehearser or from stored rehearsals alone."""

    def __init__(
        self,
        options: PlanOptions,
        target: Target,
        rehearsed: Rehearsed,
        say: Callable[[str], None],
        *,
        rehearser: Rehearser | None = None,
        store: RehearsalStore | None = None,
        deadline: Deadline | None = None,
    ) -> None:
        """Predict the workload as given. Raises Unrehearsed."""
        self._deadline = deadline or Deadline(options.time_limit_s)
        self.options, self.rehearsed, self.say = options, rehearsed, say
        self._capability = target.capability
        self.estimates = Estimates(
            options, target, rehearsed, say, rehearser, store, self._deadline
        )

    def plans(self, workload: str, *, draws: bool = False) -> Plans:
        """Return the plans, with what is needed to draw them if `draws`. Raises Unrehearsed.

        A variant that cannot be put together is left out, and the others are compared.
        """
        while True:
            self.estimates.check_anew()
            try:
                found = self._searched()
                if self._deadline.is_over:
                    found = self._with_confirmed_alone(found)
                predicted = self._predicted(found) if self._is_true(found) else None
                if predicted is not None:
                    plans = self._answer(workload, found, predicted)
                    return self._drawn(plans) if draws else plans
            except Failed as failed:
                self.estimates.lines.leave_out(failed)

    def _answer(
        self, workload: str, found: Found, predicted: Sequence[tuple[Variant, Prediction]]
    ) -> Plans:
        offers: tuple[Offer, ...] = ()
        if not self._deadline.is_over:
            self.say("comparing what was not allowed")
            offers = find_offers(found, self.estimates, self.options, self._capability)
        return as_plans(workload, self.options, self.estimates, found, predicted, offers)

    # ---- searching -------------------------------------------------------------------------------

    def _searched(self) -> Found:
        """Search micro-batches of two or more examples, and of one only if nothing else fits."""
        given = self.options.tensor_parallel
        found = self._with_layers_of(given or 1)
        if found.is_certain or given is not None or self._deadline.is_over:
            return found
        apart = self._most_that_share_layers()
        return found if apart == 1 else self._with_layers_of(apart)

    def _most_that_share_layers(self) -> int:
        """Return how many GPUs of one machine can share each layer, where nothing else fits.

        The most of them leave each the least, so others are not rehearsed.
        """
        on_one_machine = min(self.options.gpus_per_node, self.options.max_gpus)
        known = self.rehearsed
        refused = (*known.possible.impossible, *known.refused, *self.options.forbid)
        if "tensor-parallel" in refused:
            return 1
        return next((n for n in range(on_one_machine, 1, -1) if _is_power_of_two(n)), 1)

    def _with_layers_of(self, tensor_parallel: int) -> Found:
        """Search with grids in which so many GPUs share each layer, beside those without."""
        smallest = 1 if self.options.prefer == "memory" else 2
        found = self._with_micro_batches_from(smallest, tensor_parallel)
        if found.is_certain or smallest == 1 or self._deadline.is_over:
            return found
        return self._with_micro_batches_from(1, tensor_parallel)

    def _with_micro_batches_from(self, least: int, tensor_parallel: int) -> Found:
        asked = self.rehearsed, self.options, self._capability, least, tensor_parallel
        choices = choices_of(*asked)
        pairs = [(variant, _usual(variant)) for variant in variants(choices)]
        every, hopeless = self.estimates.without_hopeless(
            pairs, lambda variant: changes_in(variant, choices)
        )
        usual = [variant for variant in every if variant == _usual(variant)]
        lines = self.estimates.lines
        lines.complete(usual)
        if choices_of(*asked) != choices:
            # A trick that every variant should use could not be applied.
            return self._with_micro_batches_from(least, tensor_parallel)
        choices = replace(choices, rejected=(*choices.rejected, *hopeless))
        lines.use_points_for(usual)
        found = self._compared(choices, usual)
        if lines.points:
            return found
        found = self._with_finer(every, found)
        num_skipped = len(every) - len(found.compared)
        return replace(self._with_partial(found), num_skipped=num_skipped)

    def _compared(self, choices: Choices, compared: Sequence[Variant]) -> Found:
        self.say("comparing")
        limit_bytes = self.estimates.card.usable.high_bytes
        prefer = self.options.prefer
        why_none = self.estimates.lines.why_nothing_is_known()
        return search(
            choices, self.estimates, limit_bytes, prefer, compared=compared, why_none=why_none
        )

    def _with_finer(self, every: Sequence[Variant], found: Found) -> Found:
        """Compare again with the tricks that only save memory, as long as they may help.

        Start with the fewest changes, the fewest GPUs and the fastest. Once such a variant fits,
        few others may still help, and the rest need no rehearsal.
        """
        choices, reached = found.choices, None
        finer = [
            (self._rank(variant, choices, _usual(variant)), variant)
            for variant in every
            if variant != _usual(variant)
        ]
        if found.best is not None and found.is_certain:
            reached = self._rank(found.best, choices, found.best)
        compared = list(found.compared)
        for rank, variant in sorted(finer, key=lambda pair: pair[0]):
            if not self._may_help(variant, rank, reached):
                continue
            self.estimates.lines.complete([variant])
            compared.append(variant)
            if self.options.prefer != "memory" and self._fits(variant):
                own = self._rank(variant, choices, variant)
                reached = own if reached is None else min(reached, own)
        return self._compared(choices, compared)

    def _rank(self, variant: Variant, choices: Choices, like: Variant) -> _Rank:
        """Rank a variant by the time of a similar one that may already be known."""
        seconds = self.estimates.seconds(like)
        return _Rank(
            changes=changes_in(variant, choices),
            num_gpus=0 if self.options.prefer == "time" else variant.num_gpus,
            batch_s=inf if seconds is None else seconds * choices.batch_size / variant.batch_size,
        )

    def _may_help(self, variant: Variant, rank: _Rank, reached: _Rank | None) -> bool:
        """Return whether a trick that only saves memory could make a better variant fit.

        It can if the variant then changes less of training, or if the user prefers memory. It never
        saves time: it is useless if the variant without it is no faster than one that already fits.
        """
        usual = _usual(variant)
        if not self.estimates.knows(usual):
            return True
        if variant.optimizer_in_backward and not self.estimates.may_fit_in_backward(usual):
            return False
        if reached is None or rank.changes < reached.changes:
            return True
        if rank.changes > reached.changes:
            return False
        if self.options.prefer == "memory":
            return True
        if rank.num_gpus > reached.num_gpus or not isfinite(rank.batch_s):
            return False
        is_faster = rank.batch_s < reached.batch_s / (1 + NEAR_RATIO)
        return is_faster and not self._fits(usual)

    def _fits(self, variant: Variant) -> bool:
        """Return whether the variant certainly fits, judging from the rehearsals of its parts."""
        estimates = self.estimates
        is_possible = estimates.knows(variant) and estimates.has_host_for(variant)
        return is_possible and estimates.check(variant).fits == "yes"

    def _with_partial(self, found: Found) -> Found:
        """Compare again with only some blocks recomputed, if that may beat all or none."""
        best, choices, estimates = found.best, found.choices, self.estimates
        if best is None or "blocks" not in choices.settings["checkpointing"]:
            return found
        changes = changes_in(best, choices)
        alike = [
            variant
            for variant in found.compared
            if changes_in(variant, choices) == changes
            and variant.checkpointing == "none"
            and self._is_like(variant, best)
        ]
        costs, room_bytes = self.rehearsed.costs, estimates.room_bytes
        partial = best_partial(alike, costs, estimates, room_bytes, found.best_s or 0.0)
        if partial is None:
            return found
        estimates.lines.complete([partial])
        return self._compared(choices, [*found.compared, partial])

    def _is_like(self, variant: Variant, best: Variant) -> bool:
        """Return whether it uses as many GPUs and is also known with all blocks recomputed."""
        return (
            variant.num_gpus == best.num_gpus
            and variant == _usual(variant)
            and not variant.expandable_segments
            and self.estimates.knows(variant)
            and self.estimates.knows(replace(variant, checkpointing="blocks"))
        )

    # ---- checking the result against rehearsals --------------------------------------------------

    def _is_true(self, found: Found) -> bool:
        """Return whether a far rehearsal confirms the line of every plan that would be shown.

        Lines tend to fail together: if one is refuted, all lines are checked.
        """
        lines = self.estimates.lines
        if lines.points or self._deadline.is_over:
            return True
        if found.best is not None:  # it is rehearsed anyway, and that may settle it
            self.estimates.predicted_row(found.best, is_exact=True)
        farthest = self._farthest(found.compared)
        shown = dict.fromkeys(pass_settings_of(variant) for variant in found.shown)
        if all(lines.holds(farthest[settings]) for settings in shown if settings in farthest):
            return True
        for variant in farthest.values():
            lines.holds(variant)
        return False

    def _with_confirmed_alone(self, found: Found) -> Found:
        """Leave out, late, what is shown beside the best and would need a rehearsal to be sure."""
        lines = self.estimates.lines
        if lines.points:
            return found
        farthest = self._farthest(found.compared)
        shown: list[Variant] = []
        unsure: list[Variant] = []
        for variant in found.shown:
            far = farthest.get(pass_settings_of(variant))
            is_sure = variant == found.best or far is None or lines.has_confirmed(far)
            (shown if is_sure else unsure).append(variant)
        self._deadline.leave_out(map(in_words, unsure))
        return replace(found, shown=tuple(shown))

    def _farthest(self, compared: Sequence[Variant]) -> dict[PassSettings, Variant]:
        """Return the largest micro-batch that may fit, for each forward and backward."""
        return {
            pass_settings_of(variant): variant
            for variant in sorted(compared, key=lambda one: one.micro_batch)
            if variant.micro_batch > 1
            and self.estimates.knows(variant)
            and self.estimates.may_fit(variant)
        }

    def _predicted(self, found: Found) -> list[tuple[Variant, Prediction]] | None:
        """Predict the plans, the best from its own rehearsal; None if that refutes the search."""
        predicted = []
        for variant in found.shown:
            is_best = variant == found.best
            prediction = self.estimates.predicted_row(variant, is_exact=is_best)
            is_refuted = prediction.fits == "no" or (found.is_certain and prediction.fits != "yes")
            if is_best and is_refuted:
                self.estimates.refuted.add(variant)
                return None
            if prediction.fits != "no":
                predicted.append((variant, prediction))
        return predicted

    def _drawn(self, plans: Plans) -> Plans:
        traces = (self.estimates.trace(p.variant, is_exact=p.recommended) for p in plans)
        return replace(plans, timelines=tuple(map(timeline_of, traces)))


def _usual(variant: Variant) -> Variant:
    """Return the variant without the tricks that save memory but never time.

    On several GPUs each variant is rehearsed for each number of GPUs, so selective checkpointing is
    also removed there.
    """
    is_finer = variant.checkpointing == "selective" and variant.num_gpus > 1
    return replace(
        variant,
        checkpointing="none" if is_finer else variant.checkpointing,
        optimizer_in_backward=False,
        offload_activations=False,
        offload_optimizer=False,
        zero_offload=False,
    )


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0


_MOST_GPUS = 1024  # judgement: beyond the largest jobs that train one model with these tricks
_MOST_CHARACTERS = 200  # of an error message; judgement: two lines on screen

Say = Callable[[str], None]


def check_options(options: PlanOptions) -> None:
    """Raise UsageError for a question that cannot be planned, before anything is rehearsed."""
    check_names(sorted(options.allow), "allow")
    check_names(sorted(options.forbid), "forbid")
    if options.batch_size is not None and options.batch_size < 1:
        raise UsageError(
            f"a batch size of {options.batch_size} is not possible", attempt="1 or more, such as 64"
        )
    if not 1 <= options.max_gpus <= _MOST_GPUS:
        raise UsageError(
            f"oomph cannot plan for {options.max_gpus} GPUs", attempt=f"1 to {_MOST_GPUS} GPUs"
        )
    check_gpus_per_node(options.gpus_per_node)
    _check_tensor_parallel(options)
    if not 0 < options.target_ratio <= 1:
        raise UsageError(
            f"a plan cannot fill {options.target_ratio:.0%} of a GPU", attempt="--target-memory 90%"
        )
    usual = (LORA_RANK, "all-linear")
    if (options.lora_rank, options.lora_targets) != usual and not options.allow & {"lora", "qlora"}:
        raise UsageError(
            "rank and targets are those of adapters, and none are allowed",
            attempt="--allow lora, or qlora",
        )
    both = sorted(options.allow & options.forbid)
    if both:
        raise UsageError(
            f"{both[0]} is both allowed and forbidden", attempt="allowing or forbidding it"
        )


def _check_tensor_parallel(options: PlanOptions) -> None:
    """Raise UsageError unless so many GPUs of one machine may share each layer."""
    apart, most = options.tensor_parallel, options.max_gpus
    if apart is None:
        return
    if apart > most:
        raise UsageError(
            f"{apart} GPUs cannot share each layer",
            because=f"only {most} may be used",
            attempt=f"--max-gpus {apart}, or --nodes 1",
        )
    check_sharding(None, min(most, options.gpus_per_node), options.gpus_per_node, apart)


def plan_workload(
    workload: Workload | tuple[Path, str],
    name: str,
    options: PlanOptions,
    target: Target,
    say: Say,
    *,
    draws: bool,
) -> Plans:
    """Plan a workload, or the workload with this name in a file."""
    from oomph.records.generation import trace_capability
    from oomph.rehearsing.traces import with_rehearser

    deadline = Deadline(options.time_limit_s)
    capability, store, known = trace_capability(target.capability), None, None
    if isinstance(workload, tuple):
        store = RehearsalStore(workload, capability, options.keeps)
        known = store.find()
    if store is not None and known is not None:
        num_known = len(known.replays) + len(known.unlimited_peaks)
        with contextlib.suppress(Unrehearsed):
            plans = Search(options, target, known, say, store=store).plans(name, draws=draws)
            if len(known.replays) + len(known.unlimited_peaks) > num_known:
                store.keep_replays(known)
            return plans

    say("starting torch")

    rehearse = partial(
        _searched, name, options, target, say, known=known, store=store, deadline=deadline
    )
    plans, rehearsed = with_rehearser(
        workload, capability, partial(rehearse, draws=draws), keeps=options.keeps
    )
    if store is not None:
        store.keep(rehearsed)
    return plans


def _searched(
    name: str,
    options: PlanOptions,
    target: Target,
    say: Say,
    rehearser: Rehearser,
    *,
    known: Rehearsed | None,
    store: RehearsalStore | None,
    deadline: Deadline,
    draws: bool,
) -> tuple[Plans, Rehearsed]:
    """Search with a rehearser, in its child -> the plans, and what is known by now."""
    say("looking at the model")
    rehearsed = known or first_look(rehearser)
    search = Search(
        options, target, rehearsed, say, rehearser=rehearser, store=store, deadline=deadline
    )
    return search.plans(name, draws=draws), rehearsed


def plan_script(
    script: Script,
    options: PlanOptions,
    target: Target,
    say: Say,
    *,
    draws: bool,
    effort: Effort,
    is_unprotected: bool,
    is_fresh: bool,
) -> Plans:
    """Plan a script, and say what to change in it for the best plan, with this much effort."""
    from oomph.planning.changes import find_changes  # only scripts need it
    from oomph.rehearsing.script.sandboxed import rehearser_of

    deadline = Deadline(options.time_limit_s)
    with rehearser_of(
        script, target, say, is_unprotected=is_unprotected, is_fresh=is_fresh
    ) as rehearser:
        _check_it_steps(rehearser.seen.has_stepped)
        _hold_what_cannot_vary(rehearser, options)
        say("looking at the model")
        try:
            looked = first_look(rehearser)
            search = Search(options, target, looked, say, rehearser=rehearser, deadline=deadline)
            plans = search.plans(script.path or f"-m {script.module}", draws=draws)
        except CannotBePutOn as error:  # this variant is the baseline of the comparison
            raise error.error from None
        changes = None
        if plans.best is not None:
            changes = find_changes(
                script,
                rehearser,
                plans.best,
                target,
                say,
                effort=effort,
                is_unprotected=is_unprotected,
            )
    seen, caveats = rehearser.seen, plans.caveats
    if not seen.is_batch_known:  # steps per second do not give samples per second then
        caveats = tuple(one for one in caveats if not one.startswith(OF_LOADING))
    caveats += tuple(one for one in seen.approximations if one not in caveats)
    return replace(plans, seen=seen, caveats=caveats, changes=changes)


def _check_it_steps(has_stepped: bool) -> None:
    if not has_stepped:
        raise UserCodeError(
            "the script made no optimizer step while it was rehearsed",
            because="so the optimizer's memory is unknown, and plans would come out too small",
            attempt="oomph predict, which gives a lower bound; or a Workload",
        )


def _hold_what_cannot_vary(rehearser: ScriptRehearser, options: PlanOptions) -> None:
    """Compare everything else at the script's own batch size if that cannot change."""
    from oomph.rehearsing.script.sandboxed import SMALL

    if rehearser.seen.micro_batch is None:
        if options.batch_size is not None:
            _ = rehearser.micro_batch  # raises
        doubt = rehearser.seen.batch_doubt
        rehearser.hold_batch(
            f"the batch size is unknown ({doubt}), so oomph cannot divide the batch"
        )
        return
    # The search asks for this variant first, so it is rehearsed only once.
    small = Variant(micro_batch=SMALL, accumulation=2, precision=rehearser.own.precision)
    try:
        rehearser.trace(small)
    except CannotBePutOn as error:
        if options.batch_size is not None:
            raise error.error from None
        why = f"{error.error.what}: {error.error.because}"[:_MOST_CHARACTERS]
        num = rehearser.given.micro_batch
        rehearser.hold_batch(f"the micro-batch of {num} cannot change: {why}")
