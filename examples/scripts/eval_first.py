"""Sequence classifier that is evaluated once before training, and after every epoch."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, random_split


class Classifier(nn.Module):
    def __init__(self, vocab, dim, heads, layers, classes, length):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Parameter(torch.zeros(length, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(dim, classes)

    def forward(self, x):
        return self.out(self.body(self.emb(x) + self.pos[: x.size(1)]).mean(1))


@torch.no_grad()
def evaluate(model, loader, device):
    model.eval()
    total, correct, loss = 0, 0, 0.0
    for x, y in loader:
        x, y = x.to(device), y.to(device)
        logits = model(x)
        loss += nn.functional.cross_entropy(logits, y, reduction="sum").item()
        correct += (logits.argmax(-1) == y).sum().item()
        total += len(y)
    return loss / total, correct / total


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--examples", type=int, default=4000)
    ap.add_argument("--vocab", type=int, default=20_000)
    ap.add_argument("--dim", type=int, default=512)
    ap.add_argument("--heads", type=int, default=8)
    ap.add_argument("--layers", type=int, default=6)
    ap.add_argument("--length", type=int, default=256)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-batch", type=int, default=128)
    ap.add_argument("--epochs", type=int, default=3)
    args = ap.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    labels = torch.randint(4, (args.examples,)).tolist()
    examples = [(torch.randint(y * 3, y * 3 + 9, (args.length,)), y) for y in labels]
    train_set, val_set = random_split(examples, [0.8, 0.2])
    train_loader = DataLoader(train_set, batch_size=args.batch, shuffle=True, drop_last=True)
    val_loader = DataLoader(val_set, batch_size=args.eval_batch)

    model = Classifier(args.vocab, args.dim, args.heads, args.layers, 4, args.length).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    loss, acc = evaluate(model, val_loader, device)
    print(f"before training: val loss {loss:.4f}, accuracy {acc:.1%}")
    best = acc
    for epoch in range(args.epochs):
        model.train()
        for x, y in train_loader:
            x, y = x.to(device), y.to(device)
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        loss, acc = evaluate(model, val_loader, device)
        mark = " *" if acc > best else ""
        best = max(acc, best)
        print(f"epoch {epoch}: val loss {loss:.4f}, accuracy {acc:.1%}{mark}")


if __name__ == "__main__":
    main()
