"""Word-level language model with an LSTM: truncated BPTT, clipping, NaN check, early stop."""

import argparse
import math
import sys
from dataclasses import dataclass

import torch
import torch.nn as nn


@dataclass
class Config:
    vocab: int = 33278
    emsize: int = 650
    nhid: int = 650
    nlayers: int = 2
    dropout: float = 0.5
    bptt: int = 35
    batch_size: int = 128
    lr: float = 1e-3
    clip: float = 0.25
    patience: int = 5


class RNNModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.drop = nn.Dropout(cfg.dropout)
        self.encoder = nn.Embedding(cfg.vocab, cfg.emsize)
        self.rnn = nn.LSTM(cfg.emsize, cfg.nhid, cfg.nlayers, dropout=cfg.dropout)
        self.decoder = nn.Linear(cfg.nhid, cfg.vocab)
        self.nhid, self.nlayers = cfg.nhid, cfg.nlayers

    def forward(self, tokens, hidden):
        emb = self.drop(self.encoder(tokens))
        output, hidden = self.rnn(emb, hidden)
        return self.decoder(self.drop(output)), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        shape = (self.nlayers, bsz, self.nhid)
        return weight.new_zeros(shape), weight.new_zeros(shape)


def detach(hidden):
    return tuple(h.detach() for h in hidden)


def batchify(tokens, bsz):
    n = len(tokens) // bsz
    return tokens[: n * bsz].view(bsz, n).t().contiguous()


def train_epoch(model, data, optimizer, criterion, cfg, device):
    model.train()
    total, count = 0.0, 0
    hidden = model.init_hidden(cfg.batch_size)
    for i in range(0, len(data) - 1 - cfg.bptt, cfg.bptt):
        source = data[i : i + cfg.bptt].to(device)
        target = data[i + 1 : i + 1 + cfg.bptt].to(device)
        model.zero_grad()
        hidden = detach(hidden)
        output, hidden = model(source, hidden)
        loss = criterion(output.view(-1, cfg.vocab), target.reshape(-1))
        if torch.isnan(loss):
            print("loss is NaN, stopping", file=sys.stderr)
            sys.exit(1)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        optimizer.step()
        total, count = total + loss.item(), count + 1
        if count % 10 == 0:
            print(f"| {count:4d} batches | loss {loss:5.2f} | ppl {math.exp(total / count):8.2f}")
    return total / count


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=500_000)
    for name, value in vars(Config()).items():
        parser.add_argument(f"--{name}", type=type(value), default=value)
    args = vars(parser.parse_args())
    epochs, num_tokens = args.pop("epochs"), args.pop("tokens")
    cfg = Config(**args)

    torch.manual_seed(1111)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    data = batchify((torch.arange(num_tokens) // 3) % cfg.vocab, cfg.batch_size)
    model = RNNModel(cfg).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg.lr)
    criterion = nn.CrossEntropyLoss()

    best, bad_epochs = float("inf"), 0
    for epoch in range(1, epochs + 1):
        loss = train_epoch(model, data, optimizer, criterion, cfg, device)
        print(f"epoch {epoch}: loss {loss:.3f}")
        if loss < best - 1e-3:
            best, bad_epochs = loss, 0
        else:
            bad_epochs += 1
        if bad_epochs >= cfg.patience:
            print("no progress, stopping early")
            break


if __name__ == "__main__":
    main()
