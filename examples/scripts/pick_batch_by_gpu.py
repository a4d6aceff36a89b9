"""BERT-style masked language model that chooses its batch and precision by the GPU it finds."""

import argparse
import contextlib

import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self, vocab, width, layers, heads, length):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.1, activation="gelu", batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        pos = torch.arange(ids.size(1), device=ids.device)
        return self.head(self.encoder(self.tok(ids) + self.pos(pos)))


def pick_settings():
    """Returns (device, batch size, dtype)."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), 4, torch.float32
    device = torch.device("cuda", torch.cuda.current_device())
    props = torch.cuda.get_device_properties(device)
    total_gb = props.total_memory / 1024**3
    free, total = torch.cuda.mem_get_info()
    major, minor = torch.cuda.get_device_capability(device)
    print(f"{torch.cuda.get_device_name(device)}: {total_gb:.1f} GB, sm_{major}{minor}, ", end="")
    print(f"{props.multi_processor_count} SMs, {torch.cuda.device_count()} visible")
    if free / total < 0.5:
        raise SystemExit("GPU is busy, try another one")
    if total_gb > 70:
        batch = 64
    elif total_gb > 30:
        batch = 32
    elif total_gb > 20:
        batch = 16
    else:
        batch = 8
    if torch.cuda.is_bf16_supported() and major >= 8:
        torch.backends.cuda.matmul.allow_tf32 = True
        return device, batch, torch.bfloat16
    return device, batch, torch.float16 if major >= 7 else torch.float32


def mask_tokens(ids, vocab):
    labels = ids.clone()
    chosen = torch.rand(ids.shape) < 0.15
    labels[~chosen] = -100
    return ids.masked_fill(chosen, vocab - 1), labels


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--vocab", type=int, default=30522)
    ap.add_argument("--width", type=int, default=768)
    ap.add_argument("--layers", type=int, default=12)
    ap.add_argument("--heads", type=int, default=12)
    ap.add_argument("--length", type=int, default=512)
    ap.add_argument("--steps", type=int, default=1000)
    args = ap.parse_args()

    torch.manual_seed(0)
    device, batch_size, dtype = pick_settings()
    model = Encoder(args.vocab, args.width, args.layers, args.heads, args.length).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    criterion = nn.CrossEntropyLoss()
    use_amp = dtype != torch.float32
    scaler = torch.amp.GradScaler(enabled=dtype == torch.float16)
    autocast = torch.autocast("cuda", dtype=dtype) if use_amp else contextlib.nullcontext()
    print(f"batch {batch_size}, {dtype}")

    for step in range(args.steps):
        ids = torch.randint(args.vocab - 1, (batch_size, args.length))
        ids, labels = mask_tokens(ids, args.vocab)
        ids, labels = ids.to(device), labels.to(device)
        with autocast:
            logits = model(ids)
            loss = criterion(logits.view(-1, args.vocab), labels.view(-1))
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad(set_to_none=True)
        if step % 20 == 0:
            print(f"step {step} loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
