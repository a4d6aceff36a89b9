"""Speech-commands-like audio classifier (1-d convolutions), configured by a YAML file.

python train_from_config.py --config configs/audio_base.yaml train.batch_size=32
"""

import argparse
import json
from pathlib import Path

import torch
import yaml
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def load_config(path, overrides):
    config = yaml.safe_load(Path(path).read_text())
    for override in overrides:
        key, value = override.split("=", 1)
        *sections, name = key.split(".")
        node = config
        for section in sections:
            node = node[section]
        node[name] = yaml.safe_load(value)
    return config


def build_model(channels, kernel, hidden, classes, dropout):
    layers, cin = [], 1
    for i, cout in enumerate(channels):
        size, stride = (80, 4) if i == 0 else (kernel, 1)
        layers += [nn.Conv1d(cin, cout, size, stride, padding=size // 2), nn.BatchNorm1d(cout)]
        layers += [nn.ReLU(), nn.MaxPool1d(4)]
        cin = cout
    head = [nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(cin, hidden), nn.ReLU()]
    return nn.Sequential(*layers, *head, nn.Dropout(dropout), nn.Linear(hidden, classes))


class Tones(IterableDataset):
    def __init__(self, samples, classes, seed):
        self.samples, self.classes, self.seed = samples, classes, seed

    def __iter__(self):
        g = torch.Generator().manual_seed(self.seed)
        time = torch.arange(self.samples) / 16_000
        while True:
            label = torch.randint(self.classes, (1,), generator=g).item()
            wave = torch.sin(2 * torch.pi * (200 + 100 * label) * time)
            yield (wave + 0.1 * torch.randn(self.samples, generator=g)).unsqueeze(0), label


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("overrides", nargs="*", help="section.key=value")
    args = parser.parse_args()
    config = load_config(args.config, args.overrides)
    print(json.dumps(config, indent=2))

    torch.manual_seed(config["seed"])
    if config["device"] == "auto":
        config["device"] = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(config["device"])
    data, train = config["data"], config["train"]
    loader = DataLoader(
        Tones(data["samples"], config["model"]["classes"], config["seed"]),
        batch_size=train["batch_size"],
    )
    model = build_model(**config["model"]).to(device)
    optimizer = OPTIMIZERS[train["optimizer"]["name"]](
        model.parameters(), **train["optimizer"]["args"]
    )
    criterion = nn.CrossEntropyLoss(label_smoothing=train["label_smoothing"])
    model.train()
    for step, (waves, labels) in enumerate(loader, start=1):
        waves, labels = waves.to(device), labels.to(device)
        optimizer.zero_grad(set_to_none=True)
        loss = criterion(model(waves), labels)
        loss.backward()
        if train.get("clip_norm"):
            nn.utils.clip_grad_norm_(model.parameters(), train["clip_norm"])
        optimizer.step()
        if step % train["log_every"] == 0:
            print(f"step {step}: loss={loss.item():.4f}")
        if step >= train["steps"]:
            break


if __name__ == "__main__":
    main()
