"""The result of a search -> offers: what a trick that was not allowed would give, and its price.

A trick that changes training is never in a plan without consent. Where it would make something fit,
or a plan clearly faster or smaller, the answer says so. Offers are computed cheaply: an offer keeps
the settings of the recommended plan as far as possible, so it needs the rehearsals of one forward
and backward and of one optimizer step, and all offers together a share of those of the search.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace

from oomph.planning.choices import Choices, variants
from oomph.planning.estimates import Estimates
from oomph.planning.ranking import (
    Candidate,
    Found,
    Times,
    candidate_of,
    changes_in,
    is_slower,
    severity_of,
    times_of,
)
from oomph.planning.rehearsals import choices_of
from oomph.predicting.combinations import PassSettings, Step, pass_settings_of, step_of
from oomph.predicting.overhead import usable_bytes
from oomph.records.plan import Offer, PlanOptions
from oomph.records.prediction import Prediction
from oomph.records.workload import Variant
from oomph.sensing.catalog import all_models
from oomph.tricks import batch_size
from oomph.tricks.definition import Severity
from oomph.tricks.trick import BATCH_SIZE, BY_NAME, NEED_CONSENT, tricks_on

MOST_OFFERS = 3  # so that the answer reads at a glance; judgement
# How many rehearsals all offers may take: a quarter of those of the search, and enough for two
# changes of the model. Judgement: an offer answers what was not asked.
_SHARE, _LEAST_REHEARSALS = 4, 8
_OF_A_PASS, _OF_A_STEP = 2, 1  # rehearsals: two points make a line
# An offer that is not faster than a milder plan has to save this share of its memory. Judgement.
_WORTH_RATIO = 0.25
_OF_SPLIT = ("micro_batch", "accumulation", "num_gpus", "gpus_per_node", "checkpointing")
_SETTINGS = tuple(one.name for one in fields(Variant) if one.name not in _OF_SPLIT)


def find_offers(
    found: Found, estimates: Estimates, options: PlanOptions, capability: tuple[int, int]
) -> tuple[Offer, ...]:
    """Return the offers that matter, the mildest first. May raise Unrehearsed or Failed."""
    if estimates.lines.points:  # each size is rehearsed by itself
        return ()
    if found.best is not None and found.is_certain and not tricks_on(found.best):
        return ()  # nothing has to change, and nobody asked
    return _Offers(found, estimates, options, capability).found()


class _Offers:
    """One search for offers."""

    def __init__(
        self,
        found: Found,
        estimates: Estimates,
        options: PlanOptions,
        capability: tuple[int, int],
    ) -> None:
        self._found, self._estimates, self._options = found, estimates, options
        self._capability = capability
        self._parts = _parts(found.compared)
        self._left = max(_cost(self._parts) // _SHARE, _LEAST_REHEARSALS)
        self._is_needed = found.best is None or not found.is_certain
        self._like = found.smallest if found.best is None else found.best

    def found(self) -> tuple[Offer, ...]:
        offered: list[tuple[Candidate, Offer]] = []
        for name in self._names():
            one = self._best_with(name, [candidate for candidate, _ in offered])
            if one is not None:
                offered.append((one, self._offer(name, one)))
        fitting = [offer for _, offer in offered if offer.fits == "yes"]
        if fitting or not self._is_needed:
            return tuple(fitting[:MOST_OFFERS])
        nearest = min(offered, key=lambda pair: pair[1].device_bytes, default=None)
        return () if nearest is None else (nearest[1],)

    def _names(self) -> list[str]:
        """Return the tricks that only lack consent, the mildest first."""
        answered = {*self._options.allow, *self._options.forbid}
        return sorted((name for name in NEED_CONSENT if name not in answered), key=_severity)

    def _best_with(self, name: str, milder: Sequence[Candidate]) -> Candidate | None:
        """Return the plan to offer with this trick, or None if it is not worth an offer."""
        options = replace(self._options, allow=self._options.allow | {name})
        least = self._found.choices.least_micro_batch
        choices = choices_of(self._estimates.rehearsed, options, self._capability, least)
        if name in {rejected.what for rejected in choices.rejected}:
            return None
        times = times_of(self._estimates, choices)
        for alike in self._groups(name, choices):
            if not self._can_afford(alike):
                continue
            self._estimates.lines.complete(alike)
            known = [
                one
                for one in alike
                if self._estimates.knows(one) and self._estimates.has_host_for(one)
            ]
            candidates = [candidate_of(one, self._estimates, choices) for one in known]
            one = self._chosen(candidates, times)
            if one is not None and self._is_worth(one, milder, times) and self._is_true(known):
                return one
        return None

    def _groups(self, name: str, choices: Choices) -> Iterator[list[Variant]]:
        """Yield the variants with this trick that are most like the plan, with or without blocks.

        They have none of the tricks that only save memory, which another change may make needless.
        """
        plain = replace(
            self._like,
            optimizer="as-is",
            optimizer_in_backward=False,
            offload_activations=False,
            offload_optimizer=False,
            zero_offload=False,
            expandable_segments=False,
        )
        is_other_batch = name == BATCH_SIZE
        with_it = [
            variant
            for variant in variants(choices)
            if (variant.batch_size != choices.batch_size) == is_other_batch
            and (is_other_batch or BY_NAME[name] in tricks_on(variant))
            and len(changes_in(variant, choices)) <= 1
        ]
        for checkpointing in ("blocks", "none") if self._is_needed else ("none", "blocks"):
            alike = [one for one in with_it if one.checkpointing == checkpointing]
            nearest = min((_distance(one, plain) for one in alike), default=0)
            if alike:
                yield [one for one in alike if _distance(one, plain) == nearest]

    def _can_afford(self, alike: Sequence[Variant]) -> bool:
        """Return whether the rehearsals of these variants are not too many, and spend them."""
        more = _parts(alike) - self._parts
        if _cost(more) > self._left:
            return False
        self._left -= _cost(more)
        self._parts |= more
        return True

    def _chosen(self, candidates: Sequence[Candidate], times: Times) -> Candidate | None:
        """Return the smallest of those that are as fast as the fastest that certainly fits.

        If nothing fits, also without the trick, return the smallest of all.
        """
        fitting = [one for one in candidates if self._fits(one)]
        if fitting:
            fastest = min(fitting, key=lambda one: one.step_s)
            as_fast = [one for one in fitting if not is_slower(one, fastest, times)]
            return min(as_fast, key=self._device_bytes)
        if not self._is_needed:
            return None
        return min(candidates, key=lambda one: one.least_bytes, default=None)

    def _is_worth(self, one: Candidate, milder: Sequence[Candidate], times: Times) -> bool:
        if self._is_needed:
            return not any(self._fits(other) and self._beats(other, one, times) for other in milder)
        best, *unchanged = (
            candidate_of(each, self._estimates, self._found.choices)
            for each in (self._like, *self._found.front)
        )
        if any(self._beats(other, one, times) for other in (best, *unchanged, *milder)):
            return False
        size = self._device_bytes(one)
        is_smaller = size <= self._device_bytes(best) * (1 - _WORTH_RATIO)
        return is_slower(best, one, times) or (is_smaller and not is_slower(one, best, times))

    def _beats(self, milder: Candidate, one: Candidate, times: Times) -> bool:
        """Return whether a milder plan is as fast and hardly larger."""
        is_smaller = self._device_bytes(one) <= self._device_bytes(milder) * (1 - _WORTH_RATIO)
        return not is_smaller and not is_slower(milder, one, times)

    def _is_true(self, known: Sequence[Variant]) -> bool:
        """Return whether a far rehearsal confirms the line that the offer rests on."""
        several = [v for v in known if v.micro_batch > 1 and self._estimates.may_fit(v)]
        if not several:
            return True
        return self._estimates.lines.holds(max(several, key=lambda one: one.micro_batch))

    def _fits(self, one: Candidate) -> bool:
        return self._estimates.check(one.variant).fits == "yes"

    def _device_bytes(self, one: Candidate) -> int:
        return self._estimates.check(one.variant).device_bytes

    def _offer(self, name: str, one: Candidate) -> Offer:
        prediction = self._estimates.predicted_row(one.variant, is_exact=False)
        best_s = self._found.best_s
        is_timed = prediction.step_s is not None and best_s is not None
        return Offer(
            allow=name,
            price=_price(name),
            variant=one.variant,
            fits=prediction.fits,
            device_bytes=prediction.device_bytes,
            high_bytes=prediction.high_bytes,
            missing_bytes=missing_bytes(prediction),
            host_bytes=prediction.host_bytes,
            step_s=prediction.step_s,
            time_ratio=one.step_s / best_s if is_timed and best_s else None,
            smallest_gpu=None if prediction.fits == "yes" else smallest_gpu(prediction),
        )


def missing_bytes(prediction: Prediction) -> int:
    """Return how much memory a variant needs beyond that of the GPU."""
    return max(prediction.device_bytes - prediction.capacity_bytes, 0)


def smallest_gpu(prediction: Prediction) -> str | None:
    """Return the smallest GPU of the catalogue on which it would fit for certain."""
    sizes = [(usable_bytes(model).low_bytes, model.name) for model in all_models()]
    return min((pair for pair in sizes if pair[0] >= prediction.high_bytes), default=(0, None))[1]


def _severity(name: str) -> Severity:
    return batch_size.SEVERITY if name == BATCH_SIZE else severity_of(BY_NAME[name])


def _price(name: str) -> str:
    if name == BATCH_SIZE:
        return batch_size.PRICE
    trick = BY_NAME[name]
    if trick.price is not None:
        return trick.price
    if trick.splits_batch:
        return "examples that depend on each other are seen in smaller groups"
    return trick.needs_consent or "oomph check found that it changes this training"


def _distance(variant: Variant, plain: Variant) -> int:
    """Count the settings in which two variants differ, except for the split of the batch."""
    return sum(getattr(variant, name) != getattr(plain, name) for name in _SETTINGS)


def _parts(compared: Iterable[Variant]) -> set[PassSettings | Step]:
    """Return what has to be rehearsed for these variants."""
    found: set[PassSettings | Step] = set()
    for variant in compared:
        found |= {pass_settings_of(variant), step_of(variant)}
    return found


def _cost(parts: Iterable[PassSettings | Step]) -> int:
    """Count the rehearsals that these parts take."""
    return sum(_OF_A_PASS if isinstance(part, PassSettings) else _OF_A_STEP for part in parts)
