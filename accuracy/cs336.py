"""The transformer of Stanford's CS336 homework: RMSNorm, rotary positions, SwiGLU.

Courses publish its times with forward, backward and optimizer apart. Its einsum and rearrange calls
become the same matmuls and copies as the methods that are used here; cos and sin are looked up by
position, attention and softmax are written out, and the causal mask is made in each layer.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

VOCABULARY = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """One size of the model."""

    layers: int
    width: int
    heads: int
    ffn: int


# The homework's own table.
SIZES = {
    "small": Size(layers=12, width=768, heads=12, ffn=3072),
    "medium": Size(layers=24, width=1024, heads=16, ffn=4096),
    "large": Size(layers=36, width=1280, heads=20, ffn=5120),
    "xl": Size(layers=48, width=1600, heads=25, ffn=6400),
    "2.7b": Size(layers=32, width=2560, heads=32, ffn=10240),
}


class Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Any) -> Any:
        return torch.einsum("...i,oi->...o", x, self.weight)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (self.weight * x).to(dtype)


class Rotary(nn.Module):
    cached: torch.Tensor

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        self.register_buffer("cached", torch.zeros(2, length, width // 2), persistent=False)

    def forward(self, x: Any) -> Any:
        x1, x2 = x.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = self.cached[:, : x.size(-2), :].unbind(0)
        return torch.concat((cos * x1 - sin * x2, sin * x1 + cos * x2), dim=-1)


def softmax(x: Any) -> Any:
    shifted = x - torch.max(x, dim=-1, keepdim=True)[0]
    powers = torch.exp(shifted)
    return powers / torch.sum(powers, dim=-1, keepdim=True)


def attend(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(k.shape[-1])
    return torch.matmul(softmax(torch.where(mask, scores, float("-inf"))), v)


class Attention(nn.Module):
    def __init__(self, size: Size, rotary: Rotary) -> None:
        super().__init__()
        self.heads = size.heads
        self.q, self.k, self.v = (Linear(size.width, size.width) for _ in range(3))
        self.out = Linear(size.width, size.width)
        self.rotary = rotary

    def forward(self, x: Any) -> Any:
        q, k, v = (
            part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = self.rotary(q), self.rotary(k)
        places = torch.arange(x.size(1), device=x.device)
        mask = (places[:, None] >= places[None, :])[None, None]
        attended = attend(q, k, v, mask)
        return self.out(attended.transpose(1, 2).flatten(-2).contiguous())


class Ffn(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.w1, self.w3 = Linear(size.width, size.ffn), Linear(size.width, size.ffn)
        self.w2 = Linear(size.ffn, size.width)

    def forward(self, x: Any) -> Any:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


class Block(nn.Module):
    def __init__(self, size: Size, rotary: Rotary) -> None:
        super().__init__()
        self.attn, self.ffn = Attention(size, rotary), Ffn(size)
        self.ln1, self.ln2 = RmsNorm(size.width), RmsNorm(size.width)

    def forward(self, x: Any) -> Any:
        x = x + self.attn(self.ln1(x))
        return x + self.ffn(self.ln2(x))


class Transformer(nn.Module):
    def __init__(self, size: Size, length: int) -> None:
        super().__init__()
        self.embeddings = nn.Parameter(torch.empty(VOCABULARY, size.width))
        rotary = Rotary(length, size.width // size.heads)
        self.layers = nn.ModuleList(Block(size, rotary) for _ in range(size.layers))
        self.norm, self.head = RmsNorm(size.width), Linear(size.width, VOCABULARY)

    def forward(self, tokens: Any) -> Any:
        x = self.embeddings[tokens, :]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def loss(model: Any, batch: Any) -> Any:
    logits = model(batch[0])
    return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), batch[1].reshape(-1))


def own_loss(model: Any, batch: Any) -> Any:
    """The homework's cross-entropy, written out."""
    logits = model(batch[0])
    shifted = logits - torch.max(logits, dim=-1, keepdim=True)[0]
    powers = torch.sum(torch.exp(shifted), dim=-1, keepdim=True)
    negative = -(shifted - torch.log(powers))
    return torch.mean(torch.gather(negative, -1, batch[1].unsqueeze(-1)))


class OwnAdamW(torch.optim.Optimizer):
    """The homework's AdamW, written out: one tensor at a time, nothing in place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        used = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in used:
            state = self.state[p]
            p -= 1e-5 * p
            # Zeros are made each time: they are the default of a look-up.
            m, v = (state.get(name, torch.zeros_like(p)) for name in ("m", "v"))
            m = 0.9 * m + 0.1 * p.grad
            v = 0.999 * v + 0.001 * torch.square(p.grad)
            p -= 1e-3 * m / (torch.sqrt(v) + 1e-8)
            state["m"], state["v"] = m, v


# ---- rotary positions head by head, as one student wrote them -------------------------------


class ByHeads(Attention):
    """Each head of q and k is turned by itself, in a loop."""

    def forward(self, x: Any) -> Any:
        batch, length, width = x.shape
        places = torch.arange(length, device=x.device).expand(batch, length)
        q, k, v = (
            part(x).view(batch, length, self.heads, width // self.heads)
            for part in (self.q, self.k, self.v)
        )
        q, k = (
            torch.stack([self._turned(one, places) for one in each.unbind(-2)], dim=-2)
            for each in (q, k)
        )
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        mask = torch.tril(torch.ones(length, length, device=x.device, dtype=torch.bool))
        mask = mask[None, None].expand(batch, self.heads, length, length)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(width // self.heads)
        attended = torch.matmul(softmax(scores.masked_fill(~mask, -1e9)), v)
        return self.out(attended.transpose(1, 2).contiguous().view(batch, length, width))

    def _turned(self, x: Any, places: Any) -> Any:
        cos, sin = self.rotary.cached[0][places], self.rotary.cached[1][places]
        even, odd = x[..., ::2], x[..., 1::2]
        turned = torch.empty_like(x)
        turned[..., ::2] = cos * even - sin * odd
        turned[..., 1::2] = sin * even + cos * odd
        return turned


def by_heads(size: Size, length: int) -> Transformer:
    model = Transformer(size, length)
    for block in model.layers:
        assert isinstance(block, Block)
        block.attn = ByHeads(size, block.attn.rotary)
    return model


def sum_loss(model: Any, batch: Any) -> Any:
    return model(batch[0]).sum()


# ---- attention alone -------------------------------------------------------------------------


class Heads(nn.Module):
    """One head of attention over q, k and v that need gradients, and no projections."""

    def __init__(
        self, num_examples: int, length: int, width: int, *, has_own_softmax: bool
    ) -> None:
        super().__init__()
        self.softmax = softmax if has_own_softmax else functools.partial(F.softmax, dim=-1)
        self.q, self.k, self.v = (
            nn.Parameter(torch.empty(num_examples, length, width)) for _ in range(3)
        )

    def forward(self, _: Any) -> Any:
        scores = torch.matmul(self.q, self.k.transpose(-1, -2)) / math.sqrt(self.k.shape[-1])
        return torch.matmul(self.softmax(scores), self.v)
