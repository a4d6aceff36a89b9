"""GPT-2 and GPT-Neo as transformers 4.51.3 has them, down to which tensors live how long.

GPT-2 takes scaled_dot_product_attention, GPT-Neo has no such branch and multiplies by hand. Both
return their keys and values, as use_cache is on by default: whoever keeps the outputs keeps them.
Batches of wikitext are padded, so the mask is never left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

HIDDEN, HEADS, LAYERS, VOCABULARY = 768, 12, 12, 50257
_SLOPE = math.sqrt(2.0 / math.pi)
# Of the models' cards.
PARAMETERS = {"gpt2": 124_439_808, "gpt-neo-125m": 125_198_592}


@dataclass
class Outputs:
    loss: Any
    logits: Any
    past_key_values: Any


class TransposedLinear(nn.Module):
    """Conv1D of transformers: a linear layer with its weight the other way round."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Any) -> Any:
        out = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return out.view(*x.shape[:-1], out.size(-1))


def gelu_new(x: Any) -> Any:
    """By its formula, in this very order: each step of it is a tensor, and most are saved."""
    return 0.5 * x * (1.0 + torch.tanh(_SLOPE * (x + 0.044715 * torch.pow(x, 3.0))))


def by_heads(x: Any) -> Any:
    return x.view(*x.shape[:-1], HEADS, HIDDEN // HEADS).transpose(1, 2)


# ---- masks: causal and padded, fp32, one for all heads ---------------------------------------

_LEAST = torch.finfo(torch.float32).min


def gpt2_mask(mask: Any) -> Any:
    """_prepare_4d_causal_attention_mask_for_sdpa, of a batch in which something is padded."""
    torch.all(mask == 1)  # it is asked whether the mask can be left out
    padded = _causal_and_padded(mask)
    return padded.mul(~torch.all(padded == _LEAST, dim=-1, keepdim=True))


def _causal_and_padded(mask: Any) -> Any:
    shape = (mask.size(0), 1, mask.size(1), mask.size(1))
    causal = _triangle(mask).expand(shape)
    padded = _padding(mask, shape)
    return causal.masked_fill(padded.bool(), _LEAST)


def _triangle(mask: Any) -> Any:
    length = mask.size(1)
    causal = torch.full((length, length), _LEAST, device=mask.device)
    places = torch.arange(length, device=mask.device)
    causal.masked_fill_(places < (places + 1).view(length, 1), 0)
    return causal[None, None]


def _padding(mask: Any, shape: tuple[int, ...]) -> Any:
    expanded = mask[:, None, None, :].expand(shape).to(torch.float32)
    inverted = 1.0 - expanded
    return inverted.masked_fill(inverted.to(torch.bool), _LEAST)


def gpt_neo_mask(mask: Any, places: Any) -> Any:
    """_prepare_4d_causal_attention_mask_with_cache_position."""
    length = mask.size(1)
    full = torch.full((length, length), _LEAST, device=mask.device)
    full = torch.triu(full, diagonal=1)
    full *= torch.arange(length, device=mask.device) > places.reshape(-1, 1)
    full = full[None, None].expand(mask.size(0), 1, -1, -1)
    full = full.clone()
    is_padding = full[:, :, :, :length] + mask[:, None, None, :]
    is_padding = is_padding == 0
    full[:, :, :, :length] = full[:, :, :, :length].masked_fill(is_padding, _LEAST)
    return full


# ---- attention -------------------------------------------------------------------------------


class Gpt2Attention(nn.Module):
    positions = 1024

    def __init__(self, layer: int) -> None:  # noqa: ARG002 - all layers are alike
        super().__init__()
        square = torch.ones(self.positions, self.positions, dtype=torch.bool)
        self.register_buffer("bias", torch.tril(square).view(1, 1, *square.shape))
        self.register_buffer("masked_bias", torch.tensor(-1e4))
        self.c_attn = TransposedLinear(HIDDEN, 3 * HIDDEN)
        self.c_proj = TransposedLinear(HIDDEN, HIDDEN)
        self.resid_dropout = nn.Dropout(0.1)

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = (by_heads(part) for part in self.c_attn(x).split(HIDDEN, dim=2))
        present = (k, v)
        out = F.scaled_dot_product_attention(
            q.contiguous(), k.contiguous(), v.contiguous(), attn_mask=mask, dropout_p=0.1
        )
        out = out.transpose(1, 2).contiguous()
        out = out.reshape(*out.shape[:-2], -1).contiguous()
        return self.resid_dropout(self.c_proj(out)), present


class GptNeoAttention(nn.Module):
    positions, window = 2048, 256
    bias: Any

    def __init__(self, layer: int) -> None:
        super().__init__()
        square = torch.ones(self.positions, self.positions, dtype=torch.bool)
        bias = torch.tril(square).view(1, 1, *square.shape)
        if layer % 2:  # every second one sees only a window
            bias = torch.bitwise_xor(bias, torch.tril(bias, -self.window))
        self.register_buffer("bias", bias)
        self.register_buffer("masked_bias", torch.tensor(-1e9))
        self.k_proj, self.v_proj, self.q_proj = (
            nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(3)
        )
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: Any, mask: Any) -> Any:
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q, k, v = by_heads(q), by_heads(k), by_heads(v)
        out = self._attend(q, k, v, mask)
        out = out.transpose(1, 2).contiguous().view(*x.shape)
        return self.out_proj(out), (k, v)

    def _attend(self, q: Any, k: Any, v: Any, mask: Any) -> Any:
        weights = torch.matmul(q, k.transpose(-1, -2))
        length = q.size(-2)
        causal = self.bias[:, :, :length, :length]
        least = torch.tensor(_LEAST, dtype=weights.dtype, device=weights.device)
        weights = torch.where(causal, weights, least)
        weights = weights + mask[:, :, :, :length]
        weights = F.softmax(weights, dim=-1)
        return torch.matmul(weights, v)


# ---- the model -------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, linear: Any, dropout: float) -> None:
        super().__init__()
        self.c_fc, self.c_proj = linear(HIDDEN, 4 * HIDDEN), linear(4 * HIDDEN, HIDDEN)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        x = self.c_fc(x)
        x = gelu_new(x)
        x = self.c_proj(x)
        return self.dropout(x)


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2 = nn.LayerNorm(HIDDEN), attention, nn.LayerNorm(HIDDEN)
        self.mlp = mlp

    def forward(self, x: Any, mask: Any) -> Any:
        residual = x
        x = self.ln_1(x)
        attended, present = self.attn(x, mask)
        x = attended + residual
        residual = x
        x = self.ln_2(x)
        fed = self.mlp(x)
        x = residual + fed
        return x, present


class Gpt(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.is_gpt2 = name == "gpt2"
        linear: Any = TransposedLinear if self.is_gpt2 else nn.Linear
        attention: Any = Gpt2Attention if self.is_gpt2 else GptNeoAttention
        dropout = 0.1 if self.is_gpt2 else 0.0
        self.wte = nn.Embedding(VOCABULARY, HIDDEN)
        self.wpe = nn.Embedding(attention.positions, HIDDEN)
        self.drop = nn.Dropout(dropout)
        self.h = nn.ModuleList(
            Block(attention(layer), Mlp(linear, dropout)) for layer in range(LAYERS)
        )
        self.ln_f = nn.LayerNorm(HIDDEN)
        self.lm_head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.lm_head.weight = self.wte.weight

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Outputs:
        x, presents = self._hidden(input_ids, attention_mask)
        logits = self.lm_head(x)
        return Outputs(causal_loss(logits, labels), logits, presents)

    def _hidden(self, input_ids: Any, attention_mask: Any) -> Any:
        if self.is_gpt2:
            places = torch.arange(input_ids.size(1), device=input_ids.device)
            embedded = self.wte(input_ids)
            placed = self.wpe(places.unsqueeze(0))
            x = embedded + placed
            mask = gpt2_mask(attention_mask)
        else:
            embedded = self.wte(input_ids)
            places = torch.arange(input_ids.size(1), device=input_ids.device)
            mask = gpt_neo_mask(attention_mask, places)
            placed = self.wpe(places.unsqueeze(0))
            x = embedded + placed
        x = self.drop(x)
        presents = []
        for block in self.h:
            outputs = block(x, mask)
            x = outputs[0]
            presents.append(outputs[1])
        return self.ln_f(x), presents


def causal_loss(logits: Any, labels: Any) -> Any:
    """ForCausalLMLoss: the labels are shifted, the logits are not copied."""
    labels = F.pad(labels, (0, 1), value=-100)
    shifted = labels[..., 1:].contiguous().view(-1)
    return F.cross_entropy(logits.view(-1, VOCABULARY), shifted, ignore_index=-100)


def check_parameters() -> None:
    """Are these the published models?"""
    for name, expected in PARAMETERS.items():
        with torch.device("meta"):
            found = sum(parameter.numel() for parameter in Gpt(name).parameters())
        assert found == expected, f"{name} has {found} parameters, not {expected}"
