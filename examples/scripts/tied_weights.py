"""Transformer-XL-sized word model whose input and output embeddings are one matrix."""

import argparse

import torch
import torch.nn as nn


class TiedLM(nn.Module):
    def __init__(self, vocab, dim, heads, ff, layers, dropout):
        super().__init__()
        self.encoder = nn.Embedding(vocab, dim)
        self.register_buffer("pe", self.positions(dim, 2048))
        self.drop = nn.Dropout(dropout)
        layer = nn.TransformerEncoderLayer(dim, heads, ff, dropout, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.decoder = nn.Linear(dim, vocab)
        self.decoder.weight = self.encoder.weight
        nn.init.uniform_(self.encoder.weight, -0.1, 0.1)
        self.scale = dim**0.5

    @staticmethod
    def positions(dim, length):
        angle = torch.arange(length)[:, None] / 10_000 ** (torch.arange(0, dim, 2) / dim)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)

    def forward(self, x, mask):
        h = self.encoder(x) * self.scale + self.pe[: x.size(1)]
        return self.decoder(self.layers(self.drop(h), mask=mask, is_causal=True))


parser = argparse.ArgumentParser()
parser.add_argument("--vocab", type=int, default=50_000)
parser.add_argument("--dim", type=int, default=512)
parser.add_argument("--heads", type=int, default=8)
parser.add_argument("--ff", type=int, default=2048)
parser.add_argument("--layers", type=int, default=8)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument("--length", type=int, default=256)
parser.add_argument("--batch", type=int, default=16)
parser.add_argument("--steps", type=int, default=500)


def main(args):
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    model = TiedLM(args.vocab, args.dim, args.heads, args.ff, args.layers, args.dropout).to(device)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    mask = nn.Transformer.generate_square_subsequent_mask(args.length).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=2.5e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 50))
    losses = []
    for step in range(args.steps):
        stream = (torch.arange(args.length + 1) + torch.randint(50, (args.batch, 1))) % args.vocab
        x, y = stream[:, :-1].to(device), stream[:, 1:].to(device)
        optimizer.zero_grad()
        out = model(x, mask)
        loss = nn.functional.cross_entropy(out.transpose(1, 2), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))
        if step % 10 == 0:
            print(f"{step:>6} loss {sum(losses[-10:]) / len(losses[-10:]):.3f}")


if __name__ == "__main__":
    main(parser.parse_args())
