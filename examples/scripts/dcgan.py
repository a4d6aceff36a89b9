"""DCGAN: two models, two optimizers, on images of random stripes."""

import argparse

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset

real_label, fake_label = 1.0, 0.0


def weights_init(m):
    if isinstance(m, nn.Conv2d | nn.ConvTranspose2d):
        nn.init.normal_(m.weight, 0.0, 0.02)
    elif isinstance(m, nn.BatchNorm2d):
        nn.init.normal_(m.weight, 1.0, 0.02)
        nn.init.zeros_(m.bias)


def generator(nz, ngf, nc=3):
    return nn.Sequential(
        nn.ConvTranspose2d(nz, ngf * 8, 4, 1, 0, bias=False),
        nn.BatchNorm2d(ngf * 8),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 8, ngf * 4, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf * 4),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 4, ngf * 2, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf * 2),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf * 2, ngf, 4, 2, 1, bias=False),
        nn.BatchNorm2d(ngf),
        nn.ReLU(True),
        nn.ConvTranspose2d(ngf, nc, 4, 2, 1, bias=False),
        nn.Tanh(),
    )


def discriminator(ndf, nc=3):
    layers = [nn.Conv2d(nc, ndf, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=True)]
    for i in range(3):
        layers += [
            nn.Conv2d(ndf * 2**i, ndf * 2 ** (i + 1), 4, 2, 1, bias=False),
            nn.BatchNorm2d(ndf * 2 ** (i + 1)),
            nn.LeakyReLU(0.2, inplace=True),
        ]
    return nn.Sequential(*layers, nn.Conv2d(ndf * 8, 1, 4, 1, 0, bias=False), nn.Flatten(0))


def stripes(n):
    phase = torch.rand(n, 1, 1, 1) * 6.28
    return torch.sin(torch.linspace(0, 20, 64).view(1, 1, 1, 64) + phase).expand(n, 3, 64, 64)


def main(opt):
    torch.manual_seed(999)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    loader = DataLoader(TensorDataset(stripes(opt.images)), batch_size=opt.batch_size, shuffle=True)
    netG = generator(opt.nz, opt.ngf).to(device)
    netG.apply(weights_init)
    netD = discriminator(opt.ndf).to(device)
    netD.apply(weights_init)
    criterion = nn.BCEWithLogitsLoss()
    optimizerD = torch.optim.Adam(netD.parameters(), lr=opt.lr, betas=(0.5, 0.999))
    optimizerG = torch.optim.Adam(netG.parameters(), lr=opt.lr, betas=(0.5, 0.999))

    for epoch in range(opt.epochs):
        for i, (real,) in enumerate(loader):
            # (1) D: maximize log(D(x)) + log(1 - D(G(z)))
            netD.zero_grad()
            real = real.to(device)
            label = torch.full((real.size(0),), real_label, device=device)
            errD_real = criterion(netD(real), label)
            errD_real.backward()
            noise = torch.randn(real.size(0), opt.nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(fake_label)
            output = netD(fake.detach())
            errD_fake = criterion(output, label)
            errD_fake.backward()
            errD = errD_real + errD_fake
            optimizerD.step()
            # (2) G: maximize log(D(G(z)))
            netG.zero_grad()
            label.fill_(real_label)
            output = netD(fake)
            errG = criterion(output, label)
            errG.backward()
            optimizerG.step()
            if i % 10 == 0:
                print(f"[{epoch}/{opt.epochs}][{i}/{len(loader)}]", end=" ")
                print(f"Loss_D: {errD.item():.4f} Loss_G: {errG.item():.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=128)
    parser.add_argument("--images", type=int, default=12_800)
    parser.add_argument("--nz", type=int, default=100)
    parser.add_argument("--ngf", type=int, default=64)
    parser.add_argument("--ndf", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--lr", type=float, default=2e-4)
    main(parser.parse_args())
