"""A Trainer class with callbacks, and metrics computed with numpy on the CPU."""

from __future__ import annotations

import argparse
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def auc(scores: np.ndarray, labels: np.ndarray) -> float:
    ranks = np.empty(len(scores))
    ranks[np.argsort(scores)] = np.arange(1, len(scores) + 1)
    positive = labels == 1
    n_pos, n_neg = positive.sum(), (~positive).sum()
    if n_pos == 0 or n_neg == 0:
        return float("nan")
    return float((ranks[positive].sum() - n_pos * (n_pos + 1) / 2) / (n_pos * n_neg))


class TabularNet(nn.Module):
    def __init__(self, features: int, width: int, depth: int):
        super().__init__()
        self.inp = nn.Linear(features, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.BatchNorm1d(width),
                nn.Linear(width, 2 * width),
                nn.ReLU(),
                nn.Dropout(0.1),
                nn.Linear(2 * width, width),
            )
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + block(x)
        return self.out(torch.relu(x)).squeeze(-1)


class Trainer:
    def __init__(self, model, optimizer, criterion, device=None):
        self.device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = model.to(self.device)
        self.optimizer = optimizer
        self.criterion = criterion
        self.callbacks = defaultdict(list)
        self.iter_num = 0
        self.history = []

    def on(self, event, callback):
        self.callbacks[event].append(callback)

    def trigger(self, event):
        for callback in self.callbacks[event]:
            callback(self)

    def run_step(self, batch):
        x, y = (t.to(self.device, non_blocking=True) for t in batch)
        self.logits = self.model(x)
        self.loss = self.criterion(self.logits, y)
        self.model.zero_grad(set_to_none=True)
        self.loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 5.0)
        self.optimizer.step()
        scores = self.logits.detach().cpu().numpy()
        self.history.append((self.loss.item(), auc(scores, y.cpu().numpy())))

    def run(self, loader, max_iters):
        self.model.train()
        while self.iter_num < max_iters:
            for batch in loader:
                self.run_step(batch)
                self.iter_num += 1
                self.trigger("batch_end")
                if self.iter_num >= max_iters:
                    break


def report(trainer):
    if trainer.iter_num % 5 == 0:
        loss, area = np.nanmean(trainer.history[-5:], axis=0)
        print(f"iter {trainer.iter_num}: loss {loss:.4f}, auc {area:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=4096)
    parser.add_argument("--max-iters", type=int, default=500)
    args = parser.parse_args()
    rng = np.random.default_rng(0)
    X = rng.normal(size=(args.rows, args.features)).astype(np.float32)
    y = (X[:, :4].sum(axis=1) > 0).astype(np.float32)
    loader = DataLoader(
        TensorDataset(torch.from_numpy(X), torch.from_numpy(y)), args.batch_size, drop_last=True
    )
    torch.manual_seed(0)
    net = TabularNet(args.features, args.width, args.depth)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    trainer = Trainer(net, optimizer, nn.BCEWithLogitsLoss())
    trainer.on("batch_end", report)
    trainer.run(loader, args.max_iters)
