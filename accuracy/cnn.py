"""torchvision's classifiers of the measured rows, layer by layer as its models are built."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

# Of torchvision's documentation, for 1000 classes.
PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "mobilenet_v2": 3_504_872,
    "mnasnet": 4_383_312,
}


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)


# ---- ResNet ----------------------------------------------------------------------------------


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.bn1 = _conv(inputs, width, 1), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = _conv(width, width, 3, stride), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = _conv(width, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                _conv(inputs, outputs, 1, stride), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Any) -> Any:
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, 3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        blocks, inputs = [], 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for number in range(depth):
                blocks.append(Bottleneck(inputs, width, 2 if stage and not number else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.pool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(inputs, num_classes)

    def forward(self, x: Any) -> Any:
        return self.fc(torch.flatten(self.pool(self.blocks(self.stem(x))), 1))


# ---- VGG -------------------------------------------------------------------------------------


def vgg16(num_classes: int = 1000) -> nn.Module:
    layers: list[nn.Module] = []
    inputs = 3
    for width, depth in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(depth):
            layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU(inplace=True)]
            inputs = width
        layers.append(nn.MaxPool2d(2, 2))
    return nn.Sequential(
        nn.Sequential(*layers),
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        nn.Sequential(
            nn.Linear(512 * 7 * 7, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, 4096),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(4096, num_classes),
        ),
    )


# ---- MobileNet V2 and MNASNet ----------------------------------------------------------------


class InvertedResidual(nn.Module):
    """Wide, depthwise, narrow. `activation` is made anew for each place."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int, activation: Any
    ) -> None:
        super().__init__()
        width = inputs * expansion
        widen = [_conv(inputs, width, 1), nn.BatchNorm2d(width), activation()]
        self.layers = nn.Sequential(
            *(widen if expansion > 1 else []),
            _conv(width, width, kernel, stride, groups=width),
            nn.BatchNorm2d(width),
            activation(),
            _conv(width, outputs, 1),
            nn.BatchNorm2d(outputs),
        )
        self.is_residual = stride == 1 and inputs == outputs

    def forward(self, x: Any) -> Any:
        return self.layers(x) + x if self.is_residual else self.layers(x)


def _stages(inputs: int, stages: tuple[tuple[int, ...], ...], activation: Any) -> list[nn.Module]:
    """Of each stage: expansion, outputs, depth, stride, kernel."""
    blocks: list[nn.Module] = []
    for expansion, outputs, depth, stride, kernel in stages:
        for number in range(depth):
            first = stride if number == 0 else 1
            blocks.append(InvertedResidual(inputs, outputs, kernel, first, expansion, activation))
            inputs = outputs
    return blocks


def _relu() -> nn.Module:
    return nn.ReLU(inplace=True)


def _relu6() -> nn.Module:
    return nn.ReLU6(inplace=True)


def mobilenet_v2(num_classes: int = 1000) -> nn.Module:
    stages = (
        (1, 16, 1, 1, 3),
        (6, 24, 2, 2, 3),
        (6, 32, 3, 2, 3),
        (6, 64, 4, 2, 3),
        (6, 96, 3, 1, 3),
        (6, 160, 3, 2, 3),
        (6, 320, 1, 1, 3),
    )
    return nn.Sequential(
        nn.Sequential(_conv(3, 32, 3, 2), nn.BatchNorm2d(32), _relu6()),
        *_stages(32, stages, _relu6),
        nn.Sequential(_conv(320, 1280, 1), nn.BatchNorm2d(1280), _relu6()),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(1280, num_classes),
    )


class MnasNet(nn.Module):
    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        stages = (
            (3, 24, 3, 2, 3),
            (3, 40, 3, 2, 5),
            (6, 80, 3, 2, 5),
            (6, 96, 2, 1, 3),
            (6, 192, 4, 2, 5),
            (6, 320, 1, 1, 3),
        )
        self.layers = nn.Sequential(
            *(_conv(3, 32, 3, 2), nn.BatchNorm2d(32), _relu()),
            *(_conv(32, 32, 3, groups=32), nn.BatchNorm2d(32), _relu()),
            *(_conv(32, 16, 1), nn.BatchNorm2d(16)),
            *_stages(16, stages, _relu),
            *(_conv(320, 1280, 1), nn.BatchNorm2d(1280), _relu()),
        )
        self.classifier = nn.Sequential(nn.Dropout(0.2, inplace=True), nn.Linear(1280, num_classes))

    def forward(self, x: Any) -> Any:
        return self.classifier(self.layers(x).mean([2, 3]))


def make(name: str, num_classes: int = 1000) -> nn.Module:
    if name == "vgg16":
        return vgg16(num_classes)
    if name == "mobilenet_v2":
        return mobilenet_v2(num_classes)
    if name == "mnasnet":
        return MnasNet(num_classes)
    return ResNet((3, 4, 6, 3) if name == "resnet50" else (3, 4, 23, 3), num_classes)


def check_parameters() -> None:
    """Are these the published models?"""
    for name, expected in PARAMETERS.items():
        with torch.device("meta"):
            found = sum(parameter.numel() for parameter in make(name).parameters())
        assert found == expected, f"{name} has {found} parameters, not {expected}"
