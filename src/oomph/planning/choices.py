"""Request -> Choices, the allowed values of every setting; Choices -> every Variant.

Every variant keeps the batch size: micro-batch x accumulation x GPUs stays the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import TYPE_CHECKING, Any, get_args

from oomph.errors import UsageError
from oomph.records.plan import Rejected
from oomph.records.workload import GPUS_PER_NODE, Sharding, Variant
from oomph.tricks.trick import BATCH_SIZE, BY_NAME, NAMES, TRICKS, contradiction_in, tricks_on

if TYPE_CHECKING:
    from oomph.tricks.definition import Definition, Request

_FRIENDLY = 8  # judgement: tensor cores and warps prefer multiples of 8 (NVIDIA's GEMM guide)
# These depend on the number of GPUs, so they are chosen together and not setting by setting.
_OF_SPLIT = (
    *("sharding", "num_gpus", "gpus_per_node", "tensor_parallel"),
    *("micro_batch", "accumulation"),
)
_OF_ADAPTERS = ("lora_rank", "lora_targets")  # as asked for: not compared with others
_PLAIN = {one.name: one.default for one in fields(Variant)}
_SETTINGS = tuple(one for one in fields(Variant) if one.name not in _OF_SPLIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values that each setting may take. The first one is the workload's own."""

    batch_size: int
    clips_gradients: bool
    settings: Mapping[str, tuple[Any, ...]]  # keyed by field of Variant
    shardings: tuple[tuple[Sharding, int], ...]  # each with its number of GPUs
    may_accumulate: bool
    gpus_per_node: int = GPUS_PER_NODE
    changing: frozenset[str]  # tricks that change this model's training but not that of others
    rejected: tuple[Rejected, ...]
    own: frozenset[str] = frozenset()  # tricks that the workload already uses
    least_micro_batch: int = 1
    other_batch_sizes: tuple[int, ...] = ()  # alternatives to batch_size
    # The workload's own micro-batch, if changing it changes training: BatchNorm and some losses
    # depend on which examples they see together.
    coupled_micro_batch: int | None = None


def check_names(names: Sequence[str], flag: str) -> frozenset[str]:
    """Return the names as a set. Raise UsageError for one that is not a trick."""
    for name in names:
        if name not in NAMES:
            import difflib

            near = difflib.get_close_matches(name, NAMES, n=1) or ["bf16"]
            raise UsageError(
                f"{flag} {name!r:.40}: there is no such trick",
                because=f"the tricks are {', '.join(NAMES)}",
                attempt=near[0],
            )
    return frozenset(names)


def choices_for(request: Request, checkpointings: Sequence[str]) -> Choices:
    """Return every value of every setting that the model and the user allow."""
    chooser = _Chooser(request)
    accumulation = BY_NAME["accumulation"]
    is_coupled = request.changes(accumulation) and "accumulation" not in request.forbid
    return Choices(
        batch_size=request.batch_size,
        clips_gradients=request.clips_gradients,
        settings=chooser.settings(checkpointings),
        shardings=chooser.shardings(),
        may_accumulate=chooser.may_accumulate(accumulation),
        gpus_per_node=request.gpus_per_node,
        changing=frozenset(trick.name for trick in TRICKS if request.changes(trick)),
        other_batch_sizes=chooser.other_batch_sizes(),
        own=frozenset({request.precision} - {"fp32"}),
        coupled_micro_batch=request.own_micro_batch if is_coupled else None,
        rejected=tuple(chooser.rejected),
    )


class _Chooser:
    """Decides which values each setting may take, and notes why others are rejected."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.rejected: list[Rejected] = []

    def may(self, trick: Definition) -> bool:
        why = self.request.why_not(trick)
        if why is not None:
            self.note(trick.name, why)
        return why is None

    def note(self, what: str, why: str) -> None:
        self.rejected.append(Rejected(what=what, why=why))

    def settings(self, checkpointings: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        """Return the default of each setting and the values that the allowed tricks give it."""
        given = self.request.precision
        found: dict[str, tuple[Any, ...]] = {}
        for setting in _SETTINGS:
            if setting.name == "precision" and given != "fp32":
                found["precision"] = (given,)
                continue
            if setting.name in _OF_ADAPTERS:
                found[setting.name] = (getattr(self.request, setting.name),)
                continue
            tricks = [t for t in TRICKS if t.setting == setting.name and self.may(t)]
            values: list[Any] = [trick.value or True for trick in tricks]
            if setting.name == "checkpointing" and tricks:
                values = [*checkpointings]
            is_fixed = any(trick.is_in_every_plan for trick in tricks)
            found[setting.name] = tuple(values) if is_fixed else (setting.default, *values)
        return found

    def shardings(self) -> tuple[tuple[Sharding, int], ...]:
        from oomph.tricks.sharding import can_share, numbers_of_gpus

        most, batch_size = self.request.max_gpus, self.request.batch_size
        per_node = self.request.gpus_per_node
        numbers = numbers_of_gpus(batch_size, most, per_node)
        if numbers and numbers[-1] < most:
            why = f"a batch of {batch_size} cannot be divided equally among up to {most}"
            if most > per_node:
                why += f" that fill machines of {per_node} (--gpus-per-node)"
            self.note(f"more than {numbers[-1]} GPUs", why)
        every: tuple[Sharding, ...] = get_args(Sharding)
        kinds = [kind for kind in every if kind in BY_NAME and self.may(BY_NAME[kind])]
        found = ((k, number) for number in numbers for k in kinds if can_share(k, number, per_node))
        return (("none", 1), *found)

    def may_accumulate(self, accumulation: Definition) -> bool:
        """Return whether the batch may be split, and note why it cannot be."""
        batch_size = self.request.batch_size
        may = self.may(accumulation)
        if may and batch_size > _FRIENDLY and len(micro_batches(batch_size)) <= 2:
            larger = -(-batch_size // _FRIENDLY) * _FRIENDLY
            why = f"{batch_size} is a prime number: a batch of {larger} can be divided"
            self.note(f"micro-batches between 1 and {batch_size}", why)
        return may

    def other_batch_sizes(self) -> tuple[int, ...]:
        """Return the smaller batch sizes that divide the given one and need no accumulation."""
        request = self.request
        if BATCH_SIZE in request.allow and BATCH_SIZE not in (*request.forbid, *request.refused):
            return tuple(micro_batches(request.batch_size)[1:])
        forbidden = "forbidden" if BATCH_SIZE in request.forbid else None
        consent = f"changes training: --allow {BATCH_SIZE}"
        self.note(BATCH_SIZE, forbidden or request.refused.get(BATCH_SIZE, consent))
        return ()


# ---- variants ------------------------------------------------------------------------------------


def variants(choices: Choices) -> Iterator[Variant]:
    """Yield every combination that is neither contradictory nor pointless."""
    combinations = [
        dict(zip(choices.settings, values, strict=True))
        for values in product(*choices.settings.values())
    ]
    for sharding, num_gpus in choices.shardings:
        for micro_batch, accumulation in _splits(choices, num_gpus):
            for settings in combinations:
                variant = Variant(
                    micro_batch=micro_batch,
                    accumulation=accumulation,
                    sharding=sharding,
                    num_gpus=num_gpus,
                    gpus_per_node=choices.gpus_per_node if num_gpus > 1 else GPUS_PER_NODE,
                    **settings,
                )
                clips = choices.clips_gradients
                variant = _without_conflicting_extras(variant, clips)
                is_pointless = any(trick.is_pointless(variant) for trick in tricks_on(variant))
                if not is_pointless and contradiction_in(variant, clips_gradients=clips) is None:
                    yield variant


def _without_conflicting_extras(variant: Variant, clips_gradients: bool) -> Variant:
    """Leave out tricks that are in every plan where they conflict with one that is chosen."""
    extras = [trick for trick in tricks_on(variant) if trick.is_in_every_plan]
    off = {e.setting: e.setting_when_off for e in extras if e.conflict(variant, clips_gradients)}
    if variant.adapters == "none":  # one name for what is the same
        off |= {name: _PLAIN[name] for name in _OF_ADAPTERS}
    return replace(variant, **off) if off else variant


def _splits(choices: Choices, num_gpus: int) -> Iterator[tuple[int, int]]:
    """Yield each micro-batch with its accumulation steps. Other batch sizes are never split."""
    least = min(choices.least_micro_batch, choices.batch_size // num_gpus)
    own = choices.coupled_micro_batch
    if own is not None and num_gpus == 1:
        yield own, choices.batch_size // own
        if not choices.may_accumulate:
            return
    for micro_batch in micro_batches(choices.batch_size, num_gpus):
        if micro_batch == own and num_gpus == 1:
            continue
        accumulation = choices.batch_size // (micro_batch * num_gpus)
        if micro_batch >= least and (accumulation == 1 or choices.may_accumulate):
            yield micro_batch, accumulation
    for batch_size in choices.other_batch_sizes:
        if batch_size % num_gpus == 0 and batch_size // num_gpus >= choices.least_micro_batch:
            yield batch_size // num_gpus, 1


def micro_batches(batch_size: int, num_gpus: int = 1) -> list[int]:
    """Return the divisors of a GPU's share of the batch that suit its kernels, largest first."""
    if batch_size % num_gpus:
        return []
    share = batch_size // num_gpus
    divisors = {d for n in range(1, int(share**0.5) + 1) if share % n == 0 for d in (n, share // n)}
    friendly = {d for d in divisors if d % _FRIENDLY == 0 or d in (1, 2, 4, share)}
    is_odd = len(friendly) < min(len(divisors), 4)
    return sorted(divisors if is_odd else friendly, reverse=True)
