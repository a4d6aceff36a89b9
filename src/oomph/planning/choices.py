"""What a model allows, what the user allows -> every way to train that is worth a look.

A way keeps the batch: micro-batch x accumulation x GPUs is it, for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from oomph.errors import UsageError
from oomph.planning.sharing import numbers_of_gpus, shared_by, why_not_shared
from oomph.planning.tricks import BATCH_SIZE, NAMES, NEED_CONSENT, SPLITTING
from oomph.records.contradictions import contradiction_in
from oomph.records.plan import Rejected, Stability
from oomph.records.possible import Possible
from oomph.records.workload import Precision, Sharding, Variant

_BF16_SINCE = (8, 0)  # compute capability
_FRIENDLY = 8  # kernels are made for multiples of it
# The classes of which torch has the same in one kernel and parameter by parameter.
_OF_TORCH = "torch.optim."
_ADAMS = ("Adam", "AdamW")
_OF_FSDP = "FSDP's own CPUOffloadPolicy divides and offloads, and is not rehearsed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is to be planned."""

    batch_size: int
    capability: tuple[int, int]
    possible: Possible
    clips_gradients: bool
    max_gpus: int = 1
    allow: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)  # tricks that cannot be, and why
    precision: Precision = "fp32"  # as it was given
    checked: Mapping[str, Stability] = field(default_factory=dict)  # of tricks, by oomph check
    pairs_at: str | None = None  # where examples are compared with one another, as in InfoNCE
    own_micro_batch: int | None = None  # of a script that accumulates by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """The values that each setting may take. The first is the workload as it was given."""

    batch_size: int
    clips_gradients: bool
    precisions: tuple[Precision, ...]
    checkpointings: tuple[str, ...]
    optimizers: tuple[str, ...]
    attentions: tuple[Any, ...]
    losses: tuple[Any, ...]
    in_backward: tuple[bool, ...]
    offload_activations: tuple[bool, ...]
    offload_optimizer: tuple[bool, ...]
    adapters: tuple[Any, ...]
    shardings: tuple[tuple[Sharding, int], ...]  # and the number of GPUs
    expandable: tuple[bool, ...]
    may_accumulate: bool
    changing: frozenset[str]  # tricks that change this model's training, though not that of others
    rejected: tuple[Rejected, ...]
    own: frozenset[str] = frozenset()  # tricks that are on as it was given
    least_micro_batch: int = 1
    other_batch_sizes: tuple[int, ...] = ()  # that may be trained with instead
    # As given, where another one changes training: what BatchNorm or the loss sees at a time.
    coupled_micro_batch: int | None = None


def check_names(names: Sequence[str], flag: str) -> frozenset[str]:
    """The names of tricks, if they all are. Raises UsageError."""
    for name in names:
        if name not in NAMES:
            raise UsageError(
                f"{flag} {name!r:.40}: there is no such trick",
                because=f"the tricks are {', '.join(NAMES)}",
            )
    return frozenset(names)


def choices_for(question: Question, checkpointings: Sequence[str]) -> Choices:
    """Every value of every setting that the model and the user allow."""
    chooser = _Chooser(question)
    return Choices(
        batch_size=question.batch_size,
        clips_gradients=question.clips_gradients,
        precisions=chooser.precisions(),
        checkpointings=chooser.checkpointings(checkpointings),
        optimizers=chooser.optimizers(),
        attentions=chooser.attentions(),
        losses=chooser.losses(),
        in_backward=chooser.flag("optimizer-in-backward"),
        offload_activations=chooser.flag("offload-activations"),
        offload_optimizer=chooser.flag("offload-optimizer"),
        adapters=chooser.adapters(),
        shardings=chooser.shardings(),
        expandable=chooser.flag("expandable-segments"),
        may_accumulate=chooser.may_accumulate(),
        changing=frozenset(filter(chooser.changes, NAMES)),
        other_batch_sizes=chooser.other_batch_sizes(),
        own=frozenset({question.precision} - {"fp32"}),
        coupled_micro_batch=chooser.coupled_micro_batch(),
        rejected=tuple(chooser.rejected),
    )


def variants(choices: Choices) -> Iterator[Variant]:
    """Every combination that has no contradiction in it."""
    hows = list(_hows(choices))
    for sharding, num_gpus in choices.shardings:
        for micro_batch, accumulation in _splits(choices, num_gpus):
            for how in hows:
                variant = Variant(
                    micro_batch=micro_batch,
                    accumulation=accumulation,
                    sharding=sharding,
                    num_gpus=num_gpus,
                    **how,
                )
                if _is_worth_a_look(variant, clips_gradients=choices.clips_gradients):
                    yield variant


def _splits(choices: Choices, num_gpus: int) -> Iterator[tuple[int, int]]:
    """Every micro-batch with its accumulation; of another batch only the whole at once."""
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


def _is_worth_a_look(variant: Variant, *, clips_gradients: bool) -> bool:
    """No contradiction, and nothing that is pointless beside another trick of the same variant."""
    # A recomputed block keeps next to nothing that could be offloaded.
    is_kept = variant.checkpointing == "none" and not variant.optimizer_in_backward
    if variant.offload_activations and not is_kept:
        return False
    if variant.offload_optimizer and variant.optimizer != "as-is":
        return False  # how the host computes a step is not the GPU's implementation
    return contradiction_in(variant, clips_gradients=clips_gradients) is None


def _hows(choices: Choices) -> Iterator[dict[str, Any]]:
    names = (
        "precision",
        "checkpointing",
        "optimizer",
        "attention",
        "loss",
        "optimizer_in_backward",
        "offload_activations",
        "offload_optimizer",
        "adapters",
        "expandable_segments",
    )
    values = (
        choices.precisions,
        choices.checkpointings,
        choices.optimizers,
        choices.attentions,
        choices.losses,
        choices.in_backward,
        choices.offload_activations,
        choices.offload_optimizer,
        choices.adapters,
        choices.expandable,
    )
    for combination in product(*values):
        yield dict(zip(names, combination, strict=True))


def micro_batches(batch_size: int, num_gpus: int = 1) -> list[int]:
    """The sizes that divide what a GPU gets of the batch, and that kernels like; largest first."""
    if batch_size % num_gpus:
        return []
    share = batch_size // num_gpus
    divisors = {d for n in range(1, int(share**0.5) + 1) if share % n == 0 for d in (n, share // n)}
    friendly = {d for d in divisors if d % _FRIENDLY == 0 or d in (1, 2, 4, share)}
    is_odd = len(friendly) < min(len(divisors), 4)
    return sorted(divisors if is_odd else friendly, reverse=True)


class _Chooser:
    """Decides on each setting, and says why something is left out."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self.possible = question.possible
        self.rejected: list[Rejected] = []

    def may(self, name: str, *, unless: str | None = None) -> bool:
        """Whether a trick may be used; if not, why is noted."""
        if name in self.question.forbid:
            why: str | None = "forbidden"
        elif name in self.question.refused:
            why = self.question.refused[name]
        elif unless is not None:
            why = unless
        elif name in NEED_CONSENT and name not in self.question.allow:
            why = f"changes training: --allow {name}"
        elif self.question.checked.get(name) == "changes" and name not in self.question.allow:
            why = f"changes this training, as oomph check found: --allow {name}"
        else:
            why = None
        if why is not None:
            self.rejected.append(Rejected(what=name, why=why))
        return why is None

    def changes(self, name: str) -> bool:
        """Whether a trick changes this model's training, though not that of others."""
        checked = self.question.checked.get(name)
        if checked is not None:
            return checked == "changes"
        is_coupled = self.question.pairs_at is not None
        return name in SPLITTING and (bool(self.possible.batch_norm_names) or is_coupled)

    def coupled_micro_batch(self) -> int | None:
        own = self.question.own_micro_batch
        is_held = own is not None and "accumulation" not in self.question.forbid
        return own if is_held and self.changes("accumulation") else None

    def flag(self, name: str) -> tuple[bool, ...]:
        return (False, True) if self.may(name) else (False,)

    def precisions(self) -> tuple[Precision, ...]:
        own = self.question.precision
        if own != "fp32":
            return (own,)
        has_bf16 = self.question.capability >= _BF16_SINCE
        lacks = None if has_bf16 else "this GPU has no tensor cores for it"
        found: list[Precision] = ["fp32"]
        if self.may("tf32", unless=lacks):
            found.append("tf32")
        if self.may("bf16", unless=lacks):
            found.append("bf16")
        asked = "fp16" in self.question.allow
        better = "bf16 is as fast, and needs no loss scaler"
        if self.may("fp16", unless=better if "bf16" in found and not asked else None):
            found.append("fp16")
        if self.may("pure-bf16", unless=lacks):
            found.append("pure-bf16")
        return tuple(found)

    def checkpointings(self, ways: Sequence[str]) -> tuple[str, ...]:
        lacks = None if self.possible.num_blocks else "the model has no repeated blocks"
        return ("none", *ways) if self.may("checkpointing", unless=lacks) else ("none",)

    def optimizers(self) -> tuple[str, ...]:
        name = self.possible.optimizer_class
        kind = name.rpartition(".")[2]
        other = None if name.startswith(_OF_TORCH) else f"{kind} is not one of torch's"
        no_adam = None if kind in _ADAMS else f"made for Adam, and this is {kind}"
        already = {kind: "the optimizer is that already"} if other is None else {}
        found = ["as-is"]
        for lever, value, unless in (
            ("fused-optimizer", "fused", other),
            ("for-loop-optimizer", "for-loop", other),
            ("8-bit-optimizer", "8-bit", no_adam),
            ("adafactor", "adafactor", already.get("Adafactor")),
            ("sgd", "sgd", already.get("SGD")),
        ):
            if self.may(lever, unless=unless):
                found.append(value)
        return tuple(found)

    def attentions(self) -> tuple[str, ...]:
        already = {
            "eager": None,
            "sdpa": "the model has it already",
            "none": "no attention was seen in the model",
            "unknown": "the model's attention is its own: use"
            " torch.nn.functional.scaled_dot_product_attention in it",
        }[self.possible.attention_is]
        # As it was given, and exchanged: the exchange is exact, smaller and faster.
        return ("sdpa",) if self.may("sdpa", unless=already) else ("as-is",)

    def losses(self) -> tuple[str, ...]:
        lacks = None if self.possible.has_causal_head else self.possible.why_no_chunks
        return ("as-is", "chunked") if self.may("chunked-loss", unless=lacks) else ("as-is",)

    def adapters(self) -> tuple[str, ...]:
        lacks = None if self.possible.num_adaptable else "no linear layers in repeated blocks"
        found = [name for name in ("lora", "qlora") if self.may(name, unless=lacks)]
        return ("none", *found)

    def shardings(self) -> tuple[tuple[Sharding, int], ...]:
        most, batch_size = self.question.max_gpus, self.question.batch_size
        numbers = numbers_of_gpus(batch_size, most)
        if numbers and numbers[-1] < most:
            why = f"a batch of {batch_size} cannot be shared equally among up to {most}"
            self.rejected.append(Rejected(what=f"more than {numbers[-1]} GPUs", why=why))
        by_kind = shared_by(numbers)
        kinds = [
            kind
            for kind, own in by_kind.items()
            if self.may_split(kind, unless=None if own else why_not_shared(batch_size, most))
        ]
        if {"fsdp", "hybrid"} & {*kinds} and "offload-optimizer" not in self.question.forbid:
            what = "offload-optimizer with fsdp or hybrid"
            self.rejected.append(Rejected(what=what, why=_OF_FSDP))
        found = ((kind, number) for number in numbers for kind in kinds if number in by_kind[kind])
        return (("none", 1), *found)

    def may_accumulate(self) -> bool:
        """Whether the batch may be divided; what hinders it is noted."""
        batch_size = self.question.batch_size
        may = self.may_split("accumulation")
        if may and batch_size > _FRIENDLY and len(micro_batches(batch_size)) <= 2:
            larger = -(-batch_size // _FRIENDLY) * _FRIENDLY
            why = f"{batch_size} is a prime number: a batch of {larger} can be divided"
            what = f"micro-batches between 1 and {batch_size}"
            self.rejected.append(Rejected(what=what, why=why))
        return may

    def other_batch_sizes(self) -> tuple[int, ...]:
        """Smaller ones that divide it: what would do without accumulation."""
        if not self.may(BATCH_SIZE):
            return ()
        return tuple(micro_batches(self.question.batch_size)[1:])

    def may_split(self, name: str, *, unless: str | None = None) -> bool:
        """Whether a trick may be used that shows a model only a part of the batch at a time."""
        layers, pairs_at = self.possible.batch_norm_names, self.question.pairs_at
        is_free = name not in self.question.checked and name not in self.question.allow
        if unless is None and is_free and (layers or pairs_at):
            who = (
                f"{len(layers)} BatchNorm layers ({layers[0]}, ...)"
                if layers
                else f"examples are compared with one another ({pairs_at}), and each"
            )
            own = self.question.own_micro_batch
            part = "a part of the batch" if own is None else f"other than {own} examples at a time"
            unless = f"{who} would see {part}, which changes training: --allow {name}"
        return self.may(name, unless=unless)
