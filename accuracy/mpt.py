"""MPT as mosaicml/llm-foundry trained it for its throughput tables, on one rank, without sharding.

llmfoundry/models/mpt/modeling_mpt.py and layers: one matrix for queries, keys and values, flash
attention, GELU, learned positions as many as the sequence is long, biases everywhere, the head tied
to the embedding. FSDP computes in bf16, so the weights are made in it. Only for the time of forward
and backward: neither communication nor the optimizer's step on its shard is in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy.dtypes import made_in
from accuracy.shapes import Shape
from oomph.records.workload import Workload


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.wqkv = nn.Linear(shape.width, 3 * shape.width)
        self.out_proj = nn.Linear(shape.width, shape.width)
        self.up_proj = nn.Linear(shape.width, shape.ffn)
        self.down_proj = nn.Linear(shape.ffn, shape.width)

    def forward(self, x: Any) -> Any:
        x = x + self._attended(self.norm_1(x))
        return x + self.down_proj(F.gelu(self.up_proj(self.norm_2(x))))

    def _attended(self, x: Any) -> Any:
        parts = self.wqkv(x).chunk(3, dim=2)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Mpt(nn.Module):
    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.wpe = nn.Embedding(length, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm_f = nn.LayerNorm(shape.width)

    def forward(self, tokens: Any) -> Any:
        places = torch.arange(tokens.size(1), device=tokens.device).unsqueeze(0)
        x = self.wte(tokens) + self.wpe(places)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)


def loss(model: Any, batch: Any) -> Any:
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), batch["labels"].view(-1))


class NoStep:
    """The step is another rank's, but for one part of many."""

    def __init__(self, parameters: Any) -> None:
        self.parameters = list(parameters)
        self.state: dict[Any, Any] = {}

    def zero_grad(self, **_: Any) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def step(self) -> None:
        pass


def workload(shape: Shape, length: int, batch_size: int) -> Workload:
    names = ("tokens", "labels")
    return Workload(
        model=lambda: made_in(torch.bfloat16, lambda: Mpt(shape, length)),
        batch=lambda n: {name: torch.zeros(n, length, dtype=torch.long) for name in names},
        loss=loss,
        optimizer=NoStep,
        batch_size=batch_size,
    )
