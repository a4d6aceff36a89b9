"""Time-series forecaster that writes event files, a CSV log and checkpoints, and can resume."""

import argparse
import csv
import json
import os
import shutil
import struct
import time

import torch
import torch.nn as nn


class SummaryWriter:
    """As much of TensorBoard's as is needed here: length-prefixed records in an event file."""

    def __init__(self, log_dir):
        os.makedirs(log_dir, exist_ok=True)
        name = f"events.out.tfevents.{int(time.time())}.{os.getpid()}"
        self.file = open(os.path.join(log_dir, name), "ab")

    def add_scalar(self, tag, value, step):
        record = json.dumps({"tag": tag, "value": float(value), "step": step}).encode()
        self.file.write(struct.pack("<Q", len(record)) + record)

    def close(self):
        self.file.flush()
        self.file.close()


class Forecaster(nn.Module):
    def __init__(self, series, hidden, layers, kernel=5):
        super().__init__()
        channels = [series] + [hidden] * layers
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, kernel, padding=(kernel - 1) * 2**i, dilation=2**i)
            for i, (a, b) in enumerate(zip(channels, channels[1:], strict=False))
        )
        self.out = nn.Conv1d(hidden, series, 1)

    def forward(self, x):
        n = x.size(-1)
        for i, conv in enumerate(self.convs):
            h = torch.relu(conv(x)[..., :n])
            x = h if i == 0 else x + h
        return self.out(x)


def save_checkpoint(state, is_best, directory):
    filename = os.path.join(directory, "checkpoint.pth.tar")
    torch.save(state, filename)
    if is_best:
        shutil.copyfile(filename, os.path.join(directory, "model_best.pth.tar"))


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--out", default="runs/forecast")
    p.add_argument("--resume", default="")
    p.add_argument("--series", type=int, default=64)
    p.add_argument("--hidden", type=int, default=512)
    p.add_argument("--layers", type=int, default=8)
    p.add_argument("--window", type=int, default=2048)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--steps", type=int, default=1000)
    p.add_argument("--save-every", type=int, default=1)
    args = p.parse_args()

    os.makedirs(args.out, exist_ok=True)
    with open(os.path.join(args.out, "config.json"), "w") as f:
        json.dump(vars(args), f, indent=2)
    writer = SummaryWriter(os.path.join(args.out, "tb"))
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = Forecaster(args.series, args.hidden, args.layers).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    start, best = 0, float("inf")
    if args.resume:
        saved = torch.load(args.resume, map_location="cpu")
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start, best = saved["step"], saved["best"]

    with open(os.path.join(args.out, "log.csv"), "a", newline="") as f:
        log = csv.writer(f)
        for step in range(start, start + args.steps):
            phase = torch.rand(args.batch_size, args.series, 1) * 6.28
            wave = torch.sin(torch.arange(args.window + 1) / 5 + phase).to(device)
            loss = nn.functional.l1_loss(model(wave[..., :-1]), wave[..., 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            value = loss.item()
            log.writerow([step, value])
            writer.add_scalar("train/loss", value, step)
            if (step + 1) % args.save_every == 0:
                is_best, best = value < best, min(value, best)
                state = {"step": step + 1, "best": best}
                state.update(model=model.state_dict(), optimizer=optimizer.state_dict())
                save_checkpoint(state, is_best, args.out)
                print(f"step {step + 1}: loss {value:.4f}, saved to {args.out}")
    writer.close()


if __name__ == "__main__":
    main()
