"""Adapters beside frozen linear layers, as huggingface/peft has them, in fp32 or as asked.

peft/tuners: lora/layer.py, adalora/layer.py, delora/layer.py, gralora/layer.py. Adapters are fp32
where the model is bf16 (autocast_adapter_dtype): their input is cast, and so saved, in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812


class Lora(nn.Module):
    def __init__(self, base: Any, rank: int, *, dropout: float = 0.0, dtype: Any = None) -> None:
        super().__init__()
        out, width = _shape_of(base)
        self.base_layer = base
        self.lora_A = nn.Linear(width, rank, bias=False, dtype=dtype or torch.float32)
        self.lora_B = nn.Linear(rank, out, bias=False, dtype=dtype or torch.float32)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Any) -> Any:
        result = self.base_layer(x)
        dtype = result.dtype
        x = x.to(self.lora_A.weight.dtype)
        result = result + self.lora_B(self.lora_A(self.dropout(x))) * 2.0
        return result.to(dtype)


class AdaLora(nn.Module):
    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        out, width = _shape_of(base)
        self.base_layer = base
        self.lora_A = nn.Parameter(torch.empty(rank, width))
        self.lora_E = nn.Parameter(torch.empty(rank, 1))
        self.lora_B = nn.Parameter(torch.empty(out, rank))

    def forward(self, x: Any) -> Any:
        result = self.base_layer(x)
        x = x.to(torch.float32)
        result += (x @ (self.lora_A * self.lora_E).T @ self.lora_B.T) * 2.0
        return result

    def regularisation(self) -> Any:
        """Of the orthogonality of both factors: what AdaLoraModel.forward adds to the loss."""
        found: Any = 0.0
        for product in (self.lora_A @ self.lora_A.T, self.lora_B.T @ self.lora_B):
            unit = torch.eye(*product.size(), out=torch.empty_like(product))
            unit.requires_grad = False
            found = found + torch.norm(product - unit, p="fro")
        return found


class DeLora(nn.Module):
    norm: Any

    def __init__(self, base: Any, rank: int) -> None:
        super().__init__()
        out, width = _shape_of(base)
        self.base_layer, self.rank = base, rank
        self.delora_A = nn.Parameter(torch.empty(rank, width))
        self.delora_B = nn.Parameter(torch.empty(out, rank))
        self.delora_lambda = nn.Parameter(torch.empty(1))
        self.register_buffer("norm", torch.empty(width))

    def forward(self, x: Any) -> Any:
        result = self.base_layer(x)
        added = torch.zeros_like(result)
        low = F.linear(x.to(torch.float32) * self.norm, self.delora_A)
        of_a = torch.clamp(self.delora_A.norm(dim=1), min=1e-4)
        of_b = torch.clamp(self.delora_B.norm(dim=0), min=1e-4)
        low = low * ((self.delora_lambda / self.rank) / (of_a * of_b))
        added += F.linear(low, self.delora_B)
        return result + added.to(result.dtype)


class GraLora(nn.Module):
    def __init__(self, base: Any, rank: int, parts: int = 2) -> None:
        super().__init__()
        out, width = _shape_of(base)
        self.base_layer, self.rank, self.parts = base, rank, parts
        self.gralora_A = nn.Parameter(torch.empty(parts, width // parts, rank))
        self.gralora_B = nn.Parameter(torch.empty(parts, rank, out // parts))

    def forward(self, x: Any) -> Any:
        result = self.base_layer(x)
        batch, length, width = x.shape
        parts, rank = self.parts, self.rank
        by_parts = x.to(torch.float32).view(batch, length, parts, width // parts)
        low = torch.einsum("blni, nir -> blnr", by_parts, self.gralora_A)
        low = low.view(batch, length, parts, parts, rank // parts).permute(0, 1, 3, 2, 4)
        low = low.reshape(batch, length, parts, rank)
        out = torch.einsum("bljr, jro -> bljo", low, self.gralora_B).reshape(batch, length, -1)
        result += 2.0 * out.to(result.dtype)
        return result


def _shape_of(base: Any) -> tuple[int, int]:
    return base.shape if hasattr(base, "shape") else tuple(base.weight.shape)


def put_beside(model: Any, names: tuple[str, ...], make: Any) -> None:
    """Freeze a model, and put an adapter beside each layer of these names."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if name in names:
                setattr(module, name, make(child))
