"""Define what oomph knows about one trick (Definition) and what its choice depends on (Request).

Each trick has a file in this package with its Definition; trick.py lists them. Such a file must not
import torch at import time: `oomph plan` needs only the definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import MISSING, dataclass, field, fields
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from oomph.errors import UsageError
from oomph.records.plan import Stability, Trick
from oomph.records.workload import (
    GPUS_PER_NODE,
    LORA_RANK,
    LoraTargets,
    Possible,
    Precision,
    Variant,
)

if TYPE_CHECKING:
    import torch

Target = Literal["hf", "lightning", "accelerate", "deepspeed", "code"]  # of an export
MakeOptimizer: TypeAlias = "Callable[[Any], torch.optim.Optimizer]"  # parameters or groups ->


class Severity(IntEnum):
    """How far a trick takes training from what you wrote, the mildest first. Judgement.

    A plan is ranked by its most severe change, so where two fit the milder one is recommended.
    """

    NUMBERS = 1  # the same model, optimizer and data in coarser numbers
    BATCH = 2  # the same model and optimizer, which see fewer examples together
    SIMILAR_OPTIMIZER = 3  # an approximation of the same optimizer; the rate is tuned anew
    FEWER_WEIGHTS = 4  # most weights stay as they are, which suits fine-tuning only
    FEWER_COARSE_WEIGHTS = 5  # and those that stay are rounded as well
    OTHER_OPTIMIZER = 6  # another algorithm: all of its settings are found anew
    UNGRADED = 7  # nothing is known but that it changes this training


_DEFAULTS = {one.name: one.default for one in fields(Variant) if one.default is not MISSING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The inputs of a plan: the model, the GPUs, and what the user allows."""

    batch_size: int
    capability: tuple[int, int]
    possible: Possible
    clips_gradients: bool
    max_gpus: int = 1
    allow: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)  # tricks that fail here, and why
    precision: Precision = "fp32"  # of the workload as given
    checked: Mapping[str, Stability] = field(default_factory=dict)  # by oomph check, per trick
    pairs_at: str | None = None  # where the loss compares examples with each other, as in InfoNCE
    own_micro_batch: int | None = None  # of a script that accumulates itself
    lora_rank: int = LORA_RANK
    lora_targets: LoraTargets = "all-linear"
    gpus_per_node: int = GPUS_PER_NODE

    def why_not(self, trick: Definition) -> str | None:
        """Return why a trick may not be used, or None if it may."""
        name = trick.name
        if name in self.forbid:
            return "forbidden"
        if name in self.refused:
            return self.refused[name]
        impossible = self.possible.impossible.get(name) or trick.why_not(self)
        if impossible or (impossible := self._why_not_split(trick)):
            return impossible
        if name in self.allow:
            return None
        if trick.consent is not None:
            return f"{trick.consent}: --allow {name}"
        if self.checked.get(name) == "changes":
            return f"changes this training, as oomph check found: --allow {name}"
        return None

    def changes(self, trick: Definition) -> bool:
        """Return whether a trick changes this model's training, although it is exact for others."""
        if trick.name in self.checked:
            return self.checked[trick.name] == "changes"
        is_coupled = bool(self.possible.batch_norm_names) or self.pairs_at is not None
        return trick.splits_batch and is_coupled

    def _why_not_split(self, trick: Definition) -> str | None:
        """Refuse to split a batch for BatchNorm and contrastive losses, which need it whole."""
        layers, name = self.possible.batch_norm_names, trick.name
        is_agreed = name in self.checked or name in self.allow
        if not trick.splits_batch or is_agreed or not (layers or self.pairs_at):
            return None
        who = (
            f"{len(layers)} BatchNorm layers ({layers[0]}, ...)"
            if layers
            else f"examples are compared with one another ({self.pairs_at}), and each"
        )
        own = self.own_micro_batch
        part = "a part of the batch" if own is None else f"other than {own} examples at a time"
        return f"{who} would see {part}, which changes training: --allow {name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragment:
    """The lines of Python that a trick adds to the exported training loop."""

    environment: Sequence[str] = ()  # set before torch is imported
    imports: Sequence[str] = ()
    constants: Sequence[str] = ()
    functions: Sequence[str] = ()
    needs_blocks: bool = False  # calls blocks_of(model)
    on_model: Sequence[str] = ()  # before the model goes to its GPU
    to_gpu: Sequence[str] = ()  # in place of model.to(DEVICE)
    on_gpu: Sequence[str] = ()
    around_forward: Sequence[str] = ()  # context managers
    makes_optimizer: bool = False  # defines planned_optimizer(parameters, make_optimizer)
    optimizer_class: str = ""  # made from (parameters, make_optimizer)
    notes: Sequence[str] = ()  # sentences for the file's docstring
    binds_model: bool = False  # a deep copy of the model would go on computing with its weights


# Why a trick cannot be put around a script, which makes its model and its optimizer itself.
TOO_LATE_IN_SCRIPT = (
    "it must be there before the script makes its optimizer: make the change in the script"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """One trick, for any model. Every hook is optional."""

    name: str  # as --allow and --forbid take it
    stability: Stability
    setting: str  # the field of Variant that switches it on
    value: object = None  # the setting's value when on; None: any but the default
    what: str | Callable[[Variant], str]
    code: str | Callable[[Variant], str]
    caveat: str | None = None

    # ---- if it changes training ----
    severity: Severity = Severity.UNGRADED
    price: str | None = None  # what of training changes, as a clause: "only adapters are trained"

    # ---- when it is chosen ----
    needs_consent: str | None = None  # why it is off unless --allow names it
    splits_batch: bool = False  # the model sees only a part of the batch at a time
    is_in_every_plan: bool = False  # wherever allowed: it costs nothing
    why_not: Callable[[Request], str | None] = lambda _: None
    why_not_on: Callable[[torch.nn.Module], str | None] = lambda _: None
    conflict: Callable[[Variant, bool], UsageError | None] = lambda _, __: None
    is_pointless: Callable[[Variant], bool] = lambda _: False  # given the variant's other tricks
    why_not_in_script: str | None = None  # why it cannot be put around a script as it is

    # ---- how it is applied, in this order ----
    before_cuda: Callable[[], None] = lambda: None
    switch_on: Callable[[], None] = lambda: None  # globally in torch
    put_on_built: Callable[[torch.nn.Module, Variant], None] | None = None  # before it is moved
    cast: Callable[[torch.nn.Module], object] | None = None  # casts a whole model to another dtype
    put_on_model: Callable[[torch.nn.Module, Variant], None] = lambda _, __: None
    divide: Callable[[torch.nn.Module, Variant], torch.nn.Module] = lambda model, _: model
    exchange_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda one: one
    make_optimizer: Callable[[MakeOptimizer, Any], torch.optim.Optimizer] = lambda make, of: make(
        of
    )
    put_on_optimizer: Callable[[torch.optim.Optimizer], torch.optim.Optimizer] = lambda one: one
    around_forward: Callable[[], AbstractContextManager[Any]] = nullcontext
    # Once an optimizer exists: how to apply it to that optimizer, or why it is too late.
    put_on_made: Callable[[torch.optim.Optimizer], object] = lambda _: None
    too_late_for_model: Callable[[torch.nn.Module], str | None] = lambda _: None
    too_late_for_optimizer: str | None = None
    needs_optimizer: bool = False  # on the model alone it would be another training

    # ---- how it is exported ----
    in_code: Callable[[Variant], Fragment] = lambda _: Fragment()
    # What a target's settings cannot express, and the line of code that does it.
    by_hand: Callable[[Variant, str], Sequence[str]] = lambda _, __: ()
    # Whether exporting/rewriting has an edit of its own for it. Otherwise `in_script` is what to
    # insert below the line that makes the script's model; None: `plan --diff` says it by hand.
    has_edit: bool = False
    in_script: Callable[[Variant, Possible], Fragment] | None = None

    def is_on(self, variant: Variant) -> bool:
        """Return whether a variant uses the trick."""
        own = getattr(variant, self.setting)
        return bool(own != self.setting_when_off if self.value is None else own == self.value)

    @property
    def setting_when_off(self) -> Any:
        """Return the default of its field in Variant."""
        return _DEFAULTS[self.setting]

    @property
    def consent(self) -> str | None:
        """Return why the user must agree, or None if the trick is used without asking."""
        return "changes training" if self.stability == "changes" else self.needs_consent

    def as_set(self, variant: Variant, stability: Stability | None = None) -> Trick:
        """Return the trick in the form a plan shows."""
        return Trick(
            name=self.name,
            what=self.what if isinstance(self.what, str) else self.what(variant),
            stability=stability or self.stability,
            caveat=self.caveat,
            code=self.code if isinstance(self.code, str) else self.code(variant),
        )


def by_hand(
    sentence: str, *, unless: Collection[Target] = ()
) -> Callable[[Variant, str], tuple[str, ...]]:
    """Return a sentence for every target except these. The exported code can do everything."""
    return lambda _, target: () if target == "code" or target in unless else (sentence,)
