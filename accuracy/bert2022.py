"""BERT-large, its optimizers and its loop as transformers and torch had them in January 2022.

What differs from today and is worth memory: softmax kept its input beside its output for backward
(pytorch#64000, mended by #66018 in torch 1.11), the additive mask was fp32 under autocast, the
optimizers went tensor by tensor, zero_grad kept the gradients, checkpointing was reentrant.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

HIDDEN, HEADS, LAYERS, FFN, VOCABULARY, POSITIONS = 1024, 16, 24, 4096, 30522, 512


class OldSoftmax(torch.autograd.Function):
    """Over the last dimension; saves input and output."""

    @staticmethod
    def forward(context: Any, scores: Any) -> Any:
        out = torch.ops.aten._softmax(scores, -1, False)
        context.save_for_backward(scores, out)
        return out

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        scores, out = context.saved_tensors
        return torch.ops.aten._softmax_backward_data(gradients[0], out, -1, scores.dtype)


def old_softmax(scores: Any) -> Any:
    is_low = torch.is_autocast_enabled("cuda") and scores.dtype == torch.float16
    return OldSoftmax.apply(scores.float() if is_low else scores)


def old_gelu(x: Any) -> Any:
    """autocast ran it in fp32 then: KERNEL(ADD_NS(gelu), ..., fp32) in its autocast_mode.cpp."""
    is_low = torch.is_autocast_enabled("cuda") and x.dtype == torch.float16
    return F.gelu(x.float() if is_low else x)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.output = nn.Linear(HIDDEN, HIDDEN)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN, 1e-12), nn.LayerNorm(HIDDEN, 1e-12)
        self.up, self.down = nn.Linear(HIDDEN, FFN), nn.Linear(FFN, HIDDEN)
        self.drop1, self.drop2, self.drop3 = (nn.Dropout(0.1) for _ in range(3))

    def heads(self, x: Any) -> Any:
        return x.view(*x.shape[:2], HEADS, HIDDEN // HEADS).permute(0, 2, 1, 3)

    def forward(self, x: Any, mask: Any) -> Any:
        q = self.heads(self.query(x))
        k, v = self.heads(self.key(x)), self.heads(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2))
        scores = scores / (HIDDEN // HEADS) ** 0.5
        scores = scores + mask
        weights = self.drop1(old_softmax(scores))
        context = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        context = context.view(*x.shape[:2], HIDDEN)
        x = self.norm1(self.drop2(self.output(context)) + x)
        return self.norm2(self.drop3(self.down(old_gelu(self.up(x)))) + x)


class Bert(nn.Module):
    position_ids: torch.Tensor
    type_ids: torch.Tensor

    def __init__(self, *, checkpointing: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.positions = nn.Embedding(POSITIONS, HIDDEN)
        self.types = nn.Embedding(2, HIDDEN)
        self.norm, self.drop = nn.LayerNorm(HIDDEN, 1e-12), nn.Dropout(0.1)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.pooler, self.drop_out = nn.Linear(HIDDEN, HIDDEN), nn.Dropout(0.1)
        self.classifier = nn.Linear(HIDDEN, 2)
        self.register_buffer("position_ids", torch.arange(POSITIONS).expand((1, -1)))
        self.register_buffer("type_ids", torch.zeros(1, POSITIONS, dtype=torch.long))
        self.checkpointing = checkpointing

    def forward(self, input_ids: Any, labels: Any) -> Any:
        batch, length = input_ids.shape
        mask = torch.ones((batch, length), device=input_ids.device)
        types = self.type_ids[:, :length].expand(batch, length)
        mask = (1.0 - mask[:, None, None, :]) * -10000.0
        x = self.words(input_ids) + self.types(types)
        x = x + self.positions(self.position_ids[:, :length])
        x = self.drop(self.norm(x))
        for layer in self.layers:
            if self.checkpointing:
                from torch.utils.checkpoint import checkpoint

                x = checkpoint(layer, x, mask, use_reentrant=True)
            else:
                x = layer(x, mask)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        logits = self.classifier(self.drop_out(pooled))
        return F.cross_entropy(logits.view(-1, 2), labels.view(-1))


class LoopAdamW(torch.optim.Optimizer):
    """transformers.AdamW of 2022: one tensor at a time."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                    state["exp_avg_sq"] = torch.zeros_like(p)
                state["exp_avg"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                denominator = state["exp_avg_sq"].sqrt().add_(1e-8)
                p.addcdiv_(state["exp_avg"], denominator, value=-1e-4)


class LoopAdafactor(torch.optim.Optimizer):
    """transformers.Adafactor as the Trainer sets it: no first moment, no relative step."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p)

    def _update(self, p: Any) -> None:
        state, grad = self.state[p], p.grad
        if not state:
            if p.dim() > 1:
                state["row"] = torch.zeros(p.shape[:-1], device=p.device)
                state["col"] = torch.zeros(p.shape[:-2] + p.shape[-1:], device=p.device)
            else:
                state["exp_avg_sq"] = torch.zeros_like(grad)
        state["RMS"] = p.norm(2) / p.numel() ** 0.5
        update = (grad**2) + 1e-30
        if p.dim() > 1:
            state["row"].mul_(0.9).add_(update.mean(dim=-1), alpha=0.1)
            state["col"].mul_(0.9).add_(update.mean(dim=-2), alpha=0.1)
            row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
            update = torch.mul(row, state["col"].unsqueeze(-2).rsqrt())
            update.mul_(grad)
        else:
            state["exp_avg_sq"].mul_(0.9).add_(update, alpha=0.1)
            update = state["exp_avg_sq"].rsqrt().mul_(grad)
        update.div_((update.norm(2) / update.numel() ** 0.5 / 1.0).clamp_(min=1.0))
        update.mul_(5e-5)
        p.add_(-update)


class Adam8bit(torch.optim.Optimizer):
    """bitsandbytes' Adam8bit: two bytes of state a parameter and a scale per 2048 of them; tensors
    under 4096 elements keep 32-bit state. (The page speaks of 32-bit state for embeddings, too; its
    figures are those without it.) The update is one kernel without temporaries."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # noqa: ARG002
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                p.add_(p.grad)  # stands for the traffic of the one kernel; takes no memory
                if state:
                    continue
                is_small = p.numel() < 4096
                dtype = torch.float32 if is_small else torch.uint8
                state["state1"] = torch.zeros_like(p, dtype=dtype)
                state["state2"] = torch.zeros_like(p, dtype=dtype)
                if not is_small:
                    blocks = -(-p.numel() // 2048)
                    state["absmax1"] = torch.zeros(blocks, device=p.device)
                    state["absmax2"] = torch.zeros(blocks, device=p.device)
