"""Everything in half precision: model.half(), inputs.half(), SGD with momentum."""

import argparse

import numpy as np
import torch
import torch.nn as nn


class Mixer(nn.Module):
    """MLP-Mixer on tokens."""

    def __init__(self, tokens, dim, depth, classes):
        super().__init__()
        self.embed = nn.Linear(48, dim)
        self.norms1 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.norms2 = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.token_mlps = nn.ModuleList(self.mlp(tokens, 2 * tokens) for _ in range(depth))
        self.channel_mlps = nn.ModuleList(self.mlp(dim, 4 * dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    @staticmethod
    def mlp(dim, hidden):
        return nn.Sequential(nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim))

    def forward(self, x):
        x = self.embed(x)
        layers = zip(self.norms1, self.token_mlps, self.norms2, self.channel_mlps, strict=True)
        for norm1, token_mlp, norm2, channel_mlp in layers:
            x = x + token_mlp(norm1(x).transpose(1, 2)).transpose(1, 2)
            x = x + channel_mlp(norm2(x))
        return self.head(x.mean(dim=1))


def batches(rng, n, batch, tokens):
    for _ in range(n):
        y = rng.integers(0, 10, size=batch)
        x = rng.normal(size=(batch, tokens, 48)) + y[:, None, None] / 5
        yield torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y)


def main(args):
    torch.manual_seed(args.seed)
    rng = np.random.default_rng(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Mixer(args.tokens, args.dim, args.depth, 10)
    model = model.half().to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    for i, (x, y) in enumerate(batches(rng, args.iters, args.batch, args.tokens)):
        x, y = x.half().to(device), y.to(device)
        optimizer.zero_grad()
        out = model(x)
        loss = criterion(out.float(), y)
        loss.backward()
        optimizer.step()
        if i % 10 == 0:
            acc = (out.argmax(1) == y).float().mean()
            print(f"iter {i}: loss = {loss:.4f}, acc = {acc:.2f}")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--tokens", type=int, default=196)
    ap.add_argument("--dim", type=int, default=768)
    ap.add_argument("--depth", type=int, default=12)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--iters", type=int, default=300)
    ap.add_argument("--lr", type=float, default=0.01)
    ap.add_argument("--seed", type=int, default=0)
    main(ap.parse_args())
