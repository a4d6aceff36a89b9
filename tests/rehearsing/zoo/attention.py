"""Models with attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.into = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Any, is_causal: bool = False) -> Any:
        b, s, d = x.shape
        q, k, v = self.into(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class TransformerBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm, self.other_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.other_norm(x))


class Vit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 16, 4, 4)
        self.first = nn.Parameter(torch.zeros(1, 1, 16))
        self.places = nn.Parameter(torch.zeros(1, 17, 16))
        self.blocks = nn.Sequential(*[TransformerBlock(16, 2) for _ in range(2)])
        self.head = nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(len(x), -1, -1), x], 1) + self.places
        return self.head(self.blocks(x)[:, 0])


class DiffusionBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(4, width), nn.Conv2d(width, width, 3, padding=1)
        self.time = nn.Linear(16, 2 * width)
        self.attention = Attention(width, 2)

    def forward(self, x: Any, time: Any) -> Any:
        scale, shift = self.time(F.silu(time))[:, :, None, None].chunk(2, 1)
        y = self.conv(F.silu(self.norm(x) * (1 + scale) + shift))
        x = x + y
        flat = x.flatten(2).transpose(1, 2)
        return x + self.attention(flat).transpose(1, 2).reshape(x.shape)


class Diffusion(nn.Module):
    """A denoising U-Net with an embedding of time and attention."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(8, 16), nn.SiLU(), nn.Linear(16, 16))
        self.into, self.out = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)
        self.blocks = nn.ModuleList([DiffusionBlock(8) for _ in range(3)])
        self.down, self.up = nn.Conv2d(8, 8, 3, 2, 1), nn.ConvTranspose2d(16, 8, 2, 2)

    def forward(self, x: Any, t: Any) -> Any:
        noise = torch.randn_like(x)
        angles = t[:, None] * torch.exp(-torch.arange(4, device=x.device) / 4)
        time = self.time(torch.cat([angles.sin(), angles.cos()], -1).to(x.dtype))
        y = self.blocks[0](self.into(x + noise), time)
        low = self.blocks[1](self.down(y), time)
        low = self.blocks[2](low, time)
        y = self.up(torch.cat([low, self.down(y)], 1)) + y
        return F.mse_loss(self.out(y), noise)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True)
        self.stack = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 50)

    def forward(self, x: Any) -> Any:
        y = self.head(self.stack(self.table(x)))
        return F.cross_entropy(y.flatten(0, 1), x.flatten())


class Seq2Seq(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.stack = nn.Transformer(16, 2, 2, 2, 32, 0.0, batch_first=True)

    def forward(self, x: Any) -> Any:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        y = self.stack(self.table(x), self.table(x.flip(1)), tgt_mask=mask)
        return F.cross_entropy((y @ self.table.weight.t()).flatten(0, 1), x.flatten())
