"""A deep decoder that recomputes its blocks in backward (torch.utils.checkpoint)."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, attn_mask=mask, need_weights=False, is_causal=True)[0]
        return x + self.ff(self.ln2(x))


class Decoder(nn.Module):
    def __init__(self, vocab, dim, heads, depth, length, checkpointing=True):
        super().__init__()
        self.wte = nn.Embedding(vocab, dim)
        self.wpe = nn.Embedding(length, dim)
        self.blocks = nn.ModuleList([Block(dim, heads) for _ in range(depth)])
        self.ln = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        self.register_buffer("mask", torch.full((length, length), float("-inf")).triu(1))
        self.checkpointing = checkpointing

    def forward(self, ids):
        x = self.wte(ids) + self.wpe.weight
        for block in self.blocks:
            if self.training and self.checkpointing:
                x = checkpoint(block, x, self.mask, use_reentrant=False)
            else:
                x = block(x, self.mask)
        return self.head(self.ln(x))


def main():
    parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--dim", type=int, default=1024)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--max-steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--no-checkpointing", dest="checkpointing", action="store_false")
    args = parser.parse_args()

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Decoder(
        args.vocab, args.dim, args.heads, args.depth, args.length, args.checkpointing
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.1)
    for step in range(args.max_steps):
        ids = (
            torch.arange(args.length + 1) * torch.randint(1, 9, (args.batch_size, 1))
        ) % args.vocab
        ids = ids.to(device)
        logits = model(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, args.vocab), ids[:, 1:].reshape(-1))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        print(f"step {step + 1}/{args.max_steps} loss: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
