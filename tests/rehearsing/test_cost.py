"""What a rehearsal computes on the host, and what it leaves in memory when it is over."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch names it

from oomph.records.workload import Sharding, Variant, Workload
from oomph.rehearsing.child import in_a_child

CAPABILITY = (9, 0)


class GroupedAttention(torch.nn.Module):
    """More query heads than key heads: in fp32 CUDA has no kernel for it, and masks by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = torch.nn.Linear(32, 32), torch.nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.query(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k = self.key(x).unflatten(-1, (2, 8)).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


def workload(model: Any) -> Workload:
    return Workload(
        model=model,
        batch=lambda num: torch.zeros(num, 24, 32),
        loss=lambda made, batch: made(batch).square().mean(),
        optimizer=torch.optim.AdamW,
        batch_size=8,
    )


def test_the_masks_inside_of_attention_are_not_computed() -> None:
    def work() -> tuple[list[str], list[str]]:
        from oomph.pretending.values import Shadows
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        computed: list[str] = []
        plainly = Shadows.computed

        def noted(self: Shadows, function: Any, args: Any, kwargs: Any) -> Any:
            computed.append(function._schema.name)
            return plainly(self, function, args, kwargs)

        Shadows.computed = noted  # type: ignore[method-assign]
        trace = rehearse(workload(GroupedAttention), Variant(micro_batch=2), CAPABILITY)
        return computed, [allocation.op for allocation in trace.allocations]

    computed, allocated = in_a_child(work)
    assert any("tril" in op for op in allocated)  # the mask is there
    assert not any("tril" in op for op in computed)


@pytest.mark.parametrize("sharding", ["none", "ddp", "fsdp"])
def test_a_model_is_gone_when_its_rehearsal_is_over(sharding: Sharding) -> None:
    variant = Variant(micro_batch=2, sharding=sharding, num_gpus=1 if sharding == "none" else 2)

    def work() -> tuple[int, bool]:
        from oomph.rehearsing.rehearse import prepare, rehearse

        prepare(CAPABILITY)
        made: list[Any] = []

        def loss(model: Any, batch: Any) -> Any:
            made.append(weakref.ref(model))
            made.extend(map(weakref.ref, model.parameters()))
            return model(batch).square().mean()

        trained = replace(workload(GroupedAttention), loss=loss)
        gc.disable()
        trace = rehearse(trained, variant, CAPABILITY)
        num_events = len(trace.events)
        gc.collect()
        is_gone = all(each() is None for each in made)
        return len(trace.events) - num_events, is_gone

    num_late_events, is_gone = in_a_child(work)
    assert is_gone
    assert num_late_events == 0
