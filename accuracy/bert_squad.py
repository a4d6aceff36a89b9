"""BERT on SQuAD as NVIDIA's DeepLearningExamples trains it.

run_squad.py, modeling.py, optimization.py: fp16 is apex O2 with FusedAdam; fp32 has BertAdam, which
goes tensor by tensor in Python. apex's kernels clip all gradients at once. Questions with their
texts are padded to 384 tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy import apex
from oomph.records.workload import Workload

_VOCABULARY, _POSITIONS = 30528, 512  # the vocabulary is padded to a multiple of 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    layers: int
    width: int
    heads: int


SIZES = {
    "base": Size(layers=12, width=768, heads=12),
    "large": Size(layers=24, width=1024, heads=16),
}


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.heads = size.heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.output = nn.Linear(width, width)
        self.norm1, self.norm2 = nn.LayerNorm(width, 1e-12), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop1, self.drop2, self.drop3 = (nn.Dropout(0.1) for _ in range(3))

    def forward(self, x: Any, mask: Any) -> Any:
        batch, length, width = x.shape

        def by_heads(each: Any) -> Any:
            return each.view(batch, length, self.heads, width // self.heads).permute(0, 2, 1, 3)

        q, k, v = by_heads(self.query(x)), by_heads(self.key(x)), by_heads(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(width // self.heads)
        weights = self.drop1(F.softmax(scores + mask, dim=-1))
        attended = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        x = self.norm1(self.drop2(self.output(attended.view(batch, length, width))) + x)
        return self.norm2(self.drop3(self.down(F.gelu(self.up(x)))) + x)


class Bert(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, size.width, padding_idx=0)
        self.positions = nn.Embedding(_POSITIONS, size.width)
        self.types = nn.Embedding(2, size.width)
        self.norm, self.drop = nn.LayerNorm(size.width, 1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.pooler, self.answers = nn.Linear(size.width, size.width), nn.Linear(size.width, 2)

    def forward(self, tokens: Any) -> Any:
        places = torch.arange(tokens.size(1), device=tokens.device).expand_as(tokens)
        mask = torch.ones_like(tokens)[:, None, None, :].to(self.words.weight.dtype)
        mask = (1.0 - mask) * -10000.0
        x = self.words(tokens) + self.positions(places) + self.types(torch.zeros_like(tokens))
        x = self.drop(self.norm(x))
        for layer in self.layers:
            x = layer(x, mask)
        torch.tanh(self.pooler(x[:, 0]))
        return self.answers(x)


def _loss(model: Any, batch: Any) -> Any:
    start, end = model(batch["tokens"]).split(1, dim=-1)
    return (
        F.cross_entropy(start.squeeze(-1).float(), batch["start"])
        + F.cross_entropy(end.squeeze(-1).float(), batch["end"])
    ) / 2


class BertAdam(torch.optim.Optimizer):
    """DeepLearningExamples' optimization.py: one tensor at a time, after clipping all at once."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 3e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        apex.clip([p.grad for p in used])
        for p in used:
            state = self.state[p]
            if not state:
                state["next_m"], state["next_v"] = torch.zeros_like(p), torch.zeros_like(p)
            state["next_m"].mul_(0.9).add_(p.grad, alpha=0.1)
            state["next_v"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
            update = state["next_m"] / (state["next_v"].sqrt() + 1e-6)
            update += 0.01 * p
            p.add_(-(3e-5 * update))


def workload(size: str, *, is_half: bool, length: int, batch_size: int) -> Workload:
    def batch(n: int) -> Any:
        tokens = torch.zeros(n, length, dtype=torch.long)
        ends = torch.zeros(n, dtype=torch.long)
        return {"tokens": tokens, "start": ends, "end": ends.clone()}

    if not is_half:
        return Workload(
            model=lambda: Bert(SIZES[size]),
            batch=batch,
            loss=_loss,
            optimizer=BertAdam,
            batch_size=batch_size,
        )
    return Workload(
        model=lambda: apex.in_half(Bert(SIZES[size])),
        batch=batch,
        loss=lambda model, examples: apex.scaled(_loss(model, examples)),
        optimizer=lambda ps: apex.MasterWeights(ps, apex.fused_adam, max_norm=1.0),
        batch_size=batch_size,
    )
