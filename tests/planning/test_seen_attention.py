"""A model that does not say which attention it has: its kernels do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

import oomph
from oomph.planning.rehearsals import first_look
from oomph.rehearsing.traces import with_rehearser


class Attention(torch.nn.Module):
    """A model of one's own, as nanoGPT's."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.attend, self.linear = attend, torch.nn.Linear(32, 32)

    def forward(self, x: Any) -> Any:
        return self.attend(self.linear(x).unsqueeze(1))


def fused(x: Any) -> Any:
    return functional.scaled_dot_product_attention(x, x, x, is_causal=True)


def by_hand(x: Any) -> Any:
    return torch.softmax(x @ x.transpose(-2, -1), dim=-1) @ x


def no_attention(x: Any) -> Any:
    return torch.relu(x)


@pytest.mark.parametrize("capability", [(7, 0), (8, 0)])
@pytest.mark.parametrize(
    ("attend", "expected"), [(fused, "sdpa"), (by_hand, "unknown"), (no_attention, "none")]
)
def test_attention_is_known_by_its_kernels(
    attend: Any, expected: str, capability: tuple[int, int]
) -> None:
    workload = oomph.Workload(
        model=lambda: Attention(attend),
        batch=lambda n: torch.zeros(n, 16, 32),
        loss=lambda model, batch: functional.cross_entropy(
            model(batch).flatten(0, -2),
            torch.zeros(len(batch) * 16, dtype=torch.long, device=batch.device),
        ),
        optimizer=lambda parameters: torch.optim.AdamW(parameters),
        batch_size=8,
    )
    found = with_rehearser(workload, capability, first_look)
    assert found.possible.attention_is == expected
