"""SSD300 with ResNet-50 as NVIDIA's DeepLearningExamples trains it: ssd/model.py, ssd/train.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy.libraries import import_torchvision

_NUM_LABELS, _NUM_BOXES = 81, 8732  # COCO's classes; boxes of an image of 300 x 300
_WIDTHS = (1024, 512, 512, 256, 256, 256)
_INNER_WIDTHS = (256, 256, 128, 128, 128)
_BOXES_OF_PLACE = (4, 6, 6, 6, 4, 4)


class Ssd300(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        backbone = import_torchvision().resnet50()
        self.backbone = nn.Sequential(*list(backbone.children())[:7])
        first: Any = self.backbone[-1][0]  # type: ignore[index] # a Sequential
        for convolution in (first.conv1, first.conv2, first.downsample[0]):
            convolution.stride = (1, 1)
        self.further = nn.ModuleList(
            _further(inputs, outputs, inner, is_halved=number < 3)
            for number, (inputs, outputs, inner) in enumerate(
                zip(_WIDTHS[:-1], _WIDTHS[1:], _INNER_WIDTHS, strict=True)
            )
        )
        each = list(zip(_BOXES_OF_PLACE, _WIDTHS, strict=True))
        self.places = nn.ModuleList(nn.Conv2d(width, n * 4, 3, padding=1) for n, width in each)
        self.labels = nn.ModuleList(
            nn.Conv2d(width, n * _NUM_LABELS, 3, padding=1) for n, width in each
        )

    def forward(self, x: Any) -> Any:
        features = [self.backbone(x)]
        for block in self.further:
            features.append(block(features[-1]))
        places = [
            head(x).reshape(x.size(0), 4, -1) for head, x in zip(self.places, features, strict=True)
        ]
        labels = [
            head(x).reshape(x.size(0), _NUM_LABELS, -1)
            for head, x in zip(self.labels, features, strict=True)
        ]
        return torch.cat(places, 2).contiguous(), torch.cat(labels, 2).contiguous()


def _further(inputs: int, outputs: int, inner: int, *, is_halved: bool) -> nn.Module:
    how: dict[str, int] = {"padding": 1, "stride": 2} if is_halved else {}
    return nn.Sequential(
        nn.Conv2d(inputs, inner, 1, bias=False),
        nn.BatchNorm2d(inner),
        nn.ReLU(inplace=True),
        nn.Conv2d(inner, outputs, 3, bias=False, **how),  # type: ignore[arg-type] # ints
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def batch(num_examples: int, edge: int) -> dict[str, Any]:
    return {
        "pixels": torch.zeros(num_examples, 3, edge, edge),
        "boxes": torch.zeros(num_examples, _NUM_BOXES, 4),
        "labels": torch.zeros(num_examples, _NUM_BOXES, dtype=torch.long),
    }


def loss(model: Any, examples: Any, *, is_half: bool) -> Any:
    """Boxes by smooth L1; labels by cross-entropy of the positives and the hardest negatives."""
    pixels = examples["pixels"]
    places, scores = model(pixels.half() if is_half else pixels)
    places, scores, labels = places.float(), scores.float(), examples["labels"]
    wanted = examples["boxes"].transpose(1, 2).contiguous()
    is_positive = labels > 0
    num_positive = is_positive.sum(dim=1)
    middles = 10.0 * (wanted[:, :2, :] - wanted[:, 2:, :]) / wanted[:, 2:, :]
    extents = 5.0 * (wanted[:, 2:, :] / wanted[:, :2, :]).log()
    aims = torch.cat((middles, extents), dim=1).contiguous()
    of_places = F.smooth_l1_loss(places, aims, reduction="none").sum(dim=1)
    of_places = (is_positive.float() * of_places).sum(dim=1)
    of_labels = F.cross_entropy(scores, labels, reduction="none")
    negatives = torch.where(is_positive, 0.0, of_labels.detach())
    _, order = negatives.sort(dim=1, descending=True)
    _, rank = order.sort(dim=1)
    is_hard = rank < torch.clamp(3 * num_positive, max=_NUM_BOXES).unsqueeze(-1)
    chosen = (is_positive + is_hard).float()
    whole = of_places + (of_labels * chosen).sum(dim=1)
    return (whole / num_positive.float().clamp(min=1e-6)).mean(dim=0)
