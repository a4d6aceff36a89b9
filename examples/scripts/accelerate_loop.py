"""Sequence-to-sequence transformer trained with Hugging Face accelerate."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm


class Seq2Seq(nn.Module):
    """Learns to reverse."""

    def __init__(self, vocab, dim, heads, layers, length):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(length, dim)
        self.transformer = nn.Transformer(
            dim, heads, layers, layers, 4 * dim, dropout=0.1, batch_first=True
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, source, target):
        place = self.pos(torch.arange(source.size(1), device=source.device))
        n = target.size(1)
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=target.device)
        out = self.transformer(
            self.embed(source) + place,
            self.embed(target) + place,
            tgt_mask=mask,
            tgt_is_causal=True,
        )
        return self.head(out)


def collate(examples):
    source = torch.stack(examples)
    return {"source": source, "target": source.roll(1, 1), "labels": source}


def training_function(args):
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        gradient_accumulation_steps=args.gradient_accumulation_steps,
    )
    set_seed(args.seed)
    data = [torch.randint(args.vocab // 8 + 1, (args.length,)) for _ in range(args.examples)]
    loader = DataLoader(data, shuffle=True, collate_fn=collate, batch_size=args.batch_size)
    model = Seq2Seq(args.vocab, args.dim, args.heads, args.layers, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=args.lr, total_steps=args.epochs * len(loader)
    )
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    criterion = nn.CrossEntropyLoss()
    bar = tqdm(range(args.epochs * len(loader)), disable=not accelerator.is_local_main_process)
    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                logits = model(batch["source"], batch["target"])
                loss = criterion(logits.flatten(0, 1), batch["labels"].flatten())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            bar.update(1)
            bar.set_postfix(loss=loss.item())
        accelerator.print(f"epoch {epoch}: loss {loss.item():.4f}")


def main():
    parser = argparse.ArgumentParser(description="Simple example of training script.")
    parser.add_argument("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--vocab", type=int, default=32_000)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--examples", type=int, default=2048)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=42)
    training_function(parser.parse_args())


if __name__ == "__main__":
    main()
