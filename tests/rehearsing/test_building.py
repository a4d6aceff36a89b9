"""A model is built without memory, and as it would be with it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from oomph.rehearsing.building import build


class Dropping(nn.Module):
    table: torch.Tensor
    grid: torch.Tensor

    def __init__(self, depth: int) -> None:
        super().__init__()
        rates = [float(rate) for rate in torch.linspace(0, 0.3, depth).tolist()]
        self.layers = nn.ModuleList(nn.Dropout(rate) if rate else nn.Identity() for rate in rates)
        self.register_buffer("table", torch.zeros(4, 4) + torch.arange(4))
        both = torch.meshgrid(torch.arange(2), torch.arange(3), indexing="ij")
        self.register_buffer("grid", torch.stack(both))


def test_values_that_decide_what_is_built_are_real() -> None:
    rates = [getattr(layer, "p", None) for layer in build(lambda: Dropping(4)).layers]
    assert rates[0] is None
    assert rates[1:] == [float(rate) for rate in torch.linspace(0, 0.3, 4)[1:]]


def test_values_that_meet_tensors_without_memory_lose_theirs() -> None:
    made = build(lambda: Dropping(4))
    assert made.table.is_meta


def test_what_a_model_registers_takes_no_memory() -> None:
    made = build(lambda: Dropping(4))
    assert made.grid.is_meta
    assert made.grid.shape == (2, 2, 3)
    assert made.grid.dtype == torch.int64


def test_long_ranges_take_no_memory() -> None:
    positions: Any = build(lambda: torch.arange(2**31))
    assert positions.is_meta
