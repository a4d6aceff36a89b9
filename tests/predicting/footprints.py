"""Rehearsed in a child, since rehearsing patches torch: traces for the tests of footprints."""

from __future__ import annotations

import functools

import torch

from oomph.records.trace import Trace
from oomph.records.workload import Precision, Variant, Workload
from oomph.rehearsing.child import in_a_child

CAPABILITY = (8, 0)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 4 * width)
        self.down = torch.nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


def workload(optimizer: str = "adamw", batch_size: int = 8) -> Workload:
    makers = {
        "adamw": lambda parameters: torch.optim.AdamW(parameters),
        "for-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    }
    return Workload(
        model=lambda: torch.nn.Sequential(*(Block(256) for _ in range(4))),
        batch=lambda n: torch.zeros(n, 64, 256),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=makers[optimizer],
        batch_size=batch_size,
        clip_grad_norm=1.0,
    )


OPTIMIZERS = ("adamw", "for-loop", "sgd", "momentum")
SIZES = (2, 3, 5, 7)


@functools.cache
def all_traced() -> dict[tuple[str, Variant], Trace]:
    """Every optimizer in every way, from one child."""

    def work() -> dict[tuple[str, Variant], Trace]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        return {
            (optimizer, variant): rehearse(workload(optimizer), variant, CAPABILITY)
            for optimizer in OPTIMIZERS
            for variant in ways()
        }

    return in_a_child(work)


def ways() -> list[Variant]:
    return [
        Variant(micro_batch=n, accumulation=m, precision=precision, checkpointing=checkpointing)
        for n in SIZES
        for m in (1, 2)
        for precision, checkpointing in BASES
    ]


BASES: tuple[tuple[Precision, str], ...] = (("fp32", "none"), ("bf16", "none"), ("fp32", "blocks"))


def traced(optimizer: str, variant: Variant) -> Trace:
    return all_traced()[optimizer, variant]
