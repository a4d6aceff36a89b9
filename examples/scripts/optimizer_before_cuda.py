"""Matrix factorisation with side networks; the optimizer is made before the model moves."""

import torch
from torch import nn, optim


class Recommender(nn.Module):
    def __init__(self, users, items, dim, hidden):
        super().__init__()
        self.user = nn.Embedding(users, dim)
        self.item = nn.Embedding(items, dim)
        self.tower = nn.Sequential(
            nn.Linear(2 * dim, hidden),
            nn.ReLU(),
            nn.BatchNorm1d(hidden),
            nn.Linear(hidden, hidden // 2),
            nn.ReLU(),
            nn.Linear(hidden // 2, 1),
        )

    def forward(self, users, items):
        u, i = self.user(users), self.item(items)
        return (u * i).sum(-1) + self.tower(torch.cat([u, i], dim=-1)).squeeze(-1)


def main(users=200_000, items=50_000, dim=128, hidden=1024, batch_size=8192, steps=1000):
    torch.manual_seed(3)
    model = Recommender(users, items, dim, hidden)
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    scheduler = optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    loss_fn = nn.MSELoss()
    if torch.cuda.is_available():
        model.cuda()
    device = next(model.parameters()).device

    running_loss = 0.0
    for step in range(1, steps + 1):
        u = torch.randint(users, (batch_size,)).to(device)
        i = torch.randint(items, (batch_size,)).to(device)
        rating = ((u + i) % 5).float()
        prediction = model(u, i)
        loss = loss_fn(prediction, rating)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        running_loss += loss  # a tensor, with what hangs on it
        if step % 10 == 0:
            print(f"step {step}: loss {running_loss / 10:.4f}")
            running_loss = 0.0


if __name__ == "__main__":
    import sys

    main(**{key: int(value) for key, value in (arg.split("=") for arg in sys.argv[1:])})
