"""A denoiser trained with accelerate, an EMA and switches of its own, after diffusers."""

import argparse
import copy

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 8, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Denoiser(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.gradient_checkpointing = False
        self.proj_in, self.proj_out = nn.Linear(4, dim), nn.Linear(dim, 4)
        self.time = nn.Embedding(1000, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True

    def forward(self, latents, timesteps):
        x = self.proj_in(latents.flatten(2).transpose(1, 2)) + self.time(timesteps)[:, None]
        for block in self.blocks:
            if self.training and self.gradient_checkpointing:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.proj_out(x).transpose(1, 2).view_as(latents)


def parse_args():
    parser = argparse.ArgumentParser(description="Simple example of a training script.")
    parser.add_argument("--train_batch_size", type=int, default=16)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--gradient_checkpointing", action="store_true")
    parser.add_argument("--mixed_precision", type=str, default=None, choices=["no", "fp16", "bf16"])
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--resolution", type=int, default=32)
    parser.add_argument("--dim", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--num_train_epochs", type=int, default=2)
    parser.add_argument("--num_examples", type=int, default=64)
    return parser.parse_args()


def main():
    args = parse_args()
    accelerator = Accelerator(
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        mixed_precision=args.mixed_precision,
    )
    torch.manual_seed(0)
    unet = Denoiser(args.dim, args.depth)
    ema = copy.deepcopy(unet).requires_grad_(False)
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate)
    latents = torch.randn(args.num_examples, 4, args.resolution, args.resolution)
    train_dataloader = DataLoader(
        TensorDataset(latents), shuffle=True, batch_size=args.train_batch_size
    )
    unet, optimizer, train_dataloader = accelerator.prepare(unet, optimizer, train_dataloader)
    ema.to(accelerator.device)
    for _ in range(args.num_train_epochs):
        unet.train()
        for (batch,) in train_dataloader:
            with accelerator.accumulate(unet):
                noise = torch.randn_like(batch)
                timesteps = torch.randint(1000, (len(batch),), device=batch.device)
                loss = F.mse_loss(unet(batch + noise, timesteps), noise)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                with torch.no_grad():
                    for kept, new in zip(ema.parameters(), unet.parameters()):
                        kept.lerp_(new, 0.01)
        accelerator.print(f"loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
