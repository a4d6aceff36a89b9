"""List every trick, safest first, and find those that a variant uses.

First exact and free, then exact but slower, then equal up to rounding, and last those that change
training, which need the user's consent. The memory and time that a trick saves are not given here:
rehearsals measure them.
"""

from __future__ import annotations

import functools
from dataclasses import fields
from operator import attrgetter
from typing import Any

from oomph.errors import UsageError
from oomph.records.workload import Variant
from oomph.tricks.accumulation import ACCUMULATION
from oomph.tricks.channels_last import CHANNELS_LAST
from oomph.tricks.checkpointing import CHECKPOINTING
from oomph.tricks.chunked_loss import CHUNKED_LOSS
from oomph.tricks.definition import Definition
from oomph.tricks.eight_bit_optimizer import EIGHT_BIT_OPTIMIZER
from oomph.tricks.expandable_segments import EXPANDABLE_SEGMENTS
from oomph.tricks.lora import LORA, QLORA
from oomph.tricks.muon import MUON
from oomph.tricks.offload_activations import OFFLOAD_ACTIVATIONS
from oomph.tricks.offload_optimizer import OFFLOAD_OPTIMIZER
from oomph.tricks.optimizer_in_backward import OPTIMIZER_IN_BACKWARD
from oomph.tricks.optimizers import ADAFACTOR, FOR_LOOP_OPTIMIZER, FOREACH, FUSED_OPTIMIZER, SGD
from oomph.tricks.precision import BF16, FP16, PURE_BF16, TF32
from oomph.tricks.sdpa import SDPA
from oomph.tricks.sharding import DDP, FSDP, HYBRID
from oomph.tricks.tensor_parallel import TENSOR_PARALLEL
from oomph.tricks.zero_offload import ZERO_OFFLOAD

TRICKS: tuple[Definition, ...] = (
    # exact, and free
    EXPANDABLE_SEGMENTS,
    SDPA,
    FUSED_OPTIMIZER,
    OPTIMIZER_IN_BACKWARD,
    # exact but slower
    ACCUMULATION,
    CHUNKED_LOSS,
    CHECKPOINTING,
    FOR_LOOP_OPTIMIZER,
    DDP,
    FSDP,
    HYBRID,
    TENSOR_PARALLEL,
    OFFLOAD_ACTIVATIONS,
    OFFLOAD_OPTIMIZER,
    # equal up to rounding
    TF32,
    BF16,
    FP16,
    ZERO_OFFLOAD,
    EIGHT_BIT_OPTIMIZER,
    CHANNELS_LAST,
    # changes training: only with consent
    PURE_BF16,
    ADAFACTOR,
    SGD,
    MUON,
    LORA,
    QLORA,
)
BY_NAME = {trick.name: trick for trick in TRICKS}
# Not a setting of a variant: another batch size, with the learning rate that goes with it.
BATCH_SIZE = "batch-size"
NAMES = (*BY_NAME, BATCH_SIZE)
NEED_CONSENT = (*(trick.name for trick in TRICKS if trick.consent), BATCH_SIZE)
_SETTING_NAMES = tuple(
    field.name for field in fields(Variant) if field.name not in ("micro_batch", "accumulation")
)
_SETTINGS = attrgetter(*_SETTING_NAMES)


def tricks_on(variant: Variant) -> tuple[Definition, ...]:
    """Return the tricks that a variant uses."""
    return _tricks_on(variant.accumulation > 1, _SETTINGS(variant))


def tricks_beyond(own: frozenset[str], variant: Variant) -> tuple[Definition, ...]:
    """Return the tricks of a variant, except those that the workload had from the start."""
    return tuple(trick for trick in tricks_on(variant) if trick.name not in own)


def to_put_on(variant: Variant) -> list[Definition]:
    """Return what a variant has to apply: its tricks, and torch's foreach if asked for."""
    return [trick for trick in (*TRICKS, FOREACH) if trick.is_on(variant)]


@functools.lru_cache(maxsize=4096)
def _tricks_on(accumulates: bool, settings: tuple[Any, ...]) -> tuple[Definition, ...]:
    """Return the tricks, cached without the micro-batch: a planner asks hundreds of times."""
    named = dict(zip(_SETTING_NAMES, settings, strict=True))
    variant = Variant(micro_batch=1, accumulation=1 + accumulates, **named)
    return tuple(trick for trick in TRICKS if trick.is_on(variant))


def contradiction_in(variant: Variant, *, clips_gradients: bool) -> UsageError | None:
    """Return why a variant cannot be trained, or None if no contradiction is known."""
    found = (trick.conflict(variant, clips_gradients) for trick in tricks_on(variant))
    return next(filter(None, found), None)
