"""The zoo: a dozen small models in plain torch, one of each common kind, for `oomph verify --zoo`.

Each is large enough that rates show on a data-centre GPU, and reserves less than 2 GiB. "tiny" is
the same model for a CPU, which the emulated GPU computes on. A verification names these models, so
a change here changes what older files mean: give a changed model a new name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oomph.records.verification import Scale
from oomph.records.workload import Precision, Variant, Workload
from oomph.rehearsing.traces import Request

_CLASSES = 100
Loss = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class ZooModel:
    """One model of the zoo, and how it is trained."""

    make: Callable[[Scale], Workload]
    precision: Precision = "fp32"
    checkpointing: str = "none"
    accumulation: int = 1
    channels_last: bool = False

    def request(self, workload: Workload) -> Request:
        """Return what to rehearse and to train."""
        tricks = Variant(
            micro_batch=1,
            precision=self.precision,
            checkpointing=self.checkpointing,
            channels_last=self.channels_last,
        )
        return Request(tricks=tricks, micro_batch=workload.batch_size // self.accumulation)


# ---- losses, optimizers and batches --------------------------------------------------------------


def _classified(model: nn.Module, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"]), batch["y"])


def _next_token(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["x"])
    return functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


def _pictures(side: int) -> Callable[[int], dict[str, torch.Tensor]]:
    return lambda n: {"x": torch.randn(n, 3, side, side), "y": torch.randint(_CLASSES, (n,))}


def _tokens(length: int, vocabulary: int) -> Callable[[int], dict[str, torch.Tensor]]:
    def batch(n: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(vocabulary, (n, length + 1))
        return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}

    return batch


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4)


def _fused_adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-4, fused=True)


def _foreach_adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4, foreach=True)


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9)


# ---- perceptrons and embeddings ------------------------------------------------------------------


def _mlp(scale: Scale) -> Workload:
    width, batch_size = (4096, 2048) if scale == "full" else (64, 16)

    def model() -> nn.Module:
        hidden = [part for _ in range(3) for part in (nn.Linear(width, width), nn.GELU())]
        return nn.Sequential(*hidden, nn.Linear(width, _CLASSES))

    return Workload(
        model=model,
        batch=lambda n: {"x": torch.randn(n, width), "y": torch.randint(_CLASSES, (n,))},
        loss=_classified,
        optimizer=_adamw,
        batch_size=batch_size,
    )


class _Recommender(nn.Module):
    """Bags of ids, added up per example, and a perceptron."""

    def __init__(self, num_ids: int, width: int) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(num_ids, width, mode="sum")
        self.head = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 1))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.bags(ids))
        return scores.squeeze(1)


def _embedding_bag(scale: Scale) -> Workload:
    num_ids, width, batch_size = (500_000, 128, 8192) if scale == "full" else (500, 16, 32)
    return Workload(
        model=lambda: _Recommender(num_ids, width),
        batch=lambda n: {"x": torch.randint(num_ids, (n, 32)), "y": torch.rand(n).round()},
        loss=lambda model, batch: functional.binary_cross_entropy_with_logits(
            model(batch["x"]), batch["y"]
        ),
        optimizer=lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
        batch_size=batch_size,
    )


# ---- images --------------------------------------------------------------------------------------


def _convolved(given: int, made: int, stride: int = 1, groups: int = 1) -> list[nn.Module]:
    convolution = nn.Conv2d(given, made, 3, stride, padding=1, groups=groups, bias=False)
    return [convolution, nn.BatchNorm2d(made), nn.ReLU(inplace=True)]


def _head(width: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, _CLASSES)]


def _cnn(scale: Scale) -> Workload:
    width, side, batch_size = (64, 112, 64) if scale == "full" else (8, 16, 4)

    def model() -> nn.Module:
        first = _convolved(3, width) + _convolved(width, 2 * width, 2)
        return nn.Sequential(*first, *_convolved(2 * width, 4 * width, 2), *_head(4 * width))

    return Workload(
        model=model, batch=_pictures(side), loss=_classified, optimizer=_sgd, batch_size=batch_size
    )


class _Residual(nn.Module):
    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolved(given, made, stride))
        self.second = nn.Sequential(
            nn.Conv2d(made, made, 3, padding=1, bias=False), nn.BatchNorm2d(made)
        )
        self.short = nn.Conv2d(given, made, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.second(self.first(x)) + self.short(x))


def _resnet(scale: Scale) -> Workload:
    width, side, batch_size = (64, 128, 64) if scale == "full" else (8, 16, 4)

    def model() -> nn.Module:
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        blocks = [_Residual(a, b, 2) for a, b in pairwise(widths)]
        return nn.Sequential(*_convolved(3, width), *blocks, *_head(8 * width))

    return Workload(
        model=model, batch=_pictures(side), loss=_classified, optimizer=_sgd, batch_size=batch_size
    )


def _depthwise(scale: Scale) -> Workload:
    width, side, batch_size = (64, 128, 64) if scale == "full" else (8, 16, 4)

    def block(given: int, made: int, stride: int) -> list[nn.Module]:
        return [
            *_convolved(given, given, stride, groups=given),
            nn.Conv2d(given, made, 1, bias=False),
            nn.BatchNorm2d(made),
            nn.ReLU6(inplace=True),
        ]

    def model() -> nn.Module:
        blocks = block(width, 2 * width, 1) + block(2 * width, 4 * width, 2)
        return nn.Sequential(*_convolved(3, width, 2), *blocks, *_head(4 * width))

    return Workload(
        model=model,
        batch=_pictures(side),
        loss=_classified,
        optimizer=_foreach_adam,
        batch_size=batch_size,
    )


class _UNet(nn.Module):
    """Down, up, and the same resolution joined: as in segmentation and diffusion."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.top = nn.Sequential(*self._part(3, width))
        self.down = nn.Sequential(nn.MaxPool2d(2), *self._part(width, 2 * width))
        self.bottom = nn.Sequential(nn.MaxPool2d(2), *self._part(2 * width, 4 * width))
        self.rise = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.middle = nn.Sequential(*self._part(4 * width, 2 * width))
        self.rise_again = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.out = nn.Sequential(*self._part(2 * width, width), nn.Conv2d(width, 3, 1))

    @staticmethod
    def _part(given: int, made: int) -> list[nn.Module]:
        return [nn.Conv2d(given, made, 3, padding=1), nn.GroupNorm(4, made), nn.SiLU()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        top = self.top(x)
        down = self.down(top)
        middle = self.middle(torch.cat([down, self.rise(self.bottom(down))], dim=1))
        out: torch.Tensor = self.out(torch.cat([top, self.rise_again(middle)], dim=1))
        return out


def _unet(scale: Scale) -> Workload:
    width, side, batch_size = (64, 128, 16) if scale == "full" else (8, 16, 4)

    def batch(n: int) -> dict[str, torch.Tensor]:
        return {"x": torch.randn(n, 3, side, side), "y": torch.randn(n, 3, side, side)}

    return Workload(
        model=lambda: _UNet(width),
        batch=batch,
        loss=lambda model, batch: functional.mse_loss(model(batch["x"]), batch["y"]),
        optimizer=_adamw,
        batch_size=batch_size,
    )


# ---- sequences -----------------------------------------------------------------------------------


class _Block(nn.Module):
    """A transformer's block with torch's fused attention."""

    def __init__(self, width: int, num_heads: int, *, is_causal: bool) -> None:
        super().__init__()
        self.num_heads, self.is_causal = num_heads, is_causal
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        packed = self.query_key_value(self.before_attention(x))
        heads = packed.view(n, length, 3, self.num_heads, width // self.num_heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=self.is_causal)
        x = x + self.project(seen.transpose(1, 2).reshape(n, length, width))
        added: torch.Tensor = x + self.mlp(self.before_mlp(x))
        return added


class _Gpt(nn.Module):
    """A language model whose output layer is its embedding."""

    def __init__(self, vocabulary: int, length: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(_Block(width, 4, is_causal=True) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _gpt(scale: Scale) -> Workload:
    vocabulary, length, width, depth, batch_size = (
        (16_384, 512, 512, 6, 8) if scale == "full" else (128, 32, 32, 2, 4)
    )
    return Workload(
        model=lambda: _Gpt(vocabulary, length, width, depth),
        batch=_tokens(length, vocabulary),
        loss=_next_token,
        optimizer=_adamw,
        batch_size=batch_size,
    )


class _Encoder(nn.Module):
    """torch's own encoder, with dropout, and a classifier on the mean."""

    def __init__(self, vocabulary: int, width: int, depth: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, depth, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.tokens(tokens)).mean(dim=1))
        return logits


def _encoder(scale: Scale) -> Workload:
    vocabulary, length, width, depth, batch_size = (
        (16_384, 256, 512, 6, 16) if scale == "full" else (128, 16, 32, 2, 4)
    )

    def batch(n: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(vocabulary, (n, length))
        return {"x": tokens, "y": torch.randint(_CLASSES, (n,))}

    return Workload(
        model=lambda: _Encoder(vocabulary, width, depth),
        batch=batch,
        loss=_classified,
        optimizer=_adamw,
        batch_size=batch_size,
        clip_grad_norm=1.0,
    )


class _Vit(nn.Module):
    def __init__(self, side: int, patch: int, width: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.places = nn.Parameter(torch.zeros(1, (side // patch) ** 2, width))
        self.blocks = nn.Sequential(*(_Block(width, 4, is_causal=False) for _ in range(depth)))
        self.head = nn.Linear(width, _CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        logits: torch.Tensor = self.head(self.blocks(x).mean(dim=1))
        return logits


def _vit(scale: Scale) -> Workload:
    side, patch, width, depth, batch_size = (
        (224, 16, 384, 6, 32) if scale == "full" else (16, 4, 32, 2, 4)
    )
    return Workload(
        model=lambda: _Vit(side, patch, width, depth),
        batch=_pictures(side),
        loss=_classified,
        optimizer=_fused_adamw,
        batch_size=batch_size,
    )


class _Lstm(nn.Module):
    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.layers(self.tokens(tokens))[0])
        return logits


def _lstm(scale: Scale) -> Workload:
    vocabulary, length, width, batch_size = (
        (8192, 128, 512, 32) if scale == "full" else (64, 8, 16, 4)
    )
    return Workload(
        model=lambda: _Lstm(vocabulary, width),
        batch=_tokens(length, vocabulary),
        loss=_next_token,
        optimizer=_adamw,
        batch_size=batch_size,
        clip_grad_norm=0.5,
    )


# ---- all of them ---------------------------------------------------------------------------------

ZOO: dict[str, ZooModel] = {
    "mlp": ZooModel(make=_mlp),
    "mlp-bf16": ZooModel(make=_mlp, precision="pure-bf16"),
    "embedding-bag": ZooModel(make=_embedding_bag),
    "cnn": ZooModel(make=_cnn),
    "resnet-channels-last": ZooModel(make=_resnet, precision="bf16", channels_last=True),
    "depthwise": ZooModel(make=_depthwise),
    "unet": ZooModel(make=_unet),
    "encoder": ZooModel(make=_encoder),
    "vit-fused": ZooModel(make=_vit, precision="bf16"),
    "gpt": ZooModel(make=_gpt, precision="bf16"),
    "gpt-checkpointed": ZooModel(make=_gpt, precision="bf16", checkpointing="blocks"),
    "gpt-fp16-accumulated": ZooModel(make=_gpt, precision="fp16", accumulation=2),
    "lstm": ZooModel(make=_lstm),
}
