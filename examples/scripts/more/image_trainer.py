"""Image classification with a switch for everything, after timm's train.py."""

import argparse
from contextlib import suppress
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser(description="PyTorch ImageNet Training")
parser.add_argument("-b", "--batch-size", type=int, default=128, metavar="N")
parser.add_argument("--grad-accum-steps", type=int, default=1, metavar="N")
parser.add_argument("--grad-checkpointing", action="store_true", default=False)
parser.add_argument("--amp", action="store_true", default=False)
parser.add_argument("--amp-dtype", default="float16", type=str)
parser.add_argument("--channels-last", action="store_true", default=False)
parser.add_argument("--img-size", type=int, default=128)
parser.add_argument("--dim", type=int, default=512)
parser.add_argument("--depth", type=int, default=8)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--num-images", type=int, default=512)
parser.add_argument("--device", default="cuda")


class Images(Dataset):
    def __init__(self, num, size):
        self.num, self.size = num, size

    def __len__(self):
        return self.num

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        return torch.randn(3, self.size, self.size, generator=g), i % 10


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.grad_checkpointing = False
        self.patch_embed = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, 10)

    def set_grad_checkpointing(self, enable=True):
        self.grad_checkpointing = enable

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            if self.grad_checkpointing and self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x.mean(1))


def main():
    args = parser.parse_args()
    torch.manual_seed(42)
    device = torch.device(args.device)
    model = VisionTransformer(args.dim, args.depth)
    if args.grad_checkpointing:
        model.set_grad_checkpointing(enable=True)
    model.to(device=device)
    if args.channels_last:
        model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
    amp_autocast, loss_scaler = suppress, None
    if args.amp:
        amp_dtype = torch.bfloat16 if args.amp_dtype == "bfloat16" else torch.float16
        amp_autocast = partial(torch.autocast, device_type=device.type, dtype=amp_dtype)
        if device.type == "cuda" and amp_dtype == torch.float16:
            loss_scaler = torch.amp.GradScaler(device.type)
    loader_train = DataLoader(
        Images(args.num_images, args.img_size),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(args.epochs):
        train_one_epoch(model, loader_train, optimizer, criterion, args, amp_autocast, loss_scaler)
        print("epoch", epoch)


def train_one_epoch(model, loader, optimizer, criterion, args, amp_autocast, loss_scaler):
    model.train()
    accum_steps = args.grad_accum_steps
    optimizer.zero_grad()
    for batch_idx, (input, target) in enumerate(loader):
        need_update = (batch_idx + 1) % accum_steps == 0
        input, target = input.to(args.device), target.to(args.device)
        if args.channels_last:
            input = input.contiguous(memory_format=torch.channels_last)
        with amp_autocast():
            loss = criterion(model(input), target)
        if accum_steps > 1:
            loss /= accum_steps
        if loss_scaler is not None:
            loss_scaler.scale(loss).backward()
            if need_update:
                loss_scaler.step(optimizer)
                loss_scaler.update()
        else:
            loss.backward()
            if need_update:
                optimizer.step()
        if need_update:
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
