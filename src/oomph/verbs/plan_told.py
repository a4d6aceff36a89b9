"""What a search found -> Plans: in words, with what was left out and what would do."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from oomph.planning.answers import Facts
    from oomph.planning.choices import Choices
    from oomph.planning.planner import Found
    from oomph.records.plan import Plans, Rejected, Shortfall
    from oomph.records.prediction import Prediction
    from oomph.records.workload import Variant
    from oomph.verbs.plan_figures import Figures
    from oomph.verbs.rehearsals import Asked

_NO_LINE = "allocations are no line in the micro-batch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What was looked at, and what was found in it."""

    choices: Choices
    compared: Sequence[Variant]  # what no rehearsal speaks for included
    num_skipped: int  # ways that only save memory, and were not rehearsed
    found: Found


def told(
    workload: str,
    asked: Asked,
    figures: Figures,
    searched: Searched,
    kept: Sequence[tuple[Variant, Prediction]],
) -> Plans:
    """The whole answer, for the variants that are kept of those that were to be shown."""
    from oomph.planning import answers
    from oomph.records.plan import Plans
    from oomph.verbs.plan_reach import reach_of

    facts = _facts(workload, asked, figures, searched)
    plans = answers.told_apart(
        [answers.plan_of(v, p, figures.seconds(v), facts) for v, p in kept], facts
    )
    plans = tuple(replace(plan, reach=reach_of(plan, figures)) for plan in plans)
    return Plans(
        workload=workload,
        gpu=figures.card.name,
        batch_size=searched.choices.batch_size,
        capacity_bytes=figures.card.usable.likely_bytes,
        fits_as_is=figures.as_is.fits,
        as_is=figures.as_is,
        plans=plans,
        rejected=(*searched.choices.rejected, *_not_compared(figures, searched)),
        shortfall=None if plans else _shortfall(figures, searched.found),
        caveats=(
            *answers.caveats(plans[0] if plans else None, facts, figures.seconds),
            *figures.rehearsed.notes,
        ),
        largest_micro_batch=_largest_as_is(figures),
        num_candidates=searched.found.num_candidates,
    )


def _facts(workload: str, asked: Asked, figures: Figures, searched: Searched) -> Facts:
    from oomph.planning.answers import Facts
    from oomph.stability.rates import new_rate

    possible = figures.rehearsed.possible
    return Facts(
        workload=workload,
        as_is=figures.as_is,
        fastest_s=searched.found.fastest_s,
        changing=searched.found.changing,
        own=searched.choices.own,
        coupled_micro_batch=searched.choices.coupled_micro_batch,
        prefer=asked.prefer,
        batch_norm_names=possible.batch_norm_names,
        has_dropout=possible.has_dropout,
        block_names=possible.block_names,
        batch_size=searched.choices.batch_size,
        rate_advice=lambda ratio: new_rate(possible.optimizer_class, ratio).advice,
    )


# ---- what was not compared -----------------------------------------------------------------------


def _not_compared(figures: Figures, searched: Searched) -> list[Rejected]:
    from oomph.records.plan import Rejected

    if figures.lines.points:
        if "accumulation" in figures.rehearsed.refused:  # a script's batch that cannot be another
            return []
        sizes = ", ".join(map(str, sorted(figures.lines.points, reverse=True)))
        return [
            Rejected(
                what=f"micro-batches other than {sizes}",
                why=f"the model's {_NO_LINE}: each that is compared was rehearsed itself",
            )
        ]
    return [
        *_skipped(searched),
        *_without_a_line(figures, searched.compared),
        *_not_borne(figures, searched.compared),
    ]


def _not_borne(figures: Figures, compared: Sequence[Variant]) -> list[Rejected]:
    """What the script fails with."""
    from oomph.predicting.ways import family_of, step_of
    from oomph.records.plan import Rejected
    from oomph.verbs.rehearsals import in_words

    failed = figures.rehearsed.failed
    found: dict[str, str] = {}
    for variant in compared:
        why = failed.get(family_of(variant)) or failed.get(step_of(variant))
        if why is not None:
            found.setdefault(why, in_words(variant))
    return [
        *(Rejected(what=what, why=why) for why, what in found.items()),
        *_not_put_together(figures, compared),
    ]


def _not_put_together(figures: Figures, compared: Sequence[Variant]) -> list[Rejected]:
    """What failed when it was compared, and how many ways it would have been."""
    from oomph.records.plan import Rejected
    from oomph.verbs.rehearsals import in_short, in_words

    failed: dict[str, list[str]] = {}
    for variant in compared:
        why = figures.lines.why_failed(variant)
        if why is not None:
            failed.setdefault(in_short(why.error), []).append(in_words(variant))
    return [
        Rejected(
            what=words[0] if len(words) == 1 else f"{len(words)} ways ({words[0]}, ...)", why=why
        )
        for why, words in failed.items()
    ]


def _skipped(searched: Searched) -> list[Rejected]:
    from oomph.records.plan import Rejected

    if not searched.num_skipped:
        return []
    is_enough = (
        "they only save memory, and are too large or no faster than what fits: --prefer memory"
    )
    why = is_enough if searched.found.is_certain else "what they save would not be enough"
    which = "with offload or the optimizer in backward"
    if len(searched.choices.shardings) > 1:
        which += ", or on several GPUs with selective recomputation"
    return [Rejected(what=f"{searched.num_skipped} ways {which}", why=why)]


def _without_a_line(figures: Figures, compared: Sequence[Variant]) -> list[Rejected]:
    """What this question would have compared, and no rehearsal speaks for."""
    from oomph.predicting.ways import family_of
    from oomph.records.plan import Rejected
    from oomph.verbs.rehearsals import for_family, in_words

    unknown = {*figures.rehearsed.not_affine, *figures.lines.broken}
    families = (v for v in compared if v.micro_batch > 1 and family_of(v) in unknown)
    words = dict.fromkeys(in_words(for_family(v, v.micro_batch)) for v in families)
    return [Rejected(what=each, why=f"its {_NO_LINE}: ask oomph predict") for each in words]


# ---- how far it could grow, and what would do ----------------------------------------------------


def _largest_as_is(figures: Figures) -> int | None:
    """The largest micro-batch that fits as the workload was given; None where that is unknown.

    Far beyond what was rehearsed, what has an entry for each pair of examples is the most.
    """
    from oomph.verbs.rehearsals import pairs_in

    as_given, lines = figures.as_is.variant, figures.lines
    if figures.as_is.fits != "yes" or lines.points or as_given.micro_batch == 1:
        return None
    if pairs_in(figures.rehearsed) or not lines.knows(as_given) or not lines.holds(as_given):
        return None

    def fits(micro_batch: int) -> bool:
        return figures.check(replace(as_given, micro_batch=micro_batch)).fits == "yes"

    return _largest(fits, as_given.micro_batch)


def _largest(fits: Callable[[int], bool], known: int) -> int:
    """To about a sixteenth, from one that fits."""
    beyond = 2 * known
    while fits(beyond):
        known, beyond = beyond, 2 * beyond
    while beyond - known > max(known // 16, 1):
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known


def _shortfall(figures: Figures, found: Found) -> Shortfall:
    from oomph.planning import answers
    from oomph.predicting.overhead import usable_bytes
    from oomph.verbs.readings import catalog

    smallest = figures.predicted(found.smallest, is_exact=False)
    sizes = [(model.name, usable_bytes(model).low_bytes) for model in catalog()]
    return answers.shortfall(smallest, sizes, answers.gpus_that_would_do(smallest))
