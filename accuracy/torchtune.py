"""Llama 3.2 and its single-GPU fine-tuning as torchtune wrote them in November 2024, eager.

torchtune@bd2a0fc: modules/transformer.py, attention.py, rms_norm.py, position_embeddings.py,
recipes/full_finetune_single_device.py. Worth memory: the norm in eager fp32, RoPE in fp32 with the
cache gathered at the positions of packed sequences, keys and values repeated for each query head,
logits in fp32. Packed sequences take flex attention, which saves what flash attention saves.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy.dtypes import made_in
from accuracy.shapes import Shape
from oomph.records.workload import Workload


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        upcast = x.float()
        normed = (upcast * torch.rsqrt(upcast.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x)
        return normed * self.scale


class Rope(nn.Module):
    cache: Any

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        cache = torch.empty(shape.positions, shape.head // 2, 2, dtype=torch.float32)
        self.register_buffer("cache", cache, persistent=False)

    def forward(self, x: Any, positions: Any) -> Any:
        cache = self.cache[positions]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        cache = cache.view(-1, pairs.size(1), 1, pairs.size(3), 2)
        out = torch.stack(
            [
                pairs[..., 0] * cache[..., 0] - pairs[..., 1] * cache[..., 1],
                pairs[..., 1] * cache[..., 0] + pairs[..., 0] * cache[..., 1],
            ],
            -1,
        )
        return out.flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape, rope: Rope) -> None:
        super().__init__()
        self.shape, self.rope = shape, rope
        of_keys = shape.kv_heads * shape.head
        self.q_proj = nn.Linear(shape.width, shape.heads * shape.head, bias=False)
        self.k_proj, self.v_proj = (nn.Linear(shape.width, of_keys, bias=False) for _ in range(2))
        self.output_proj = nn.Linear(shape.heads * shape.head, shape.width, bias=False)

    def forward(self, x: Any, positions: Any) -> Any:
        batch, length, _ = x.shape
        q = self.q_proj(x).view(batch, length, -1, self.shape.head)
        q = self.rope(q, positions).transpose(1, 2)
        k, v = self.k_proj(x), self.v_proj(x)
        k = k.view(batch, length, -1, self.shape.head)
        v = v.view(batch, length, -1, self.shape.head)
        k = self.rope(k, positions).transpose(1, 2)
        v = v.transpose(1, 2)
        per_key = self.shape.heads // self.shape.kv_heads
        expanded = (batch, self.shape.kv_heads, per_key, -1, self.shape.head)
        k = k.unsqueeze(2).expand(expanded).flatten(1, 2)
        v = v.unsqueeze(2).expand(expanded).flatten(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.output_proj(out.transpose(1, 2).contiguous().view(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Any) -> Any:
        h = F.silu(self.w1(x))
        h = h * self.w3(x)
        return self.w2(h)


class Layer(nn.Module):
    def __init__(self, shape: Shape, rope: Rope) -> None:
        super().__init__()
        self.sa_norm, self.mlp_norm = RmsNorm(shape.width), RmsNorm(shape.width)
        self.attn, self.mlp = Attention(shape, rope), FeedForward(shape)

    def forward(self, x: Any, positions: Any) -> Any:
        h = self.sa_norm(x)
        attended = self.attn(h, positions)
        h = attended + x
        fed = self.mlp(self.mlp_norm(h))
        return h + fed


class Decoder(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        rope = Rope(shape)
        self.layers = nn.ModuleList(Layer(shape, rope) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)

    def forward(self, tokens: Any, positions: Any) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, positions)
        h = self.norm(h)
        return F.linear(h, self.tok_embeddings.weight).float()


def loss(model: Any, batch: Any) -> Any:
    """_loss_step, and its scaling by the number of tokens."""
    labels = batch["labels"]
    num_tokens = (labels != -100).sum()
    logits = model(batch["tokens"], batch["input_pos"])
    ignored = torch.full((labels.shape[0], 1), -100, device=labels.device)
    labels = torch.hstack((labels[..., 1:], ignored)).reshape(-1)
    logits = logits.reshape(-1, logits.size(-1))
    found = F.cross_entropy(logits, labels, ignore_index=-100)
    del logits
    return found * num_tokens


def workload(shape: Shape, length: int, batch_size: int) -> Workload:
    names = ("tokens", "input_pos", "labels")
    return Workload(
        model=lambda: made_in(torch.bfloat16, lambda: Decoder(shape)),
        batch=lambda n: {name: torch.zeros(n, length, dtype=torch.long) for name in names},
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-5, fused=True),
        batch_size=batch_size,
    )
