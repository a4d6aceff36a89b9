"""The convolutional networks of NVIDIA's DeepLearningExamples, from torchvision's parts."""

from __future__ import annotations

from typing import Any

from torch import nn

from accuracy.libraries import import_torchvision


def make(name: str) -> Any:
    models = import_torchvision()
    if name in ("resnext101_32x4d", "se_resnext101_32x4d"):
        block = models.resnet.Bottleneck
        model = models.ResNet(block, [3, 4, 23, 3], groups=32, width_per_group=4)
        if name.startswith("se_"):
            _squeeze(model, block)
        return model
    return getattr(models, name)()


def _squeeze(model: Any, block: Any) -> None:
    """Put squeeze-and-excitation after the last BatchNorm of each block."""
    for module in model.modules():
        if isinstance(module, block):
            module.bn3 = nn.Sequential(module.bn3, Squeeze(module.bn3.num_features))


class Squeeze(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, width // 16), nn.Linear(width // 16, width)
        self.relu, self.sigmoid = nn.ReLU(inplace=True), nn.Sigmoid()

    def forward(self, x: Any) -> Any:
        mean = x.view(x.size(0), x.size(1), -1).mean(dim=2)
        scale = self.sigmoid(self.up(self.relu(self.down(mean))))
        return x * scale.view(x.size(0), x.size(1), 1, 1)
