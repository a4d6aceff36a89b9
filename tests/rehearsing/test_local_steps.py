"""A step on this rank's parts is recorded exactly as torch's own step on DTensors is."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import optim

from oomph.records.trace import Trace
from oomph.records.workload import Variant, Workload
from oomph.rehearsing.child import in_a_child

CAPABILITY = (8, 0)
OPTIMIZERS: dict[str, Any] = {
    "adamw": optim.AdamW,
    "amsgrad": lambda of: optim.AdamW(of, amsgrad=True, maximize=True, weight_decay=0.0),
    "adam": lambda of: optim.Adam(of, weight_decay=0.1),
    "fused": lambda of: optim.AdamW(of, fused=True),
    "for-loop": lambda of: optim.AdamW(of, foreach=False),
    "two groups": lambda of: optim.AdamW([{"params": of[:5], "lr": 0.1}, {"params": of[5:]}]),
    "sgd": lambda of: optim.SGD(of, lr=0.1, maximize=True),
    "momentum": lambda of: optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
}
VARIANTS = (
    Variant(micro_batch=2, accumulation=2, sharding="fsdp", num_gpus=2),
    Variant(micro_batch=2, sharding="fsdp", num_gpus=3, precision="bf16"),  # parts of unequal size
    Variant(micro_batch=2, sharding="hybrid", num_gpus=4, precision="fp16"),
    Variant(micro_batch=2, sharding="fsdp", num_gpus=4, precision="pure-bf16"),
)


class Block(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(width)
        self.up = torch.nn.Linear(width, 3 * width + 1)
        self.down = torch.nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return x + hidden


def workload(optimizer: str, clip: float | None) -> Workload:
    return Workload(
        model=lambda: torch.nn.Sequential(*(Block(64) for _ in range(3)), torch.nn.LayerNorm(64)),
        batch=lambda num: torch.zeros(num, 8, 64),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=OPTIMIZERS[optimizer],
        batch_size=16,
        clip_grad_norm=clip,
    )


Case = tuple[str, Variant, float | None, bool]


@functools.cache
def both() -> dict[Case, tuple[Trace, Trace]]:
    """Each case on parts, and on DTensors, from one child."""

    def work() -> dict[Case, tuple[Trace, Trace]]:
        from oomph.rehearsing import local_steps, rehearse

        rehearse.prepare(CAPABILITY)
        is_same = local_steps.is_same_on_parts

        def rehearsed(case: Case) -> Trace:
            name, variant, clip, is_alone = case
            trained = workload(name, clip)
            return rehearse.rehearse(trained, variant, CAPABILITY, is_step_alone=is_alone)

        found = {}
        for case in cases():
            local_steps.is_same_on_parts = is_same
            quick = rehearsed(case)
            local_steps.is_same_on_parts = lambda optimizer: False  # noqa: ARG005
            found[case] = quick, rehearsed(case)
        return found

    return in_a_child(work)


def cases() -> list[Case]:
    return [
        (name, variant, clip, is_alone)
        for name in OPTIMIZERS
        for variant in VARIANTS
        for clip, is_alone in ((1.0, False), (None, True))
    ]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_whole_trace_is_the_one_of_dtensors(optimizer: str, variant: Variant) -> None:
    alike = [pair for case, pair in both().items() if case[:2] == (optimizer, variant)]
    assert len(alike) == 2
    for on_parts, on_dtensors in alike:
        assert on_parts == on_dtensors


@pytest.mark.parametrize(
    "optimizer", [optim.Rprop, lambda of: optim.SGD(of, lr=0.1, fused=True)], ids=["rprop", "sgd"]
)
def test_what_torch_cannot_step_on_dtensors_fails_as_it_would_on_gpus(optimizer: Any) -> None:
    def work() -> str:
        from dataclasses import replace

        from oomph.rehearsing import rehearse

        rehearse.prepare(CAPABILITY)
        trained = replace(workload("adamw", None), optimizer=optimizer)
        with pytest.raises(NotImplementedError) as error:
            rehearse.rehearse(trained, VARIANTS[0], CAPABILITY)
        return str(error.value)

    assert "does not have a sharding strategy" in in_a_child(work)
