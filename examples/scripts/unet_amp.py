"""U-Net for segmentation with mixed precision (fp16, GradScaler)."""

import argparse
import logging

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from tqdm import tqdm


class DoubleConv(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(
            nn.Conv2d(cin, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
            nn.Conv2d(cout, cout, 3, padding=1, bias=False),
            nn.BatchNorm2d(cout),
            nn.ReLU(inplace=True),
        )


class UNet(nn.Module):
    def __init__(self, n_classes=2, base=64):
        super().__init__()
        c = [base, base * 2, base * 4, base * 8, base * 16]
        self.inc = DoubleConv(3, c[0])
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip(c, c[1:], strict=False))
        up = list(reversed(c))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(a, b, 2, stride=2) for a, b in zip(up, up[1:], strict=False)
        )
        self.conv = nn.ModuleList(DoubleConv(a, b) for a, b in zip(up, up[1:], strict=False))
        self.outc = nn.Conv2d(c[0], n_classes, 1)

    def forward(self, x):
        skips = [self.inc(x)]
        for down in self.down:
            skips.append(down(F.max_pool2d(skips[-1], 2)))
        x = skips.pop()
        for up, conv in zip(self.up, self.conv, strict=True):
            x = conv(torch.cat([skips.pop(), up(x)], dim=1))
        return self.outc(x)


class Discs(Dataset):
    """Images with one disc each, and its mask."""

    def __init__(self, n, size):
        self.n, self.size = n, size
        self.grid = torch.stack(
            torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        )

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        centre = torch.rand(2, generator=g) * self.size
        radius = (0.1 + 0.2 * torch.rand(1, generator=g)) * self.size
        mask = (self.grid - centre[:, None, None]).float().norm(dim=0) < radius
        image = mask.float() + 0.3 * torch.randn(3, self.size, self.size, generator=g)
        return {"image": image, "mask": mask.long()}


def dice_loss(probs, target):
    inter = 2 * (probs * target).sum(dim=(1, 2))
    return 1 - ((inter + 1) / (probs.sum(dim=(1, 2)) + target.sum(dim=(1, 2)) + 1)).mean()


def train_model(args, model, device):
    loader = DataLoader(
        Discs(args.images, args.size), batch_size=args.batch_size, shuffle=True, drop_last=True
    )
    optimizer = torch.optim.RMSprop(
        model.parameters(), lr=args.lr, weight_decay=1e-8, momentum=0.999, foreach=True
    )
    grad_scaler = torch.amp.GradScaler(device.type, enabled=args.amp)
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, args.epochs + 1):
        model.train()
        epoch_loss = 0
        with tqdm(total=len(loader) * args.batch_size, desc=f"Epoch {epoch}", unit="img") as pbar:
            for batch in loader:
                images, true_masks = batch["image"], batch["mask"]
                images = images.to(device=device, dtype=torch.float32)
                true_masks = true_masks.to(device=device, dtype=torch.long)
                with torch.autocast(device.type, dtype=torch.float16, enabled=args.amp):
                    masks_pred = model(images)
                    loss = criterion(masks_pred, true_masks)
                    probs = F.softmax(masks_pred, dim=1).float()[:, 1]
                    loss += dice_loss(probs, true_masks.float())
                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                grad_scaler.step(optimizer)
                grad_scaler.update()
                pbar.update(images.shape[0])
                epoch_loss += loss.item()
                pbar.set_postfix(**{"loss (batch)": loss.item()})
        logging.info("epoch %d: loss %.4f", epoch, epoch_loss / len(loader))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--epochs", "-e", type=int, default=5)
    p.add_argument("--batch-size", "-b", type=int, default=16)
    p.add_argument("--images", type=int, default=512)
    p.add_argument("--size", type=int, default=256)
    p.add_argument("--base", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-5)
    p.add_argument("--amp", action="store_true", default=False)
    args = p.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    logging.info("Using device %s", device)
    train_model(args, UNet(base=args.base).to(device=device), device)
