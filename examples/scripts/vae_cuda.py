"""VAE. Needs a GPU."""

import argparse

import torch
import torch.nn as nn
import torch.nn.functional as F

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=512)
parser.add_argument("--hidden", type=int, default=4096)
parser.add_argument("--latent", type=int, default=256)
parser.add_argument("--steps", type=int, default=2000)
args = parser.parse_args()


class VAE(nn.Module):
    def __init__(self, hidden, latent):
        super().__init__()
        self.fc1 = nn.Linear(784, hidden)
        self.fc21 = nn.Linear(hidden, latent)
        self.fc22 = nn.Linear(hidden, latent)
        self.fc3 = nn.Linear(latent, hidden)
        self.fc4 = nn.Linear(hidden, 784)

    def encode(self, x):
        h = F.relu(self.fc1(x))
        return self.fc21(h), self.fc22(h)

    def reparameterize(self, mu, logvar):
        std = torch.exp(0.5 * logvar)
        eps = torch.randn(std.size(), device="cuda")
        return mu + eps * std

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x)
        z = self.reparameterize(mu, logvar)
        return self.decode(z), mu, logvar


def loss_function(recon, x, mu, logvar):
    bce = F.binary_cross_entropy(recon, x, reduction="sum")
    kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return bce + kld


torch.cuda.manual_seed_all(0)
model = VAE(args.hidden, args.latent).cuda()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
model.train()

for step in range(args.steps):
    x = torch.rand(args.batch_size, 784).cuda()
    optimizer.zero_grad()
    recon, mu, logvar = model(x)
    loss = loss_function(recon, x, mu, logvar)
    loss.backward()
    optimizer.step()
    if step % 100 == 0:
        print("step", step, "loss", loss.data / args.batch_size)

print("max memory (MB):", torch.cuda.max_memory_allocated() / 1e6)
