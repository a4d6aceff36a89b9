"""litgpt's decoder, its adapters and its fine-tuning, on one GPU.

Lightning-AI/litgpt: model.py, lora.py, utils.py (chunked_cross_entropy), finetune/full.py and
finetune/lora.py, as of 2023 and 2024. Worth memory: one matrix for queries, keys and values, whose
parts are copied; RoPE written by a concatenation; keys and values repeated for each query head; the
norm in eager fp32; all logits in bf16 and then in fp32, because Fabric hands outputs over in fp32
(HalfPrecision.convert_output); the name `logits` holds them until the next forward has returned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy.dtypes import made_in
from accuracy.nf4 import Linear4bit
from accuracy.shapes import Shape
from oomph.records.workload import Workload

_CHUNK = 128  # tokens of lm_head and of the loss at a time
_USUAL_LENGTH = 256  # of all batches but the longest, where the longest comes first


@dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """What is trained, and how the rest is kept."""

    rank: int = 0  # 0: everything is trained
    on_keys: bool = False  # queries and values always
    on_all: bool = False  # projection, MLP and head as well
    dropout: float = 0.05
    bits: str = ""  # "nf4", "nf4-dq"


def linear(width: int, out: int, tuning: Tuning, *, bias: bool) -> Any:
    if tuning.bits:
        return Linear4bit(
            width,
            out,
            bias=bias,
            double=tuning.bits.endswith("-dq"),
            is_old=True,  # litgpt pinned 0.41.0 and 0.42.0
        )
    return nn.Linear(width, out, bias=bias)


class LoraLinear(nn.Module):
    def __init__(self, width: int, out: int, tuning: Tuning, *, bias: bool) -> None:
        super().__init__()
        self.linear = linear(width, out, tuning, bias=bias)
        self.has_adapter = bool(tuning.rank and tuning.on_all)
        if self.has_adapter:
            self.lora_A = nn.Parameter(torch.empty(tuning.rank, width))
            self.lora_B = nn.Parameter(torch.empty(out, tuning.rank))
            self.dropout = nn.Dropout(tuning.dropout)

    def forward(self, x: Any) -> Any:
        pretrained = self.linear(x)
        if not self.has_adapter:
            return pretrained
        low = self.dropout(x) @ self.lora_A.transpose(0, 1)
        return pretrained + low @ self.lora_B.transpose(0, 1) * 0.5


class LoraQkv(nn.Module):
    """One matrix for queries, keys and values, with adapters for some of them."""

    def __init__(self, shape: Shape, tuning: Tuning, *, bias: bool) -> None:
        super().__init__()
        of_keys, of_queries = shape.kv_heads * shape.head, shape.heads * shape.head
        self.out = of_queries + 2 * of_keys
        self.linear = linear(shape.width, self.out, tuning, bias=bias)
        self.rank, self.is_grouped = tuning.rank, shape.heads != shape.kv_heads
        self.parts = [of_queries, *([of_keys] if tuning.on_keys else []), of_keys]
        if tuning.rank:
            count = len(self.parts)
            self.lora_A = nn.Parameter(torch.empty(tuning.rank * count, shape.width))
            self.lora_B = nn.Parameter(torch.empty(sum(self.parts), tuning.rank))
            self.dropout = nn.Dropout(tuning.dropout)

    def forward(self, x: Any) -> Any:
        pretrained = self.linear(x)
        if not self.rank:
            return pretrained
        low = F.linear(self.dropout(x), self.lora_A)
        high = self._conv1d(low.transpose(-2, -1), self.lora_B.unsqueeze(-1)).transpose(-2, -1)
        return pretrained + self._padded(high * 0.5)

    def _conv1d(self, low: Any, weight: Any) -> Any:
        if not self.is_grouped:
            return F.conv1d(low, weight, groups=len(self.parts))
        pairs = zip(low.chunk(len(self.parts), dim=1), weight.split(self.parts), strict=True)
        return torch.cat([F.conv1d(part, of_part) for part, of_part in pairs], dim=1)

    def _padded(self, x: Any) -> Any:
        """zero_pad: zeros for the part that has no adapter."""
        if len(self.parts) == 3:
            return x
        x = x.transpose(0, 1)
        result = x.new_zeros((*x.shape[:-1], self.out)).view(-1, self.out)
        columns = torch.zeros(sum(self.parts), dtype=torch.long, device=result.device)
        result = result.index_copy(1, columns, x.reshape(-1, sum(self.parts)))
        return result.view((*x.shape[:-1], self.out)).transpose(0, 1)


def rope(x: Any, cos: Any, sin: Any) -> Any:
    half = x.size(-1) // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return ((x * cos) + (rotated * sin)).to(dtype=x.dtype)


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        dtype = x.dtype
        x = x.float()
        mean = torch.mean(x * x, dim=-1, keepdim=True)
        normed = x * torch.rsqrt(mean + 1e-5)
        return (normed * self.weight.float()).to(dtype=dtype)


def has_biases(shape: Shape) -> bool:
    return shape.is_phi or shape.has_biases


def norm_of(shape: Shape) -> Any:
    if shape.is_phi or shape.has_layer_norm:
        return nn.LayerNorm(shape.width)
    return RmsNorm(shape.width)


def capped_attention(q: Any, k: Any, v: Any) -> Any:
    """Gemma 2's: scores through a tanh, which no fused kernel of the time could do."""
    length = q.size(2)
    q = q * q.size(-1) ** -0.5
    scores = torch.tanh((q @ k.mT) / 50.0) * 50.0
    mask = torch.ones(length, length, dtype=q.dtype, device=q.device).triu(diagonal=1)
    mask.masked_fill_(mask.bool(), float("-inf"))
    scores = scores + mask
    return F.softmax(scores, dim=-1, dtype=torch.float).to(dtype=q.dtype) @ v


class Attention(nn.Module):
    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.shape = shape
        of_queries = shape.heads * shape.head
        self.attn = LoraQkv(shape, tuning, bias=has_biases(shape))
        self.proj = LoraLinear(of_queries, shape.width, tuning, bias=has_biases(shape))

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        shape = self.shape
        batch, length, _ = x.shape
        qkv = self.attn(x)
        per_key = shape.heads // shape.kv_heads
        qkv = qkv.view(batch, length, shape.kv_heads, per_key + 2, shape.head)
        qkv = qkv.permute(0, 2, 3, 1, 4)
        q, k, v = qkv.split((per_key, 1, 1), dim=2)
        if per_key > 1:
            k = k.expand(batch, shape.kv_heads, per_key, length, shape.head)
            v = v.expand(batch, shape.kv_heads, per_key, length, shape.head)
        q, k, v = (part.reshape(batch, -1, length, shape.head) for part in (q, k, v))
        turned = cos.size(-1)
        q_roped = rope(q[..., :turned], cos, sin)
        k_roped = rope(k[..., :turned], cos, sin)
        q = torch.cat((q_roped, q[..., turned:]), dim=-1)
        k = torch.cat((k_roped, k[..., turned:]), dim=-1)
        if shape.softcap:
            out = capped_attention(q, k, v)
        else:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out.transpose(1, 2).reshape(batch, length, shape.heads * shape.head)
        return self.proj(out)


class Mlp(nn.Module):
    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.is_gated = shape.mlp == "gated" if shape.mlp else not shape.is_phi
        self.fc_1 = LoraLinear(shape.width, shape.ffn, tuning, bias=has_biases(shape))
        if self.is_gated:
            self.fc_2 = LoraLinear(shape.width, shape.ffn, tuning, bias=False)
        self.proj = LoraLinear(shape.ffn, shape.width, tuning, bias=has_biases(shape))

    def forward(self, x: Any) -> Any:
        if not self.is_gated:
            x = self.fc_1(x)
            return self.proj(F.gelu(x, approximate="tanh"))
        gate, up = self.fc_1(x), self.fc_2(x)
        return self.proj(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.is_parallel = shape.is_phi or shape.is_parallel
        is_shared = self.is_parallel and (shape.is_phi or not shape.has_own_norms)
        self.norm_1, self.norm_2 = norm_of(shape), None if is_shared else norm_of(shape)
        self.attn, self.mlp = Attention(shape, tuning), Mlp(shape, tuning)
        self.has_post_norms = shape.softcap
        if self.has_post_norms:
            self.post_attention_norm, self.post_mlp_norm = norm_of(shape), norm_of(shape)

    def forward(self, x: Any, cos: Any, sin: Any) -> Any:
        normed = self.norm_1(x)
        attended = self.attn(normed, cos, sin)
        if self.is_parallel:
            normed = normed if self.norm_2 is None else self.norm_2(x)
            return self.mlp(normed) + attended + x
        if self.has_post_norms:
            attended = self.post_attention_norm(attended)
        x = attended + x
        assert self.norm_2 is not None
        out = self.mlp(self.norm_2(x))
        return (self.post_mlp_norm(out) if self.has_post_norms else out) + x


class Gpt(nn.Module):
    cos: Any
    sin: Any

    def __init__(self, shape: Shape, tuning: Tuning) -> None:
        super().__init__()
        self.wte = nn.Embedding(shape.vocabulary, shape.width)
        self.h = nn.ModuleList(Block(shape, tuning) for _ in range(shape.layers))
        self.ln_f = norm_of(shape)
        self.softcap = shape.softcap
        self.lm_head = LoraLinear(shape.width, shape.vocabulary, tuning, bias=shape.is_phi)
        share = (0.5 if shape.is_phi else 1.0) if shape.rotary is None else shape.rotary
        turned = int(shape.head * share)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(shape.positions, turned))
        if tuning.rank:
            for name, parameter in self.named_parameters():
                parameter.requires_grad_("lora_" in name)

    def forward(self, tokens: Any, chunk: int = 0) -> Any:
        length = tokens.size(1)
        cos, sin = self.cos[:length], self.sin[:length]
        x = self.wte(tokens)
        for block in self.h:
            x = block(x, cos, sin)
        x = self.ln_f(x)
        if chunk:
            return [self._logits(part) for part in x.split(chunk, dim=1)]
        return self._logits(x)

    def _logits(self, x: Any) -> Any:
        logits = self.lm_head(x)
        return torch.tanh(logits / 30.0) * 30.0 if self.softcap else logits


def cross_entropy(logits: Any, targets: Any) -> Any:
    """chunked_cross_entropy."""
    if isinstance(logits, list):
        parts = [part.reshape(-1, part.size(-1)) for part in logits]
        of_parts = [part.reshape(-1) for part in targets.split(logits[0].size(1), dim=1)]
    else:
        parts = list(logits.reshape(-1, logits.size(-1)).split(_CHUNK))
        of_parts = list(targets.reshape(-1).split(_CHUNK))
    pairs = zip(parts, of_parts, strict=True)
    losses = [F.cross_entropy(part, of_part, reduction="none") for part, of_part in pairs]
    return torch.cat(losses).mean()


class Loop:
    """The names of the training loop. `logits` lives until it is bound anew."""

    logits: Any = None

    def __init__(self, tuning: Tuning) -> None:
        self.tuning = tuning

    def loss(self, model: Any, batch: Any) -> Any:
        if self.tuning.rank:
            self.logits = logits = [part.float() for part in model(batch["tokens"], _CHUNK)]
            logits[-1] = logits[-1][..., :-1, :]
            return cross_entropy(logits, batch["labels"][..., 1:])
        self.logits = model(batch["tokens"]).float()
        return cross_entropy(self.logits[..., :-1, :], batch["labels"][..., 1:])


def workload(
    shape: Shape, tuning: Tuning, length: int, batch_size: int, *, longest_first: bool = False
) -> Workload:
    """With `longest_first`, only the first batch has the length, and the others are usual ones."""
    loop = Loop(tuning)
    seen: list[int] = []

    def batch(n: int) -> dict[str, Any]:
        size = _USUAL_LENGTH if longest_first and seen else length
        seen.append(size)
        return {name: torch.zeros(n, size, dtype=torch.long) for name in ("tokens", "labels")}

    return Workload(
        model=lambda: made_in(torch.bfloat16, lambda: Gpt(shape, tuning)),
        batch=batch,
        loss=loop.loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=2e-4),
        batch_size=batch_size,
    )
