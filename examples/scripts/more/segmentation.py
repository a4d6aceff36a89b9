"""Segmentation in a Solver class with a dataclass for its settings and BatchNorm in its blocks."""

import argparse
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset


@dataclass
class Config:
    batch_size: int = 8
    size: int = 256
    width: int = 64
    depth: int = 12
    num_images: int = 64
    epochs: int = 2
    lr: float = 1e-3


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x):
        y = F.relu(self.bn1(self.conv1(x)))
        return F.relu(x + self.bn2(self.conv2(y)))


class Segmenter(nn.Module):
    def __init__(self, width, depth, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.body = nn.Sequential(*[Residual(width) for _ in range(depth)])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        return self.head(self.body(self.stem(x)))


class Solver:
    def __init__(self, config, device, use_amp):
        self.config, self.device, self.use_amp = config, device, use_amp
        self.net = Segmenter(config.width, config.depth).to(device)
        self.optimizer = optim.Adam(self.net.parameters(), lr=config.lr)
        images = torch.randn(config.num_images, 3, config.size, config.size)
        masks = torch.randint(5, (config.num_images, config.size, config.size))
        self.loader = DataLoader(
            TensorDataset(images, masks), batch_size=config.batch_size, shuffle=True
        )

    def train(self):
        for epoch in range(self.config.epochs):
            self.net.train()
            total = 0.0
            for images, masks in self.loader:
                images, masks = images.to(self.device), masks.to(self.device)
                with torch.autocast(
                    torch.device(self.device).type, torch.bfloat16, enabled=self.use_amp
                ):
                    loss = F.cross_entropy(self.net(images), masks)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item()
            print(f"epoch {epoch}: {total / len(self.loader):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--use_amp", action="store_true", help="automatic mixed precision")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    torch.manual_seed(0)
    config = (
        Config(batch_size=4, size=8, width=4, depth=2, num_images=16) if args.tiny else Config()
    )
    Solver(config, "cuda" if torch.cuda.is_available() else "cpu", args.use_amp).train()
