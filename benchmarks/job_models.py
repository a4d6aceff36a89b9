"""Random training jobs: models, lengths, batches and memory, drawn by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

from oomph.records.workload import Workload

BATCH_SIZES = (24, 30, 32, 36, 48, 60)
NUM_CLASSES = 10
VOCABULARY = 512


@dataclass(frozen=True)
class Trained:
    """What is trained: a model, and batches of so many examples of a length."""

    name: str
    model: Callable[[], nn.Module]
    batch: Callable[[int, int], dict[str, Any]]  # (examples, length)
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], Any]
    batch_size: int
    lengths: tuple[int, ...]  # that batches may have, the longest last

    def workload(self) -> Workload:
        """As a careful user states it: with the longest examples."""
        return Workload(
            model=self.model,
            batch=lambda num: self.batch(num, self.lengths[-1]),
            loss=self.loss,
            optimizer=self.optimizer,
            batch_size=self.batch_size,
        )


class Attention(nn.Module):
    """By hand, with matrices of length x length, or torch's fused one."""

    def __init__(self, width: int, heads: int, *, is_fused: bool) -> None:
        super().__init__()
        self.heads, self.is_fused = heads, is_fused
        self.into, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Any) -> Any:
        b, s, d = x.shape
        q, k, v = self.into(x).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        if self.is_fused:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = ((q @ k.transpose(-1, -2)) * (d // self.heads) ** -0.5).softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(b, s, d))


class Block(nn.Module):
    def __init__(self, width: int, mixing: nn.Module) -> None:
        super().__init__()
        self.norm, self.other_norm, self.mixing = nn.LayerNorm(width), nn.LayerNorm(width), mixing
        self.first, self.second = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        x = x + self.mixing(self.norm(x))
        return x + self.second(F.gelu(self.first(self.other_norm(x))))


class Tagger(nn.Module):
    """Tokens -> a class for each, by blocks of any kind."""

    def __init__(self, width: int, mixers: Sequence[nn.Module], num_out: int) -> None:
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*[Block(width, each) for each in mixers])
        self.head = nn.Linear(width, num_out)

    def forward(self, ids: Any) -> Any:
        return self.head(self.blocks(self.table(ids)))


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Any) -> Any:
        return x + F.relu(self.conv(self.norm(x)))


class Pictures(nn.Module):
    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


def of_tokens(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def of_pictures(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def tokens(num: int, length: int) -> dict[str, Any]:
    return {
        "x": torch.randint(0, VOCABULARY, (num, length)),
        "y": torch.randint(0, NUM_CLASSES, (num, length)),
    }


def pictures(num: int, length: int) -> dict[str, Any]:
    return {"x": torch.randn(num, 3, length, length), "y": torch.randint(0, NUM_CLASSES, (num,))}


def _taggers(chance: random.Random) -> tuple[str, Callable[[], nn.Module]]:
    width, depth = chance.choice((32, 48, 64, 96)), chance.randint(1, 4)
    kind = chance.choice(("dense", "attention by hand", "fused attention"))
    num_out = chance.choice((NUM_CLASSES, 256, 1024))  # a head that is small, or most of it

    def mixer() -> nn.Module:
        if kind == "dense":
            return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.1))
        return Attention(width, 4, is_fused=kind == "fused attention")

    name = f"{kind}, {depth} x {width}, {num_out} classes"
    return name, lambda: Tagger(width, [mixer() for _ in range(depth)], num_out)


def drawn(chance: random.Random) -> Trained:
    """One of them."""
    optimizer: Callable[[Any], Any] = chance.choice(
        (torch.optim.AdamW, lambda of: torch.optim.SGD(of, lr=1e-3, momentum=0.9))
    )
    batch_size = chance.choice(BATCH_SIZES)
    if chance.random() < 0.25:
        width, depth = chance.choice((16, 32)), chance.randint(2, 5)
        longest = chance.choice((24, 32, 48))
        lengths = (longest // 2, longest * 3 // 4, longest)
        return Trained(
            f"pictures, {depth} x {width}",
            lambda: Pictures(width, depth),
            pictures,
            of_pictures,
            optimizer,
            batch_size,
            lengths,
        )
    name, model = _taggers(chance)
    longest = chance.choice((96, 128, 192, 256))
    lengths = (longest // 4, longest // 2, longest)
    return Trained(name, model, tokens, of_tokens, optimizer, batch_size, lengths)
