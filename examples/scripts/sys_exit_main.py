#!/usr/bin/env python3
"""Siamese encoder with a triplet loss. Exit code 0 if the loss fell, 1 if it did not."""

import argparse
import logging
import os
import random
import sys

import numpy as np
import torch
from torch import nn

logger = logging.getLogger(__name__)


class Encoder(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        layers, cin = [], 3
        for mult in (1, 2, 4, 8):
            layers += [nn.Conv2d(cin, width * mult, 3, 2, 1), nn.PReLU()]
            cin = width * mult
        self.net = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, out)
        )

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=-1)


def set_seed(seed):
    os.environ["PYTHONHASHSEED"] = str(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
        torch.backends.cudnn.deterministic = True


def triplets(n, size):
    kind = torch.rand(n, 3, 1, 1)
    other = (kind + 0.5) % 1
    noise = torch.randn(3, n, 3, size, size) * 0.1
    return kind + noise[0], kind + noise[1], other + noise[2]


def main(argv=None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--out", type=int, default=128)
    parser.add_argument("--size", type=int, default=112)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--iters", type=int, default=500)
    parser.add_argument("--margin", type=float, default=0.5)
    args = parser.parse_args(argv)
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(asctime)s %(message)s")
    set_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logger.info("device: %s", device)
    model = Encoder(args.width, args.out).to(device)
    criterion = nn.TripletMarginLoss(margin=args.margin)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    losses = []
    try:
        for it in range(args.iters):
            anchor, positive, negative = (t.to(device) for t in triplets(args.batch, args.size))
            optimizer.zero_grad()
            loss = criterion(model(anchor), model(positive), model(negative))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if it % 10 == 0:
                logger.info("iter %d loss %.5f", it, losses[-1])
    except KeyboardInterrupt:
        logger.warning("interrupted, stopping")
        return 130
    logger.info("loss %.5f -> %.5f", losses[0], losses[-1])
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
