"""Fit a coordinate network (SIREN) to an image; everything is made on the default device."""

import argparse
import math

import torch
import torch.nn as nn


class Sine(nn.Module):
    def __init__(self, fan_in, fan_out, omega=30.0, first=False):
        super().__init__()
        self.omega = omega
        self.linear = nn.Linear(fan_in, fan_out)
        bound = 1 / fan_in if first else math.sqrt(6 / fan_in) / omega
        nn.init.uniform_(self.linear.weight, -bound, bound)

    def forward(self, x):
        return torch.sin(self.omega * self.linear(x))


def siren(width, depth):
    layers = [Sine(2, width, first=True)]
    layers += [Sine(width, width) for _ in range(depth)]
    return nn.Sequential(*layers, nn.Linear(width, 3))


def target_image(coords):
    x, y = coords.unbind(-1)
    return torch.stack([torch.sin(6 * x), torch.cos(5 * y), torch.sin(4 * x * y)], dim=-1)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=6)
    parser.add_argument("--points", type=int, default=65536, help="points in one step")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()

    torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)

    model = siren(args.width, args.depth)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M parameters on", end=" ")
    print(next(model.parameters()).device)

    for step in range(1, args.steps + 1):
        with torch.device("cpu"):  # the same points on every machine
            coords = torch.rand(args.points, 2) * 2 - 1
            colours = target_image(coords)
        coords, colours = coords.to(model[-1].weight.device), colours.to(model[-1].weight.device)
        loss = (model(coords) - colours).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 10 == 0 or step == 1:
            psnr = -10 * math.log10(loss.item() + 1e-12)
            print(f"{step:5d}  loss {loss.item():.5f}  psnr {psnr:.2f} dB")


if __name__ == "__main__":
    main()
