"""Llama and data parallelism as nanotron has them, on one rank.

huggingface/nanotron, January 2025: models/llama.py, optim/gradient_accumulator.py, optim/zero.py,
parallel/tensor_parallel/functional.py. Weights and activations are bf16. Gradients are added up in
one fp32 buffer after each backward; an fp32 copy of the weights and AdamW's state are whole
(ZeRO-0) or one part of as many as there are ranks (ZeRO-1). DDP holds a copy of all gradients in
its buckets (gradient_as_bucket_view is off), and with ZeRO-1
both gradients and weights are copied together to be sent. Activations have the sequence first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy.shapes import Shape
from oomph.records.workload import Workload
from oomph.units import MIB

# torch/nn/parallel/distributed.py: bucket_cap_mb as delivered, and broadcast_bucket_size
_BUCKET_BYTES, _BROADCAST_BYTES = 25 * MIB, 250 * MIB


class Rotary(torch.autograd.Function):
    """flash-attn's kernel: keeps nothing of its input, writes a new tensor or over the old one."""

    @staticmethod
    def forward(context: Any, x: Any, over: bool) -> Any:
        context.over = over
        if over:
            context.mark_dirty(x)
            return x
        return torch.empty_like(x)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        return gradient if context.over else torch.empty_like(gradient), None


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv_proj = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Any) -> Any:
        qkv = self.qkv_proj(x)
        length, batch, width = x.shape
        by_heads = qkv.view(length, batch, 3, self.heads, width // self.heads)
        q, k, v = by_heads.permute(2, 1, 0, 3, 4).contiguous()
        kv = torch.cat([k.unsqueeze(0), v.unsqueeze(0)], dim=0)
        kv = kv.permute(1, 2, 0, 3, 4).contiguous()
        q = Rotary.apply(q, False)
        kv = Rotary.apply(kv, True)
        k, v = (part.squeeze(2) for part in torch.split(kv, 1, dim=2))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        out = out.contiguous().view(batch, length, width).transpose(0, 1)
        return self.o_proj(out)


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(shape.width, 2 * shape.ffn, bias=False)
        self.down_proj = nn.Linear(shape.ffn, shape.width, bias=False)

    def forward(self, x: Any) -> Any:
        merged = self.gate_up_proj(x)
        gate, up = torch.split(merged, merged.shape[-1] // 2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        # Triton's norm saves what torch's fused one saves: the input and a figure per row.
        self.input_layernorm = nn.RMSNorm(shape.width)
        self.attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.width)
        self.mlp = Mlp(shape)

    def forward(self, x: Any) -> Any:
        residual = x
        x = self.input_layernorm(x)
        x = self.attn(x)
        x = x + residual
        residual = x
        x = self.post_attention_layernorm(x)
        x = self.mlp(x)
        return x + residual


class ShardedCrossEntropy(torch.autograd.Function):
    """The logits less their maximum are a copy, which becomes softmax, which becomes gradient."""

    @staticmethod
    def forward(context: Any, logits: Any, target: Any) -> Any:
        most = torch.max(logits, dim=-1)[0]
        logits = logits - most.unsqueeze(-1)
        target = target.reshape(-1).clone()
        flat = logits.view(-1, logits.shape[-1])
        places = torch.arange(flat.shape[0], device=flat.device)
        predicted = flat[places, target].view_as(most)
        exponents = torch.exp_(logits)
        total = exponents.sum(dim=-1)
        loss = torch.log(total) - predicted
        exponents.div_(total.unsqueeze(-1))
        context.save_for_backward(exponents, target)
        return loss

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        softmax, target = context.saved_tensors
        flat = softmax.view(-1, softmax.shape[-1])
        places = torch.arange(flat.shape[0], device=flat.device)
        flat.index_put_((places, target), flat[places, target] - 1.0)
        softmax.mul_(gradients[0].unsqueeze(-1))
        return softmax, None


class Llama(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(shape.vocabulary, shape.width)
        self.decoder = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.final_layer_norm = nn.RMSNorm(shape.width)

    def logits(self, tokens: Any) -> Any:
        x = self.token_embedding(tokens.transpose(0, 1))
        for layer in self.decoder:
            x = layer(x)
        x = self.final_layer_norm(x)
        logits = F.linear(x, self.token_embedding.weight)
        return logits.float()

    def forward(self, tokens: Any, labels: Any, mask: Any) -> Any:
        logits = self.logits(tokens)
        labels = labels.transpose(0, 1).contiguous()
        loss = ShardedCrossEntropy.apply(logits, labels).transpose(0, 1)
        return (loss * mask).sum(dtype=torch.float) / mask.sum()


class Optimizer:
    """FP32GradientAccumulator, AdamW on its fp32 weights, and what DDP and ZeRO-1 take."""

    def __init__(self, parameters: Any, num_ranks: int, *, is_sharded: bool) -> None:
        self.weights = list(parameters)
        self.num_ranks, self.is_sharded = num_ranks, is_sharded and num_ranks > 1
        self.syncs = False
        if num_ranks > 1:
            self._wrap()
        count = sum(weight.numel() for weight in self.weights)
        self.gradients = torch.zeros(count, dtype=torch.float32, device="cuda")
        parts = num_ranks if self.is_sharded else 1
        own = torch.empty(-(-count // parts), dtype=torch.float32, device="cuda")
        self.masters: list[Any] = []
        start = 0
        for weight in self.weights:
            size = -(-weight.numel() // parts)
            self.masters.append(own[start : start + size])
            start += size
        self.inner = torch.optim.AdamW(self.masters, lr=1e-4, fused=True)

    def _wrap(self) -> None:
        """DistributedDataParallel: the weights are broadcast, then the buckets are made."""
        for part in _parts(self.weights, _BROADCAST_BYTES):
            torch.empty(sum(weight.numel() for weight in part), dtype=torch.bfloat16, device="cuda")
        self.buckets = []
        for bucket in _parts(self.weights[::-1], _BUCKET_BYTES):
            size = sum(weight.numel() for weight in bucket)
            self.buckets.append(torch.empty(size, dtype=torch.bfloat16, device="cuda"))
            missing = {id(weight) for weight in bucket}
            for weight in bucket:
                weight.register_post_accumulate_grad_hook(self._when_ready(missing, size))

    def _when_ready(self, bucket: set[int], size: int) -> Any:
        missing = set(bucket)

        def note(weight: Any) -> None:
            missing.discard(id(weight))
            if not missing:
                missing.update(bucket)
                if self.syncs and self.is_sharded:
                    self._reduce_scatter(size)

        return note

    def _reduce_scatter(self, size: int) -> None:
        """distributed.py, reduce_scatter_coalesced: the parts are copied together, twice.

        Once by nanotron, and once more by ProcessGroupNCCL, which wants one buffer. When NCCL has
        done with them is not known here: they are taken to be given back at once.
        """
        part = -(-size // self.num_ranks)
        taken = [torch.empty(part, device="cuda") for _ in range(self.num_ranks + 1)]
        taken.append(torch.empty(part * self.num_ranks, device="cuda"))

    def _all_gather(self) -> None:
        """zero.py after the step: all_gather_coalesced, with the same two copies."""
        part = sum(master.numel() for master in self.masters)
        low: Any = {"dtype": torch.bfloat16, "device": "cuda"}
        taken = [torch.empty(part, **low) for _ in range(self.num_ranks + 1)]
        taken.append(torch.empty(part * self.num_ranks, **low))

    @property
    def state(self) -> Any:
        return self.inner.state

    def zero_grad(self, **_: Any) -> None:
        self.gradients.zero_()

    def add_up(self) -> None:
        """After each backward: the bf16 gradients go into the fp32 buffer."""
        start = 0
        for weight in self.weights:
            if weight.grad is not None:
                self.gradients[start : start + weight.numel()].add_(weight.grad.view(-1))
                weight.grad = None
            start += weight.numel()

    def step(self) -> None:
        self.add_up()
        start = 0
        for master, weight in zip(self.masters, self.weights, strict=True):
            master.grad = self.gradients[start : start + master.numel()]
            start += weight.numel()
        norms = torch.stack([torch.linalg.vector_norm(master.grad) for master in self.masters])
        coefficient = torch.clamp(1.0 / (torch.linalg.vector_norm(norms) + 1e-6), max=1.0)
        for master in self.masters:
            master.grad.mul_(coefficient)
        self.inner.step()
        if self.is_sharded:
            self._all_gather()


def _parts(weights: Any, limit_bytes: int) -> list[list[Any]]:
    """As many weights together as reach the limit."""
    parts: list[list[Any]] = [[]]
    for weight in weights:
        if sum(each.numel() * each.element_size() for each in parts[-1]) >= limit_bytes:
            parts.append([])
        parts[-1].append(weight)
    return parts


def workload(
    shape: Shape, length: int, batch_size: int, num_ranks: int, *, is_sharded: bool
) -> Workload:
    kept: list[Optimizer] = []

    def optimizer(parameters: Any) -> Any:
        kept.append(Optimizer(parameters, num_ranks, is_sharded=is_sharded))
        return kept[0]

    def loss(model: Any, batch: Any) -> Any:
        kept[0].add_up()  # of the micro-batch before: nothing is allocated in between
        kept[0].syncs = not kept[0].syncs  # of the two that are traced, the last
        return model(**batch)

    def batch(n: int) -> dict[str, Any]:
        tokens = {name: torch.zeros(n, length, dtype=torch.long) for name in ("tokens", "labels")}
        return {**tokens, "mask": torch.ones(n, length, dtype=torch.bool)}

    return Workload(
        model=lambda: Llama(shape).to(torch.bfloat16),
        batch=batch,
        loss=loss,
        optimizer=optimizer,
        batch_size=batch_size,
    )
