"""What bounds a variant's memory: which sharded ones cannot fit, and what could be spared.

A model of 100 GB on GPUs of 80 GB needs more than two shards. To rehearse it in each way on 2 GPUs
takes as long as on 1024, and shows only what its parameters and gradients alone say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from oomph.predicting.combinations import parts_of
from oomph.predicting.footprint import CATEGORIES, PHASES, Footprint
from oomph.records.plan import Rejected
from oomph.records.trace import Category
from oomph.records.workload import (
    GPUS_PER_NODE,
    Variant,
    divides_model,
    grid_of,
    holds_parameters_on_host,
)
from oomph.tricks.definition import Severity
from oomph.units import format_bytes

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Numbers = NDArray[np.int64]


class Held(NamedTuple):
    """What the model holds as it is given, on one GPU."""

    parameter_bytes: int
    gradient_bytes: int


def held_by(footprint: Footprint, micro_batch: int) -> Held:
    """Return the most live bytes of parameters and of their gradients."""
    return Held(
        _most_bytes(footprint, "parameters", micro_batch),
        _most_bytes(footprint, "gradients", micro_batch),
    )


def least_bytes(variant: Variant, as_given: Held) -> int:
    """Return what each GPU holds at least before the optimizer's step; 0 if unknown.

    Rank 0 has the largest shard of each parameter. Autocast keeps parameters and gradients as they
    are; ZeRO-Offload has the parameters in 16 bits.
    """
    if _has_other_parameters(variant):
        return 0
    held = as_given.parameter_bytes
    if not (variant.optimizer_in_backward or variant.offload_optimizer or variant.zero_offload):
        held += as_given.gradient_bytes
    _, shards = grid_of(variant)
    shards *= variant.tensor_parallel  # norms are whole on each, so this is less than it holds
    is_low = variant.precision == "pure-bf16" or variant.zero_offload
    return held // (2 * shards if is_low else shards)


def _has_other_parameters(variant: Variant) -> bool:
    """Return whether a trick may change what is held, also one that is not known here."""
    known = replace(
        variant,
        precision="fp32",
        checkpointing="none",
        optimizer="as-is",
        optimizer_in_backward=False,
        attention="as-is",
        loss="as-is",
        channels_last=False,
        offload_activations=False,
        offload_optimizer=False,
        zero_offload=False,
        sharding="none",
        num_gpus=1,
        gpus_per_node=GPUS_PER_NODE,
        tensor_parallel=1,
        accumulation=1,
        expandable_segments=False,
    )
    return known != Variant(micro_batch=variant.micro_batch)


def _most_bytes(footprint: Footprint, category: Category, micro_batch: int) -> int:
    """Return the most live bytes of a category."""
    return int(_live_bytes(footprint, category, micro_batch).max(initial=0))


def _live_bytes(footprint: Footprint, category: Category, micro_batch: int) -> Numbers:
    """Return the live bytes of a category after each event."""
    import numpy as np

    places = np.abs(footprint.event) - 1
    sizes = footprint.fixed_bytes + footprint.grown_bytes * micro_batch
    is_counted = footprint.category[places] == CATEGORIES.index(category)
    live: Numbers = np.cumsum(np.where(is_counted, sizes[places] * np.sign(footprint.event), 0))
    return live


def without_hopeless(
    pairs: Sequence[tuple[Variant, Variant]],
    as_given: Held,
    limit_bytes: int,
    changes_in: Callable[[Variant], tuple[Severity, ...]] = lambda _: (),
) -> tuple[list[Variant], tuple[Rejected, ...]]:
    """Return the variants to compare, and why others on several GPUs are not.

    `pairs` are each variant and the one without its tricks that only save memory: both are
    compared or none. If every sharded variant is hopeless, all are compared, to show how much is
    missing. FSDP's offload of the shards to the host always has hope, but takes several times as
    long, and terabytes of memory for the models that are too large here: more GPUs come before it,
    changes to training do not.
    """
    small = {pair for pair in pairs if least_bytes(pair[0], as_given) <= limit_bytes}
    mildest = min((changes_in(one) for one, _ in small), default=())
    hopeful = {usual for _, usual in small}
    hopeful |= {
        usual for one, usual in pairs if holds_parameters_on_host(one) and changes_in(one) < mildest
    }
    if not any(divides_model(usual) for usual in hopeful):
        return [one for one, _ in pairs], ()
    kept: list[Variant] = []
    least: dict[str, int] = {}
    for one, usual in pairs:
        if usual in hopeful or not divides_model(one):
            kept.append(one)
            continue
        how = one.sharding if one.tensor_parallel == 1 else "tensor-parallel"
        name = f"{how} on {one.num_gpus} GPUs in {one.precision}"
        found = least_bytes(one, as_given)
        least[name] = min(found, least.get(name, found))
    return kept, tuple(_rejected(name, found) for name, found in least.items())


def _rejected(name: str, least: int) -> Rejected:
    why = f"what is sharded needs at least {format_bytes(least)} on each GPU, or the host's memory"
    return Rejected(what=name, why=why)


# ---- what no number of GPUs is enough for --------------------------------------------------------
# With one example at a time, what a GPU holds is a part that stays (gathered parameters, the
# example's activations) and a part that is divided among the GPUs, at every moment. The peak is the
# highest of these lines over 1 / GPUs, so it is convex: the line through two numbers of GPUs,
# continued to more of them, never lies above it.


def least_bytes_sharded(
    known: Iterable[Variant], least_bytes: Callable[[Variant], int]
) -> int | None:
    """Return what each GPU holds at least with FSDP on any number of GPUs; None if unknown.

    `least_bytes` are the live bytes of a variant at its peak.
    """
    families: dict[Variant, dict[bool, dict[int, int]]] = {}
    for one in known:
        if one.sharding == "fsdp" and one.micro_batch == 1 and one.tensor_parallel == 1:
            family = replace(one.tricks_alone(), sharding="none", num_gpus=1)
            # A second micro-batch finds the gradients of the first in memory: another structure.
            alike = families.setdefault(family, {}).setdefault(one.accumulation > 1, {})
            alike[one.num_gpus] = least_bytes(one)
    bounds = [_beyond(alike) for alike in families.values()]
    found = [bound for bound in bounds if bound is not None]
    return min(found) if found and len(found) == len(bounds) else None


def _beyond(structures: dict[bool, dict[int, int]]) -> int | None:
    """Return the highest bound on one example with these tricks, on any number of GPUs."""
    bounds = [
        on_more - (on_fewer - on_more) * fewer // (more - fewer)
        for by_number in structures.values()
        for (fewer, on_fewer), (more, on_more) in pairwise(sorted(by_number.items()))
        if on_more <= on_fewer
    ]
    return max(bounds, default=None)


def sharing_limit(
    known: Sequence[Variant],
    batch_size: int,
    least_bytes: Callable[[Variant], int],
    limit_bytes: int,
) -> str | None:
    """Return why FSDP on more GPUs is no help where nothing fits; None if it may be."""
    least = least_bytes_sharded(known, least_bytes)
    if least is not None and least > limit_bytes:
        return (
            f"With FSDP on any number of GPUs, one example and the layers that are gathered for it"
            f" take at least {format_bytes(least)} on each. Less needs smaller examples or layers,"
            " or tensor parallelism."
        )
    most = max((one.num_data_gpus for one in known if one.sharding == "fsdp"), default=0)
    if most == batch_size > 1:
        return (
            f"No more than {batch_size} GPUs can share a batch of {batch_size} examples, and with"
            " FSDP that is not enough. That needs a larger batch on more GPUs, or tensor"
            " parallelism."
        )
    return None


# ---- gradients that stay in memory during forward ------------------------------------------------

_SECOND = 2


def spared_by_freeing_gradients(footprint: Footprint, micro_batch: int) -> int:
    """Return what the peak would shrink by if forward began without gradients.

    The first step of a training shows it: there are no gradients before its backward.
    """
    import numpy as np

    in_forward = (footprint.step == _SECOND) & (footprint.phase == PHASES.index("forward"))
    live = _live_bytes(footprint, "gradients", micro_batch)[np.flatnonzero(in_forward)[:1]]
    kept = int(live.max(initial=0))
    first, second = parts_of(footprint)
    of_step = second.before.most(micro_batch) + second.step_bytes
    now, then = (
        max(part.rest.most(micro_batch) + second.state_bytes, of_step) for part in (second, first)
    )
    return max(min(now - then, kept), 0)
