"""Workload: what the user wants to train, as stated, nothing derived. Variant: how to train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Precision = Literal["fp32", "tf32", "fp16", "bf16", "pure-bf16"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to train a workload."""

    micro_batch: int
    accumulation: int = 1
    precision: Precision = "fp32"
    checkpoint_every: int = 0  # 0: nothing is recomputed; k: every k-th block is
