"""Llama 3.1 as torchtitan trained it in December 2024, eager, with FSDP2 and selective checkpoints.

torchtitan@9dec370: models/llama/model.py, models/norms.py, parallelisms/parallelize_llama.py
(_save_list, apply_fsdp), train.py. Worth memory: the norm in eager fp32, keys and values repeated
for each query head, logits in fp32 for the loss, and of each block every second matrix product kept
while all else is recomputed. What divides the model is this project's own FSDP2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import checkpoint

from accuracy.shapes import Shape
from oomph.records.workload import Workload

_PRODUCT = torch.ops.aten.mm.default
_KEPT = {
    _PRODUCT,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
}


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        upcast = x.float()
        normed = upcast * torch.rsqrt((upcast * upcast).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight


def _rotated(x: Any, turns: Any) -> Any:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = turns[: x.shape[1]].view(1, x.shape[1], 1, -1)
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        of_keys = shape.kv_heads * shape.head
        self.wq = nn.Linear(shape.width, shape.width, bias=False)
        self.wk, self.wv = (nn.Linear(shape.width, of_keys, bias=False) for _ in range(2))
        self.wo = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Any, turns: Any) -> Any:
        batch, length, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = (each.view(batch, length, -1, self.shape.head) for each in (q, k, v))
        q, k = _rotated(q, turns), _rotated(k, turns)
        k, v = self._repeated(k), self._repeated(v)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().view(batch, length, -1))

    def _repeated(self, x: Any) -> Any:
        batch, length, heads, width = x.shape
        times = self.shape.heads // heads
        expanded = x[:, :, :, None, :].expand(batch, length, heads, times, width)
        return expanded.reshape(batch, length, heads * times, width)


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(shape.width, shape.ffn, bias=False) for _ in range(2))
        self.w2 = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Any) -> Any:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention, self.feed_forward = Attention(shape), FeedForward(shape)
        self.attention_norm, self.ffn_norm = RmsNorm(shape.width), RmsNorm(shape.width)

    def forward(self, x: Any, turns: Any) -> Any:
        return checkpoint.checkpoint(
            self._run,
            x,
            turns,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=_every_second_product,
        )

    def _run(self, x: Any, turns: Any) -> Any:
        h = x + self.attention(self.attention_norm(x), turns)
        return h + self.feed_forward(self.ffn_norm(h))


def _every_second_product() -> Any:
    counts = {"forward": 0, "recompute": 0}

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> Any:
        mode = "recompute" if context.is_recompute else "forward"
        counts[mode] += op is _PRODUCT
        is_kept = op in _KEPT and not (op is _PRODUCT and counts[mode] % 2 == 0)
        choices = checkpoint.CheckpointPolicy
        return choices.MUST_SAVE if is_kept else choices.PREFER_RECOMPUTE

    return checkpoint.create_selective_checkpoint_contexts(policy)


class Transformer(nn.Module):
    freqs_cis: Any

    def __init__(self, shape: Shape, length: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(shape.vocabulary, shape.width)
        turns = torch.empty(length, shape.head // 2, dtype=torch.complex64)
        self.register_buffer("freqs_cis", turns, persistent=True)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = RmsNorm(shape.width)
        self.output = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h, self.freqs_cis)
        return self.output(self.norm(h))


def _loss(model: Any, batch: Any) -> Any:
    """The script deletes its logits before backward."""
    logits = model(batch["tokens"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["labels"].flatten(0, 1))


def workload(shape: Shape, length: int, batch_size: int) -> Workload:
    names = ("tokens", "labels")
    return Workload(
        model=lambda: Transformer(shape, length),
        batch=lambda n: {name: torch.zeros(n, length, dtype=torch.long) for name in names},
        loss=_loss,
        optimizer=functools.partial(torch.optim.AdamW, lr=3e-4, fused=True),
        batch_size=batch_size,
        clip_grad_norm=1.0,
    )
