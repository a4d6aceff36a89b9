"""Models of rows, images and volumes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 32),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Linear(32, 32),
            nn.GELU(),
            nn.Linear(32, 5),
        )

    def forward(self, x: Any) -> Any:
        return F.cross_entropy(self.layers(x), x[:, 0].long())


class Cnn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, stride=2, bias=False),
            nn.BatchNorm2d(16),
            nn.LeakyReLU(0.1),
            nn.Dropout2d(0.2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(16, 7),
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Residual(nn.Module):
    def __init__(self, width: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, wider, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(wider)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.other_norm = nn.BatchNorm2d(wider)
        self.skip: nn.Module = nn.Identity()
        if stride > 1:
            self.skip = nn.Sequential(
                nn.Conv2d(width, wider, 1, stride, bias=False), nn.BatchNorm2d(wider)
            )

    def forward(self, x: Any) -> Any:
        y = F.relu(self.norm(self.first(x)), inplace=True)
        y = self.other_norm(self.second(y))
        y += self.skip(x)
        return F.relu(y, inplace=True)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        self.blocks = nn.Sequential(
            Residual(8, 8, 1), Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 16, 1)
        )
        self.head = nn.Linear(16, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Gate(nn.Module):
    """Squeeze and excite."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(width, 2, 1), nn.Conv2d(2, width, 1)
        self.activation = nn.SiLU(inplace=True)

    def forward(self, x: Any) -> Any:
        gate = self.excite(self.activation(self.squeeze(x.mean((2, 3), keepdim=True))))
        return x * gate.sigmoid()


class Inverted(nn.Module):
    """A block of EfficientNet's, which is left out of some examples."""

    def __init__(self, width: int, wider: int, drop_rate: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(width, wider, 1, bias=False), nn.BatchNorm2d(wider)),
            nn.SiLU(inplace=True),
            nn.Conv2d(wider, wider, 3, padding=1, groups=wider, bias=False),
            *(nn.BatchNorm2d(wider), nn.SiLU(inplace=True), Gate(wider)),
            *(nn.Conv2d(wider, width, 1, bias=False), nn.BatchNorm2d(width)),
        )
        self.drop_rate = drop_rate

    def forward(self, x: Any) -> Any:
        y = self.layers(x)
        if self.drop_rate:  # decides what is saved for backward
            y = y * y.new_empty(len(y), 1, 1, 1).bernoulli_(1 - self.drop_rate)
        return x + y


class EfficientNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        rates = torch.linspace(0, 0.2, 3).tolist()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1, bias=False)
        self.blocks = nn.Sequential(*(Inverted(8, 16, rate) for rate in rates))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Any) -> Any:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(8, 8, 4, 2, 1), nn.ELU(), nn.Conv2d(8, 3, 1))

    def forward(self, x: Any) -> Any:
        return F.mse_loss(self.up(self.down(x)), x)


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self.block(3, 8), self.block(8, 16)])
        self.middle = self.block(16, 16)
        self.up = nn.ModuleList([self.block(32, 8), self.block(16, 8)])
        self.out = nn.Conv2d(8, 4, 1)

    @staticmethod
    def block(width: int, wider: int) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU()
        )

    def forward(self, x: Any) -> Any:
        skips = []
        target = (x[:, 0] > 0.5).long()
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skips.pop()], 1))
        return F.cross_entropy(self.out(x), target)


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.scale * self.narrow(F.gelu(self.wide(y)))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """With channels last, as timm's users run it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.blocks = nn.ModuleList([ConvNextBlock(8) for _ in range(2)])
        self.head = nn.Linear(8, 6)

    def forward(self, x: Any) -> Any:
        x = self.stem(x.contiguous(memory_format=torch.channels_last))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv3d(1, 4, 3), nn.InstanceNorm3d(4, affine=True), nn.ReLU(), nn.AvgPool3d(2)
        )

    def forward(self, x: Any) -> Any:
        return self.layers(x)


class Warped(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.where = nn.Linear(3 * 8 * 8, 6)
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: Any) -> Any:
        theta = self.where(x.flatten(1)).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return self.conv(F.interpolate(x, scale_factor=2, mode="nearest"))
