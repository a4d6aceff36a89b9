"""CIFAR-like image classification with PyTorch Lightning."""

import argparse

import pytorch_lightning as pl
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Residual(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)
        self.skip = nn.Conv2d(cin, cout, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(out)) + self.skip(x))


class LitResnet(pl.LightningModule):
    def __init__(self, width=64, blocks=2, lr=0.05, max_epochs=10):
        super().__init__()
        self.save_hyperparameters()
        layers = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        cin = width
        for stage in range(4):
            for block in range(blocks):
                cout = width * 2**stage
                layers.append(Residual(cin, cout, 2 if stage and not block else 1))
                cin = cout
        self.model = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(cin, 10)
        )

    def forward(self, x):
        return self.model(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        preds = self(x).argmax(dim=1)
        self.log("val_acc", (preds == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(
            self.parameters(), lr=self.hparams.lr, momentum=0.9, weight_decay=5e-4
        )
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.hparams.max_epochs)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


class Patterns(pl.LightningDataModule):
    def __init__(self, size, batch_size, num_workers=0):
        super().__init__()
        self.size, self.batch_size, self.num_workers = size, batch_size, num_workers

    def setup(self, stage=None):
        y = torch.randint(10, (self.size,))
        x = torch.randn(self.size, 3, 32, 32) + y[:, None, None, None] / 5
        cut = self.size * 4 // 5
        self.train_set, self.val_set = (
            TensorDataset(x[:cut], y[:cut]),
            TensorDataset(x[cut:], y[cut:]),
        )

    def train_dataloader(self):
        return DataLoader(
            self.train_set, self.batch_size, shuffle=True, num_workers=self.num_workers
        )

    def val_dataloader(self):
        return DataLoader(self.val_set, self.batch_size, num_workers=self.num_workers)


def cli_main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=512)
    parser.add_argument("--size", type=int, default=20_000)
    parser.add_argument("--max_epochs", type=int, default=10)
    parser.add_argument("--precision", default="32-true")
    args = parser.parse_args()
    pl.seed_everything(7)
    model = LitResnet(args.width, args.blocks, max_epochs=args.max_epochs)
    trainer = pl.Trainer(
        max_epochs=args.max_epochs,
        accelerator="auto",
        devices=1,
        precision=args.precision,
        log_every_n_steps=10,
    )
    trainer.fit(model, datamodule=Patterns(args.size, args.batch_size))
    print(f"train_loss: {trainer.callback_metrics['train_loss']:.4f}")


if __name__ == "__main__":
    cli_main()
