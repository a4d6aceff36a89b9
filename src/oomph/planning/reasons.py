"""The result of a search -> Plans: why this plan, what each trick costs, and what else would fit.

Caveats use this model's numbers, not rules of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from oomph.exporting.planned import Planned
from oomph.planning.choices import Choices
from oomph.planning.estimates import Estimates, micro_batch_limits
from oomph.planning.offers import missing_bytes, smallest_gpu
from oomph.planning.ranking import Found, own_of, stability_in, tricks_of
from oomph.planning.rehearsals import in_short, in_words, pairs_in, variant_for_passes
from oomph.predicting.combinations import pass_settings_of, step_of
from oomph.records.plan import (
    Offer,
    Plan,
    PlanOptions,
    Plans,
    Preference,
    Rejected,
    Shortfall,
    Stability,
    Trick,
)
from oomph.records.prediction import Prediction
from oomph.records.workload import GPUS_PER_NODE, Possible, Variant, fills_nodes, grid_of
from oomph.units import format_bytes, format_rate, format_ratio

OF_LOADING = "the loader must keep up with"  # the start of a caveat about samples per second
_WORTH_SPARING = 0.01  # of the GPU's memory: less hardly changes what fits; judgement
_NOT_LINEAR = "memory does not grow linearly with the micro-batch"

Seconds = Callable[[Variant], float | None]


def as_plans(
    workload: str,
    options: PlanOptions,
    estimates: Estimates,
    found: Found,
    predicted: Sequence[tuple[Variant, Prediction]],
    offers: tuple[Offer, ...] = (),
) -> Plans:
    """Return the whole answer for the shown variants and their predictions."""
    possible, seconds = estimates.rehearsed.possible, estimates.seconds
    plans = recommend(
        [plan_of(v, p, seconds(v), workload, found, possible) for v, p in predicted], options.prefer
    )
    plans = tuple(replace(plan, reach=micro_batch_limits(plan, estimates)) for plan in plans)
    best = plans[0] if plans else None
    return Plans(
        workload=workload,
        gpu=estimates.card.name,
        batch_size=found.choices.batch_size,
        capacity_bytes=estimates.card.usable.likely_bytes,
        fits_as_is=estimates.as_is.fits,
        as_is=estimates.as_is,
        plans=plans,
        rejected=(*found.choices.rejected, *_not_compared(estimates, found)),
        shortfall=_shortfall(estimates, found) if best is None else None,
        offers=offers,
        caveats=(
            *estimates.as_is.notes,
            *(_of_precision(best, options.checked, estimates) if best else ()),
            *(caveats(best, found.choices, possible, seconds) if best else ()),
            *(_of_host(best, estimates.limit_host_bytes) if best else ()),
            *(_of_gradients(best, estimates) if best else ()),
        ),
        largest_micro_batch=_largest_as_is(estimates),
        num_candidates=found.num_candidates,
        cut=estimates.lines.deadline.cut(),
    )


def plan_of(
    variant: Variant,
    prediction: Prediction,
    seconds: float | None,
    workload: str,
    found: Found,
    possible: Possible,
) -> Planned:
    """Return a variant as a plan, before it is compared with the others."""
    choices = found.choices
    ratio = variant.batch_size / choices.batch_size
    tricks = tricks_of(variant, choices.changing, own_of(variant, choices))
    if variant.batch_size != choices.batch_size:
        tricks = (*tricks, _other_batch(variant.batch_size, choices.batch_size, possible))
    return Planned(
        gpu=prediction.gpu,
        workload=workload,
        variant=variant,
        prediction=prediction,
        tricks=tricks,
        stability=stability_in(variant, choices),
        relative_time=None if seconds is None else seconds / ratio / found.fastest_s,
        recommended=False,
        why="",
        block_names=possible.block_names,
    )


def _other_batch(batch_size: int, given: int, possible: Possible) -> Trick:
    from oomph.tricks.batch_size import new_rate

    return Trick(
        name="batch-size",
        what=f"a batch of {batch_size} instead of {given}",
        stability="changes",
        caveat=new_rate(possible.optimizer_class, batch_size / given).advice,
        code=f"batch_size={batch_size} in the loader, and the optimizer's rate",
    )


# ---- why this plan -------------------------------------------------------------------------------


def recommend(plans: Sequence[Planned], prefer: Preference) -> tuple[Planned, ...]:
    """Return the plans, the recommended one first, each with a sentence on its advantage."""
    if not plans:
        return ()
    best, others = plans[0], plans[1:]
    return (
        replace(best, recommended=True, why=_why_best(best, others, prefer)),
        *(replace(plan, why=_against(plan, best)) for plan in others),
    )


def _why_best(best: Plan, others: Sequence[Plan], prefer: Preference) -> str:
    headroom = best.prediction.capacity_bytes - best.prediction.high_bytes
    if headroom >= 0:
        room = f"at least {format_bytes(headroom)} stay free"
    elif best.fits == "yes":  # torch can give back what it has cached
        room = "fits even in the worst case, when torch frees its cache"
    else:
        room = "it is tight: the error bar reaches beyond the GPU's memory"
    return f"{_praise(best, others, prefer)}; {room}"


def _praise(best: Plan, others: Sequence[Plan], prefer: Preference) -> str:
    if not best.tricks:
        return "it fits as it is"
    if prefer == "memory":
        return "needs the least memory of all that fit"
    if prefer == "resources":
        return "needs the fewest GPUs and the least host memory"
    if best.relative_time is None:
        return f"changes the least of what fits on {_gpus(best.gpus)} (its time is unknown)"
    faster = [plan for plan in others if 0 < _time(plan) < best.relative_time]
    kept = {
        "same": "the update stays exactly the same",
        "rounding": "the update is the same up to rounding",
        "changes": "training changes, as you allowed",
    }[best.stability]
    if not faster:
        return f"the fastest that fits; {kept}"
    if best.stability != "changes" and faster[0].stability == "changes":
        return f"{kept}; tricks that you allowed would be faster but are not needed"
    if faster[0].gpus > best.gpus:
        return f"the fastest on {_gpus(best.gpus)}; {kept}"
    return f"nearly the fastest that fits, and changes less; {kept}"


def _against(plan: Plan, best: Plan) -> str:
    """Return how another plan differs from the recommended one."""
    ratio = plan.prediction.device_bytes / best.prediction.device_bytes
    costs = f"{ratio:.2f} x the memory of the recommended plan"
    if _time(plan) and _time(best):
        costs = f"{_time(plan) / _time(best):.2f} x the time, {costs}"
    return costs if plan.gpus == best.gpus else f"{costs}, on {_gpus(plan.gpus)}"


def _gpus(number: int) -> str:
    return "one GPU" if number == 1 else f"{number} GPUs"


def _time(plan: Plan) -> float:
    return plan.relative_time or 0.0


# ---- caveats -------------------------------------------------------------------------------------


def caveats(best: Plan, choices: Choices, possible: Possible, seconds: Seconds) -> tuple[str, ...]:
    """Return what accumulation and recomputation really cost here."""
    variant = best.variant
    found = (
        _of_accumulation(variant, seconds, choices, possible),
        _of_recomputation(variant, seconds),
        _OF_DROPOUT if variant.accumulation > 1 and possible.has_dropout else None,
        _of_loading(best.prediction.samples_per_s),
        _of_outputs(best.prediction.outputs_bytes),
    )
    return tuple(caveat for caveat in found if caveat)


_OF_BF16 = "bf16 has the range of fp32 but only 8 significant bits: compare the first losses"
_OF_FP16 = "fp16: whether this model's values overflow is not known"
_WATCH = "watch the loss scaler for skipped steps"
_OF_DROPOUT = "dropout masks differ per micro-batch: equal on average, not bit-identical"


def _of_precision(
    best: Plan, checked: Mapping[str, Stability], estimates: Estimates
) -> tuple[str, ...]:
    """Return what is not known of a lower precision, and the command that finds out."""
    precision = best.precision
    if precision == "bf16":
        return () if precision in checked else (_OF_BF16,)
    if precision != "fp16":
        return ()
    if precision in checked:
        return (f"fp16: oomph check ran it with a few examples; {_WATCH}",)
    if estimates.rehearsed.given is not None:  # a script; oomph check needs a workload
        return (f"{_OF_FP16}: {_WATCH}",)
    path, _, name = best.workload.rpartition(":")
    where = f"oomph check {best.workload} --only fp16" if path and name else "oomph.check(workload)"
    return (f"{_OF_FP16}. Next: {where}, or oomph plan --check; in training, {_WATCH}",)


def _of_accumulation(
    variant: Variant, seconds: Seconds, choices: Choices, possible: Possible
) -> str | None:
    if variant.accumulation == 1 or variant.micro_batch == choices.coupled_micro_batch:
        return None
    whole = replace(variant, micro_batch=variant.micro_batch * variant.accumulation, accumulation=1)
    here, at_once = seconds(variant), seconds(whole)
    if here is None or at_once is None:
        return None
    cost = f"accumulation makes a step {_slower(here / at_once)}"
    if possible.batch_norm_names:
        layers = len(possible.batch_norm_names)
        return f"{cost}; {layers} BatchNorm layers see {variant.micro_batch} examples at a time"
    if "accumulation" in choices.changing:
        return f"{cost}; the loss compares {variant.micro_batch} examples with one another"
    return f"{cost}; there is no BatchNorm, so the update is the same"


def _of_recomputation(variant: Variant, seconds: Seconds) -> str | None:
    if variant.checkpointing == "none":
        return None
    here, kept = seconds(variant), seconds(replace(variant, checkpointing="none"))
    if here is None or kept is None:
        return None
    return f"recomputation makes a step {_slower(here / kept)} at this micro-batch"


def _of_host(best: Plan, limit_bytes: int | None) -> list[str]:
    """Return what the plan takes of the host's memory."""
    taken = best.prediction.host_bytes * best.gpus
    if not taken:
        return []
    if limit_bytes is None:
        known = "how much there is, is unknown: --host-memory SIZE"
    else:
        known = f"{format_bytes(limit_bytes)} is free"
    return [f"needs {format_bytes(taken)} of host memory; {known}"]


def _of_gradients(best: Plan, estimates: Estimates) -> list[str]:
    """Say what gradients that stay in memory during forward cost."""
    spared = estimates.spared_by_freeing_gradients(best.variant)
    if spared < _WORTH_SPARING * best.prediction.capacity_bytes:
        return []
    call = "optimizer.zero_grad(set_to_none=True) before the forward"
    kept = "gradients of the last step stay in memory during forward"
    return [f"{kept}: {call} would save about {format_bytes(spared)}"]


def _of_outputs(more_bytes: int) -> str | None:
    """Return what the verdict includes and the figure does not."""
    if not more_bytes:
        return None
    return (
        f"{format_bytes(more_bytes)} more is needed if your loop keeps `outputs` until the next"
        " step: --keeps outputs plans for that"
    )


def _of_loading(rate: float | None) -> str | None:
    if rate is None:
        return None
    return (
        f"{OF_LOADING} about {format_rate(rate)} samples a second:"
        " DataLoader(num_workers=4, pin_memory=True, persistent_workers=True)"
    )


def _slower(ratio: float) -> str:
    more = format_ratio(max(ratio - 1, 0))
    return "hardly slower" if more == "0%" else f"about {more} slower"


# ---- what was not compared -----------------------------------------------------------------------


def _not_compared(estimates: Estimates, found: Found) -> list[Rejected]:
    points = estimates.lines.points
    if not points:
        return [
            *_skipped(found),
            *_without_host(estimates, found.compared),
            *_without_a_line(estimates, found.compared),
            *_failed(estimates, found.compared),
            *_not_put_together(estimates, found.compared),
        ]
    if "accumulation" in estimates.rehearsed.refused:  # a script whose batch size cannot change
        return []
    sizes = ", ".join(map(str, sorted(points, reverse=True)))
    why = f"the model's {_NOT_LINEAR}, so each compared size was rehearsed itself"
    return [Rejected(what=f"micro-batches other than {sizes}", why=why)]


def _skipped(found: Found) -> list[Rejected]:
    if not found.num_skipped:
        return []
    is_enough = (
        "they only save memory, and do not fit or are no faster than what fits: --prefer memory"
    )
    why = is_enough if found.is_certain else "they would still not fit"
    which = "with offload or the optimizer in backward"
    if len(found.choices.shardings) > 1:
        which += ", or on several GPUs with selective recomputation"
    return [Rejected(what=f"{found.num_skipped} variants {which}", why=why)]


def _without_host(estimates: Estimates, compared: Sequence[Variant]) -> list[Rejected]:
    """Count the variants that need more host memory than there is."""
    limit = estimates.limit_host_bytes
    if limit is None:
        return []
    needs = [
        estimates.host_bytes(variant) * variant.num_gpus
        for variant in compared
        if estimates.knows(variant) and not estimates.has_host_for(variant)
    ]
    if not needs:
        return []
    least, free = format_bytes(min(needs)), format_bytes(limit)
    why = f"they need {least} of host memory or more, and {free} is free"
    return [Rejected(what=f"{len(needs)} variants with offload", why=why)]


def _without_a_line(estimates: Estimates, compared: Sequence[Variant]) -> list[Rejected]:
    """Name the variants of this question that no rehearsal covers."""
    unknown = {*estimates.rehearsed.not_affine, *estimates.lines.broken}
    pass_footprints = (v for v in compared if v.micro_batch > 1 and pass_settings_of(v) in unknown)
    words = dict.fromkeys(in_words(variant_for_passes(v, v.micro_batch)) for v in pass_footprints)
    return [Rejected(what=each, why=f"its {_NOT_LINEAR}: ask oomph predict") for each in words]


def _failed(estimates: Estimates, compared: Sequence[Variant]) -> list[Rejected]:
    """Name the first variant of each error that a rehearsal raised."""
    failed = estimates.rehearsed.failed
    found: dict[str, str] = {}
    for variant in compared:
        why = failed.get(pass_settings_of(variant)) or failed.get(step_of(variant))
        if why is not None:
            found.setdefault(why, in_words(variant))
    return [Rejected(what=what, why=why) for why, what in found.items()]


def _not_put_together(estimates: Estimates, compared: Sequence[Variant]) -> list[Rejected]:
    """Name what failed during the comparison, and count the variants it affects."""
    failed: dict[str, list[str]] = {}
    for variant in compared:
        why = estimates.lines.why_failed(variant)
        if why is not None:
            failed.setdefault(in_short(why.error), []).append(in_words(variant))
    return [
        Rejected(
            what=words[0] if len(words) == 1 else f"{len(words)} variants ({words[0]}, ...)",
            why=why,
        )
        for why, words in failed.items()
    ]


# ---- the largest micro-batch, and what would fit -------------------------------------------------


def _largest_as_is(estimates: Estimates) -> int | None:
    """Return the largest micro-batch that fits the workload as given; None if unknown.

    Far beyond the rehearsed sizes, a tensor with an entry for each pair of examples dominates.
    """
    as_given, lines = estimates.as_is.variant, estimates.lines
    if estimates.as_is.fits != "yes" or lines.points or as_given.micro_batch == 1:
        return None
    if pairs_in(estimates.rehearsed) or not lines.knows(as_given) or not lines.holds(as_given):
        return None

    def fits(micro_batch: int) -> bool:
        return estimates.check(replace(as_given, micro_batch=micro_batch)).fits == "yes"

    return _largest(fits, as_given.micro_batch)


def _largest(fits: Callable[[int], bool], known: int) -> int:
    """Search upwards from a size that fits, to within about a sixteenth (judgement)."""
    beyond = 2 * known
    while fits(beyond):
        known, beyond = beyond, 2 * beyond
    while beyond - known > max(known // 16, 1):
        middle = (known + beyond) // 2
        known, beyond = (middle, beyond) if fits(middle) else (known, middle)
    return known


def _shortfall(estimates: Estimates, found: Found) -> Shortfall:
    smallest = estimates.predicted(found.smallest, is_exact=False)
    can_share = not any(rejected.what == "fsdp" for rejected in _beyond_gpus(found))
    per_node = found.choices.gpus_per_node
    why_not = estimates.sharing_limit(found.compared, found.choices.batch_size)
    num_gpus = None
    if can_share and why_not is None:
        num_gpus = num_gpus_needed(smallest, per_node, found.choices.batch_size)
    short = shortfall(smallest, smallest_gpu(smallest), num_gpus)
    return replace(short, beyond_sharding=why_not)


def _beyond_gpus(found: Found) -> list[Rejected]:
    """Return what was rejected for another reason than the number of GPUs."""
    return [one for one in found.choices.rejected if "--max-gpus" not in one.why]


def shortfall(smallest: Prediction, enough: str | None, num_gpus: int | None) -> Shortfall:
    """Return how much more memory the smallest variant needs, and what would be enough."""
    # Outside torch's allocator: the CUDA context with the loaded kernels.
    outside = {"the CUDA context": smallest.device_bytes - smallest.reserved_bytes}
    inside = {str(category): size for category, size in smallest.by_category.items()}
    category, largest = max({**inside, **outside}.items(), key=lambda item: item[1])
    return Shortfall(
        missing_bytes=missing_bytes(smallest),
        largest_part=f"{category} {format_bytes(largest)}",
        smallest_gpu=enough,
        num_gpus=num_gpus,
        variant=smallest.variant,
        device_bytes=smallest.device_bytes,
        high_bytes=smallest.high_bytes,
        step_s=smallest.step_s,
    )


def num_gpus_needed(
    smallest: Prediction,
    gpus_per_node: int = GPUS_PER_NODE,
    batch_size: int | None = None,
    most: int = 1024,
) -> int | None:
    """Count the GPUs needed if parameters, gradients and optimizer state were sharded.

    They share the batch equally and fill their machines.
    """
    _, shards = grid_of(smallest.variant)
    divided = sum(
        smallest.by_category.get(category, 0)
        for category in ("parameters", "gradients", "optimizer")
    )
    rest = smallest.high_bytes - divided
    powers = [2**power for power in range(most.bit_length())]
    numbers = sorted({*powers, *(gpus_per_node * power for power in powers)} - {1})
    return next(
        (
            number
            for number in numbers
            if shards < number <= most
            and (batch_size is None or batch_size % number == 0)
            and fills_nodes(number, gpus_per_node)
            and rest + divided * shards // number <= smallest.capacity_bytes
        ),
        None,
    )
