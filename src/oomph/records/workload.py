"""Workload: what the user wants to train, as stated, nothing derived. Variant: how to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from oomph.errors import UsageError

Precision = Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16"]
Attention = Literal["as-is", "sdpa"]
Loss = Literal["as-is", "chunked"]
Adapters = Literal["none", "lora", "qlora"]
Sharding = Literal["none", "ddp", "fsdp", "hybrid"]
Keeps = Literal["outputs", "nothing"]

# The user's own optimizer in another implementation, or another optimizer with its parameters.
OPTIMIZERS = ("as-is", "fused", "foreach", "for-loop", "8-bit", "adafactor", "sgd")


def check_keeps(keeps: str | None) -> Keeps | None:
    """The same, if a loop can keep that. Raises UsageError."""
    known: dict[str | None, Keeps | None] = {None: None, "outputs": "outputs", "nothing": "nothing"}
    if keeps in known:
        return known[keeps]
    raise UsageError(
        f"keeps={keeps!r:.40} is unknown",
        attempt='"outputs", if your loop keeps `outputs = model(...)`, or "nothing"',
    )


def check_optimizer(name: str) -> str:
    """The name itself, if it is one of OPTIMIZERS. Raises UsageError."""
    if name in OPTIMIZERS:
        return name
    raise UsageError(
        f"{name!r:.40} is no optimizer that can be put on",
        because=f"it is one of {', '.join(OPTIMIZERS)}",
        attempt="as-is",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A model, a batch, a loss and an optimizer, each as a function that makes it.

    workload = oomph.Workload(
        model=lambda: BertForSequenceClassification(config),
        batch=lambda n: {"input_ids": torch.zeros(n, 512, dtype=torch.long), "labels": ...},
        loss=lambda model, batch: model(**batch).loss,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-4),
        batch_size=64,
    )
    """

    model: Callable[[], Any]  # built on tensors without memory: any size will do
    batch: Any  # a function of the number of examples, or one batch as an example
    loss: Callable[[Any, Any], Any]  # (model, batch) -> a scalar
    optimizer: Callable[[Any], Any]  # (parameters) -> an optimizer
    batch_size: int  # of one optimizer step: the contract
    clip_grad_norm: float | None = None
    zero_grad_to_none: bool = True  # torch's default since 2.0
    # Of what the model returns, until it has returned anew: all, as `outputs = model(...)` in a
    # loop does, or nothing but what the loss holds. None: nobody says, and the error bar has both.
    keeps: Keeps | None = None

    def __post_init__(self) -> None:
        check_keeps(self.keeps)


@dataclass(frozen=True, slots=True, kw_only=True)
class How:
    """How to train a workload, whatever the split of its batch: the tricks that are put on it."""

    precision: Precision = "fp32"
    checkpointing: str = "none"  # see records/checkpointing.py
    optimizer: str = "as-is"  # or one of OPTIMIZERS
    optimizer_in_backward: bool = False  # a gradient is used up as soon as it is there
    attention: Attention = "as-is"
    loss: Loss = "as-is"
    offload_activations: bool = False  # what backward needs waits in the host's memory
    offload_optimizer: bool = False  # the optimizer's state and its step are the host's
    adapters: Adapters = "none"
    sharding: Sharding = "none"
    num_gpus: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant(How):
    """One way to train a workload, the split of its batch included.

    micro_batch x accumulation x num_gpus is the effective batch.
    """

    micro_batch: int
    accumulation: int = 1
    expandable_segments: bool = False  # PYTORCH_ALLOC_CONF=expandable_segments:True

    @property
    def batch_size(self) -> int:
        return self.micro_batch * self.accumulation * self.num_gpus
