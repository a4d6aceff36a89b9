"""Denoising diffusion with an exponential moving average of the weights."""

import argparse
import copy

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import trange


class ResBlock(nn.Module):
    def __init__(self, cin, cout, emb):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, cin), nn.GroupNorm(8, cout)
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.time = nn.Linear(emb, cout)
        self.skip = nn.Conv2d(cin, cout, 1)

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x))) + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class Denoiser(nn.Module):
    def __init__(self, ch, emb=256):
        super().__init__()
        self.emb = emb
        self.time = nn.Sequential(nn.Linear(emb, emb), nn.SiLU(), nn.Linear(emb, emb))
        self.first = nn.Conv2d(3, ch, 3, padding=1)
        self.down = nn.ModuleList([ResBlock(ch, ch, emb), ResBlock(ch, 2 * ch, emb)])
        self.mid = ResBlock(2 * ch, 2 * ch, emb)
        self.up = nn.ModuleList([ResBlock(4 * ch, ch, emb), ResBlock(2 * ch, ch, emb)])
        self.last = nn.Conv2d(ch, 3, 3, padding=1)

    def embed(self, t):
        freqs = torch.exp(-torch.arange(0, self.emb, 2, device=t.device) * 9.2 / self.emb)
        angles = t[:, None] * freqs[None]
        return self.time(torch.cat([angles.sin(), angles.cos()], dim=-1))

    def forward(self, x, t):
        emb = self.embed(t)
        x = self.first(x)
        skips = []
        for block in self.down:
            x = block(x, emb)
            skips.append(x)
            x = F.avg_pool2d(x, 2)
        x = self.mid(x, emb)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = block(torch.cat([x, skips.pop()], dim=1), emb)
        return self.last(x)


@torch.no_grad()
def ema_update(ema_model, model, decay):
    for ema_p, p in zip(ema_model.parameters(), model.parameters(), strict=True):
        ema_p.lerp_(p, 1 - decay)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--image", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--timesteps", type=int, default=1000)
    parser.add_argument("--decay", type=float, default=0.9999)
    args = parser.parse_args()

    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Denoiser(args.channels).to(device)
    ema = copy.deepcopy(model).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
    alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.02, args.timesteps), 0)

    bar = trange(args.steps, desc="ddpm")
    for _ in bar:
        x0 = torch.rand(args.batch, 1, 1, 1).expand(-1, 3, args.image, args.image) * 2 - 1
        t = torch.randint(args.timesteps, (args.batch,))
        a = alphas[t].view(-1, 1, 1, 1)
        x0, t, a = x0.to(device), t.to(device), a.to(device)
        noise = torch.randn_like(x0)
        noisy = a.sqrt() * x0 + (1 - a).sqrt() * noise
        loss = F.mse_loss(model(noisy, t), noise)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        ema_update(ema, model, args.decay)
        bar.set_postfix(loss=f"{loss.item():.4f}")
    print(f"final loss: {loss.item():.4f}")


if __name__ == "__main__":
    main()
