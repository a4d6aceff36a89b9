import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from .data import collate, make_sentences
from .model import Tagger


def build_parser():
    parser = argparse.ArgumentParser(prog="python -m tagger.train")
    parser.add_argument("--vocab", type=int, default=100_000)
    parser.add_argument("--tags", type=int, default=50)
    parser.add_argument("--dim", type=int, default=300)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--longest", type=int, default=128)
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--device", default=None)
    return parser


def main():
    args = build_parser().parse_args()
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    loader = DataLoader(
        make_sentences(args.sentences, args.vocab, args.tags, args.longest),
        batch_size=args.batch_size,
        shuffle=True,
        collate_fn=collate(args.longest),
    )
    model = Tagger(args.vocab, args.tags, args.dim, args.hidden, args.layers, args.dropout)
    model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    criterion = nn.CrossEntropyLoss(ignore_index=-1)
    for epoch in range(args.epochs):
        tagged = 0
        for i, (words, tags, lengths) in enumerate(loader):
            words, tags = words.to(device), tags.to(device)
            scores = model(words)
            loss = criterion(scores.flatten(0, 1), tags.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            tagged += lengths.sum().item()
            if i % 10 == 0:
                print(f"epoch {epoch} batch {i} words {tagged} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
