"""The levers: what each does to training, when it is on, what to know, and how it is applied.

In the order of safety: exact and free, exact at the price of time, close within rounding, and last
what changes training, which needs the user's consent. What a lever is worth in memory and time is
not said here: that is traced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

from oomph.records.plan import Stability, Trick
from oomph.records.workload import Variant


@dataclass(frozen=True, slots=True, kw_only=True)
class Lever:
    """One trick, whatever the model."""

    name: str  # as --allow and --forbid take it
    stability: Stability
    is_on: Callable[[Variant], bool]
    what: Callable[[Variant], str]
    code: Callable[[Variant], str]
    caveat: str | None = None

    def as_set(self, variant: Variant, stability: Stability | None = None) -> Trick:
        return Trick(
            name=self.name,
            what=self.what(variant),
            stability=stability or self.stability,
            caveat=self.caveat,
            code=self.code(variant),
        )


def _is(**wanted: object) -> Callable[[Variant], bool]:
    return lambda variant: all(getattr(variant, name) == value for name, value in wanted.items())


def _always(text: str) -> Callable[[Variant], str]:
    return lambda _: text


LEVERS: tuple[Lever, ...] = (
    # ---- exact, and free -------------------------------------------------------------------------
    Lever(
        name="expandable-segments",
        stability="same",
        is_on=_is(expandable_segments=True),
        what=_always("let the allocator's segments grow, so that fewer gaps are left in them"),
        code=_always("PYTORCH_ALLOC_CONF=expandable_segments:True  # before CUDA starts"),
    ),
    Lever(
        name="sdpa",
        stability="same",
        is_on=_is(attention="sdpa"),
        what=_always("attention that never holds the matrix of all pairs of tokens"),
        code=_always('model.set_attn_implementation("sdpa")'),
    ),
    Lever(
        name="fused-optimizer",
        stability="same",
        is_on=_is(optimizer="fused"),
        what=_always("the optimizer's step in one kernel, without copies of the parameters"),
        code=_always("fused=True in the optimizer"),
    ),
    Lever(
        name="optimizer-in-backward",
        stability="same",
        is_on=_is(optimizer_in_backward=True),
        what=_always("use each gradient as soon as it is there, and free it"),
        code=_always("oomph.apply: parameter.register_post_accumulate_grad_hook"),
        caveat="no accumulation, no clipping by the whole norm, no loss scaler",
    ),
    # ---- exact, at the price of time -------------------------------------------------------------
    Lever(
        name="accumulation",
        stability="same",
        is_on=lambda variant: variant.accumulation > 1,
        what=lambda v: f"{v.micro_batch} examples at a time, {v.accumulation} times a step",
        code=lambda v: f"(loss / {v.accumulation}).backward() {v.accumulation} times, then step()",
        caveat="weight micro-batches by what the loss averages over (examples or tokens)",
    ),
    Lever(
        name="chunked-loss",
        stability="same",
        is_on=_is(loss="chunked"),
        what=_always("the loss from the last hidden states piece by piece: no whole logits"),
        code=_always("torch.nn.functional.linear_cross_entropy, with options that chunk"),
    ),
    Lever(
        name="checkpointing",
        stability="same",
        is_on=lambda variant: variant.checkpointing != "none",
        what=lambda variant: _recomputed(variant.checkpointing),
        code=_always("torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)"),
    ),
    Lever(
        name="for-loop-optimizer",
        stability="same",
        is_on=_is(optimizer="for-loop"),
        what=_always("the optimizer's step parameter by parameter, without copies of them all"),
        code=_always("foreach=False in the optimizer"),
    ),
    Lever(
        name="ddp",
        stability="same",
        is_on=_is(sharding="ddp"),
        what=lambda v: f"{v.num_gpus} GPUs with the whole model each, gradients averaged",
        code=lambda v: (
            f"torchrun --nproc-per-node {v.num_gpus}, DistributedDataParallel("
            "model, gradient_as_bucket_view=True)"
        ),
    ),
    Lever(
        name="fsdp",
        stability="same",
        is_on=_is(sharding="fsdp"),
        what=lambda v: f"parameters, gradients and optimizer divided over {v.num_gpus} GPUs",
        code=lambda v: (
            f"torchrun --nproc-per-node {v.num_gpus}, fully_shard(block), then the model"
        ),
    ),
    Lever(
        name="hybrid",
        stability="same",
        is_on=_is(sharding="hybrid"),
        what=lambda v: f"divided within a node, the same in each: {v.num_gpus} GPUs",
        code=_always("fully_shard(block, mesh=a mesh of two dimensions)"),
    ),
    Lever(
        name="offload-activations",
        stability="same",
        is_on=_is(offload_activations=True),
        what=_always("what backward needs waits in the host's memory"),
        code=_always("oomph.apply, or torch.autograd.graph.save_on_cpu(pin_memory=True)"),
        caveat="as fast as the bus: measure a step",
    ),
    Lever(
        name="offload-optimizer",
        stability="same",
        is_on=_is(offload_optimizer=True),
        what=_always("the optimizer's state and its step are the host's"),
        code=_always("oomph.apply, or torchao.optim.CPUOffloadOptimizer"),
        caveat="the host's step is slow: measure one",
    ),
    # ---- close within rounding -------------------------------------------------------------------
    Lever(
        name="tf32",
        stability="rounding",
        is_on=_is(precision="tf32"),
        what=_always("products of matrices with 10 bits of mantissa, sums in fp32"),
        code=_always('torch.set_float32_matmul_precision("high")'),
    ),
    Lever(
        name="bf16",
        stability="rounding",
        is_on=_is(precision="bf16"),
        what=_always("compute in bf16: weights and sums stay fp32"),
        code=lambda v: (
            "fully_shard(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))"
            if v.sharding in ("fsdp", "hybrid")
            else 'torch.autocast("cuda", dtype=torch.bfloat16)'
        ),
    ),
    Lever(
        name="fp16",
        stability="rounding",
        is_on=_is(precision="fp16"),
        what=_always("autocast to fp16, with a loss scaler"),
        code=_always('torch.autocast("cuda", dtype=torch.float16) and torch.amp.GradScaler'),
        caveat="values above 65504 overflow: watch for skipped steps",
    ),
    Lever(
        name="8-bit-optimizer",
        stability="rounding",
        is_on=_is(optimizer="8-bit"),
        what=_always("the optimizer's state in 8 bits a value, embeddings in 32"),
        code=_always("bitsandbytes.optim.AdamW8bit, or torchao.optim.AdamW8bit"),
        caveat="for a new run: the state of an old one is not carried over",
    ),
    # ---- changes training: only with consent -----------------------------------------------------
    Lever(
        name="pure-bf16",
        stability="changes",
        is_on=_is(precision="pure-bf16"),
        what=_always("weights, gradients and state in bf16"),
        code=_always("model.to(torch.bfloat16), with stochastic rounding in the optimizer"),
        caveat="small updates are lost without stochastic rounding",
    ),
    Lever(
        name="adafactor",
        stability="changes",
        is_on=_is(optimizer="adafactor"),
        what=_always("Adafactor: rows and columns of the second moment instead of all of it"),
        code=_always("torch.optim.Adafactor"),
        caveat="another optimizer: tune the learning rate anew",
    ),
    Lever(
        name="sgd",
        stability="changes",
        is_on=_is(optimizer="sgd"),
        what=_always("SGD with momentum: one value of state a parameter"),
        code=_always("torch.optim.SGD(momentum=0.9)"),
        caveat="another optimizer: tune the learning rate anew",
    ),
    Lever(
        name="lora",
        stability="changes",
        is_on=_is(adapters="lora"),
        what=_always("train small adapters beside frozen weights"),
        code=_always("peft.get_peft_model, or oomph.apply"),
        caveat="another model with less capacity, and another learning rate",
    ),
    Lever(
        name="qlora",
        stability="changes",
        is_on=_is(adapters="qlora"),
        what=_always("train small adapters beside frozen weights in 4 bits"),
        code=_always("peft and bitsandbytes, or oomph.apply"),
        caveat="another model with less capacity, and another learning rate",
    ),
)
BY_NAME = {lever.name: lever for lever in LEVERS}
# Not a lever of a variant: the batch itself, with the learning rate that goes with it.
BATCH_SIZE = "batch-size"
NAMES = (*BY_NAME, BATCH_SIZE)
# What shows the model a part of the batch at a time.
SPLITTING = frozenset({"accumulation", "ddp", "fsdp", "hybrid"})
NEED_CONSENT = (*(lever.name for lever in LEVERS if lever.stability == "changes"), BATCH_SIZE)


def levers_of(variant: Variant) -> tuple[Lever, ...]:
    """The levers that are on."""
    return _levers_of(variant.accumulation > 1, _SETTINGS(variant))


def levers_beyond(own: frozenset[str], variant: Variant) -> tuple[Lever, ...]:
    """The levers that are on, but for those that were on from the beginning."""
    return tuple(lever for lever in levers_of(variant) if lever.name not in own)


@functools.lru_cache(maxsize=4096)
def _levers_of(accumulates: bool, settings: tuple[Any, ...]) -> tuple[Lever, ...]:
    """What a variant has on whatever its micro-batch is: a planner asks hundreds of times."""
    named = dict(zip(_SETTING_NAMES, settings, strict=True))
    variant = Variant(micro_batch=1, accumulation=1 + accumulates, **named)
    return tuple(lever for lever in LEVERS if lever.is_on(variant))


_SETTING_NAMES = tuple(
    field.name for field in fields(Variant) if field.name not in ("micro_batch", "accumulation")
)
_SETTINGS = attrgetter(*_SETTING_NAMES)


def _recomputed(checkpointing: str) -> str:
    if checkpointing == "selective":
        return "recompute in backward what is cheap; keep products of matrices and attention"
    if checkpointing == "blocks":
        return "recompute every block in backward"
    if checkpointing.startswith("every-"):
        return f"recompute one block of {checkpointing.removeprefix('every-')} in backward"
    return f"recompute in backward the {checkpointing.replace(':', ' ')}"
