"""Linear layers in four bits, as bitsandbytes has them: Linear4bit and its MatMul4Bit.

A weight of n numbers is n / 2 bytes, with one fp32 figure for each 64 of them; doubly quantised,
that figure is one byte and has its own fp32 figure for each 256. Each call makes the whole weight
anew. Until 0.43.2 two things took more (`is_old`): the input was kept for backward without need
(https://github.com/bitsandbytes-foundation/bitsandbytes/releases/tag/0.43.2), and weights were
quantised from fp16 (Params4bit.cuda), so that bf16 was made by way of a copy in fp16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

_BLOCK, _OUTER_BLOCK = 64, 256


class MatMul4Bit(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any, layer: Any, bias: Any) -> Any:
        context.layer = layer
        context.kept = x if layer.is_old else None
        return F.linear(x, layer.whole(x.dtype), bias)

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        gradient = gradients[0]
        return torch.matmul(gradient, context.layer.whole(gradient.dtype)), None, None


class Linear4bit(nn.Module):
    absmax: Any

    def __init__(
        self,
        width: int,
        out: int,
        *,
        bias: bool,
        double: bool = False,
        is_old: bool = False,
        compute_dtype: Any = None,
    ) -> None:
        super().__init__()
        self.compute_dtype = compute_dtype
        self.shape, self.is_old, self.is_double = (out, width), is_old, double
        count = width * out
        self.register_buffer("packed", torch.empty(count // 2, dtype=torch.uint8))
        scales = count // _BLOCK
        self.register_buffer(
            "absmax", torch.empty(scales, dtype=torch.uint8 if double else torch.float32)
        )
        if double:
            outer = torch.empty(-(-scales // _OUTER_BLOCK), dtype=torch.float32)
            self.register_buffer("outer", outer)
        self.register_buffer("code", torch.empty(16, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(out), requires_grad=False) if bias else None

    def whole(self, dtype: Any) -> Any:
        """dequantize_4bit; doubly quantised scales are made fp32 first."""
        scales = torch.empty(self.absmax.shape, device="cuda") if self.is_double else None
        made = torch.float16 if self.is_old else dtype
        weight = torch.empty(self.shape, dtype=made, device="cuda")
        del scales
        return weight.to(dtype)

    def forward(self, x: Any) -> Any:
        return self._product(x.to(self.compute_dtype or x.dtype)).to(x.dtype)

    def _product(self, x: Any) -> Any:
        if not torch.is_grad_enabled() or not x.requires_grad:
            return F.linear(x, self.whole(x.dtype), self.bias)
        return MatMul4Bit.apply(x, self, self.bias)
