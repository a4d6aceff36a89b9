"""What a search found -> plans in words: why this one, what each trick costs here, what would do.

The mission's caveats are answered with this model's numbers, not with rules of thumb.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from oomph.planning.planned import Planned
from oomph.planning.planner import is_coupled_otherwise, own_of, stability_of, tricks_of
from oomph.planning.tricks import levers_beyond
from oomph.records.plan import Plan, Preference, Shortfall, Trick
from oomph.records.prediction import Prediction
from oomph.records.workload import Variant
from oomph.units import format_bytes, format_rate, format_ratio

Seconds = Callable[[Variant], float | None]
OF_LOADING = "the loader must keep up with"  # how a caveat begins that counts samples


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What plans are told against."""

    workload: str
    as_is: Prediction
    fastest_s: float  # of all ways, on a GPU of infinite memory
    changing: frozenset[str]  # tricks that change this model's training, though not that of others
    prefer: Preference
    batch_norm_names: tuple[str, ...]
    has_dropout: bool
    block_names: tuple[str, ...]
    batch_size: int
    rate_advice: Callable[[float], str]  # for a batch that is so many times the given one
    own: frozenset[str] = frozenset()  # tricks that are on as it was given
    coupled_micro_batch: int | None = None  # as given, where another one changes training


def plan_of(
    variant: Variant, prediction: Prediction, seconds: float | None, facts: Facts
) -> Planned:
    """A variant as a plan, before it is told apart from the others."""
    ratio = variant.batch_size / facts.batch_size
    is_other_batch = variant.batch_size != facts.batch_size
    own = own_of(variant, facts)
    other_batch = [_other_batch(variant.batch_size, facts)] if is_other_batch else []
    return Planned(
        gpu=prediction.gpu,
        workload=facts.workload,
        variant=variant,
        prediction=prediction,
        tricks=(*tricks_of(variant, facts.changing, own), *other_batch),
        stability="changes"
        if is_other_batch or is_coupled_otherwise(variant, facts)
        else stability_of(levers_beyond(own, variant), facts.changing),
        relative_time=None if seconds is None else seconds / ratio / facts.fastest_s,
        recommended=False,
        why="",
        block_names=facts.block_names,
    )


def _other_batch(batch_size: int, facts: Facts) -> Trick:
    return Trick(
        name="batch-size",
        what=f"a batch of {batch_size} instead of {facts.batch_size}",
        stability="changes",
        caveat=facts.rate_advice(batch_size / facts.batch_size),
        code=f"batch_size={batch_size} in the loader, and the optimizer's rate",
    )


# ---- why -----------------------------------------------------------------------------------------


def told_apart(plans: Sequence[Planned], facts: Facts) -> tuple[Planned, ...]:
    """The plans, the first recommended, each with the sentence that says what it is good for."""
    if not plans:
        return ()
    best, others = plans[0], plans[1:]
    return (
        replace(best, recommended=True, why=_why_best(best, others, facts)),
        *(replace(plan, why=_against(plan, best)) for plan in others),
    )


def _why_best(best: Plan, others: Sequence[Plan], facts: Facts) -> str:
    headroom = best.prediction.capacity_bytes - best.prediction.high_bytes
    if headroom >= 0:
        room = f"leaves {format_bytes(headroom)} free at the worst"
    elif best.fits == "yes":  # what is cached is no need
        room = "fits at the worst, too, where torch gives back what it has cached"
    else:
        room = "is tight: its error bar reaches beyond the GPU"
    return f"{_praise(best, others, facts)}; {room}"


def _praise(best: Plan, others: Sequence[Plan], facts: Facts) -> str:
    if not best.tricks:
        return "it fits as it is"
    if facts.prefer == "memory":
        return "takes the least memory of all that fit"
    if facts.prefer == "resources":
        return "takes the fewest GPUs and the least of the host"
    if best.relative_time is None:
        return f"changes least of what fits on {_gpus(best.gpus)}, whose time nobody knows"
    faster = [plan for plan in others if 0 < _time(plan) < best.relative_time]
    kept = {
        "same": "the update stays exactly the same",
        "rounding": "the update is the same within rounding",
        "changes": "training changes, as you allowed",
    }[best.stability]
    if not faster:
        return f"the fastest that fits, and {kept}"
    if best.stability != "changes" and faster[0].stability == "changes":
        return f"{kept}; what you allowed would be faster but is not needed"
    if faster[0].gpus > best.gpus:
        return f"the fastest on {_gpus(best.gpus)}, and {kept}"
    return f"hardly slower than the fastest that fits, with less changed: {kept}"


def _against(plan: Plan, best: Plan) -> str:
    """What another plan gives and takes, beside the recommended one."""
    said = []
    if _time(plan) and _time(best):
        said.append(_compared(_time(plan) / _time(best), "the time"))
    ratio = plan.prediction.device_bytes / best.prediction.device_bytes
    said.append(_compared(ratio, "the memory"))
    if plan.gpus != best.gpus:
        said.append(_gpus(plan.gpus))
    return f"{', '.join(said)} of the recommended one"


def _compared(ratio: float, what: str) -> str:
    return f"{ratio:.2f} x {what}"


def _gpus(number: int) -> str:
    return "one GPU" if number == 1 else f"{number} GPUs"


def _time(plan: Plan) -> float:
    return plan.relative_time or 0.0


# ---- the mission's caveats -----------------------------------------------------------------------


def caveats(best: Plan | None, facts: Facts, seconds: Seconds) -> tuple[str, ...]:
    """What accumulation, recomputation and mixed precision really cost here."""
    if best is None:
        return ()
    variant = best.variant
    found = [
        _of_accumulation(variant, seconds, facts),
        _of_recomputation(variant, seconds),
        _of_precision(variant),
        _of_dropout(variant, facts),
        _of_loading(best),
        _of_outputs(best),
    ]
    return tuple(said for said in found if said)


def _of_accumulation(variant: Variant, seconds: Seconds, facts: Facts) -> str | None:
    if variant.accumulation == 1 or variant.micro_batch == facts.coupled_micro_batch:
        return None
    whole = replace(variant, micro_batch=variant.micro_batch * variant.accumulation, accumulation=1)
    here, at_once = seconds(variant), seconds(whole)
    if here is None or at_once is None:
        return None
    cost = f"accumulation costs {_more(here / at_once)} of time here, not {variant.accumulation} x"
    if facts.batch_norm_names:
        layers = len(facts.batch_norm_names)
        return f"{cost}; {layers} BatchNorm layers see {variant.micro_batch} examples at a time"
    if "accumulation" in facts.changing:
        return f"{cost}; the loss compares {variant.micro_batch} examples with one another"
    return f"{cost}; no BatchNorm: the update is the same"


def _of_recomputation(variant: Variant, seconds: Seconds) -> str | None:
    if variant.checkpointing == "none":
        return None
    here, kept = seconds(variant), seconds(replace(variant, checkpointing="none"))
    if here is None or kept is None:
        return None
    return f"recomputation costs {_more(here / kept)} of time at this micro-batch"


def _of_precision(variant: Variant) -> str | None:
    if variant.precision == "fp16":
        return (
            "fp16: whether every value of this model fits into it is not checked;"
            " watch the loss scaler for skipped steps"
        )
    if variant.precision == "bf16":
        return "bf16 has the range of fp32 and 8 bits of mantissa: compare the first losses"
    return None


def _of_dropout(variant: Variant, facts: Facts) -> str | None:
    if variant.accumulation == 1 or not facts.has_dropout:
        return None
    return "dropout draws other masks for micro-batches: the same in the mean, not bit by bit"


def _of_outputs(best: Plan) -> str | None:
    """What the figure does not have, and the verdict does."""
    more_bytes = best.prediction.outputs_bytes
    if not more_bytes:
        return None
    return (
        f"{format_bytes(more_bytes)} more is needed if your loop keeps `outputs` until the next"
        " step: --keeps outputs plans with it"
    )


def _of_loading(best: Plan) -> str | None:
    rate = best.prediction.samples_per_s
    if rate is None:
        return None
    return (
        f"{OF_LOADING} about {format_rate(rate)} samples a second:"
        " DataLoader(num_workers=4, pin_memory=True, persistent_workers=True)"
    )


def _more(ratio: float) -> str:
    return f"{format_ratio(max(ratio - 1, 0))} more"


# ---- nothing fits --------------------------------------------------------------------------------


def shortfall(
    smallest: Prediction, gpus: Sequence[tuple[str, int]], num_gpus: int | None
) -> Shortfall:
    """By how much the smallest way does not fit, and what would do. `gpus`: names and bytes."""
    # Beside torch's allocator: the CUDA context, with the kernels that are loaded.
    outside = {"the CUDA context": smallest.device_bytes - smallest.reserved_bytes}
    held = {str(category): size for category, size in smallest.by_category.items()}
    parts = {**held, **outside}
    category, largest = max(parts.items(), key=lambda item: item[1])
    enough = sorted(
        (size_bytes, name) for name, size_bytes in gpus if size_bytes >= smallest.high_bytes
    )
    return Shortfall(
        missing_bytes=max(smallest.device_bytes - smallest.capacity_bytes, 0),
        largest_part=f"{category} {format_bytes(largest)}",
        smallest_gpu=enough[0][1] if enough else None,
        num_gpus=num_gpus,
    )


def gpus_that_would_do(smallest: Prediction, most: int = 1024) -> int | None:
    """So many of the same GPU, with parameters, gradients and optimizer divided among them."""
    divided = sum(
        smallest.by_category.get(category, 0)
        for category in ("parameters", "gradients", "optimizer")
    )
    rest = smallest.high_bytes - divided
    return next(
        (
            number
            for number in (2**power for power in range(1, most.bit_length()))
            if rest + divided // number <= smallest.capacity_bytes
        ),
        None,
    )
