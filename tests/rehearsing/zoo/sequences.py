"""Recurrent, sparse and routed models."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it


class Recurrent(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12)
        self.rnn = kind(12, 10, batch_first=True, **options)
        self.head = nn.Linear(10 * (1 + self.rnn.bidirectional), 5)

    def forward(self, x: Any) -> Any:
        y, _ = self.rnn(self.table(x))
        return self.head(y[:, -1])


class Packed(nn.Module):
    """Sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 10, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(20, 5)

    def forward(self, x: Any) -> Any:
        lengths = torch.full((len(x),), x.shape[1] - 1)
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True)
        return self.head(y.mean(1))


class Graph(nn.Module):
    """Messages along edges: gather, index_add, scatter."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(8, 8), nn.Linear(16, 8)

    def forward(self, x: Any, edges: Any) -> Any:
        nodes, (source, target) = x.flatten(0, 1), edges.unbind(1)
        for _ in range(2):
            sent = F.relu(self.message(nodes[source]))
            got = torch.zeros_like(sent).index_add(0, target, sent)
            most = torch.zeros_like(sent).scatter_reduce(
                0, target[:, None].expand_as(sent), sent, "amax"
            )
            nodes = self.update(torch.cat([got, most], -1))
        return nodes.gather(1, source[: len(nodes), None] % 8).sum() + nodes.pow(2).mean()


class Experts(nn.Module):
    """A mixture of experts with a capacity: shapes do not depend on the routing."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.wide = nn.Parameter(torch.rand(4, 8, 16))
        self.narrow = nn.Parameter(torch.rand(4, 16, 8))

    def forward(self, x: Any) -> Any:
        x = x.flatten(0, 1)
        share, chosen = self.router(x).softmax(-1).topk(2, -1)
        gates = torch.zeros_like(self.router(x)).to(share.dtype).scatter(1, chosen, share)
        best, rows = gates.t().topk(len(x) // 2, -1)
        inside = torch.bmm(F.silu(torch.bmm(x[rows], self.wide)), self.narrow)
        given = (inside * best[..., None]).flatten(0, 1).to(x.dtype)
        out = torch.zeros_like(x).index_add(0, rows.flatten(), given)
        return (x + out).square().mean()


class RoutedByWhere(nn.Module):
    """A mixture of experts where each takes the rows that chose it: of unknown number."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 3)
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: Any) -> Any:
        x = x.flatten(0, 1)
        share, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            out = out.index_add(
                0, rows, expert(x[rows]).to(x.dtype) * share[rows, None].to(x.dtype)
            )
        return out.square()


class Scan(nn.Module):
    """A selective state space, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(8, 24)
        self.conv = nn.Conv1d(8, 8, 4, groups=8, padding=3)
        self.log_a = nn.Parameter(torch.zeros(8, 4))
        self.of_b, self.of_c = nn.Linear(8, 4), nn.Linear(8, 4)
        self.out = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        u, gate, step = self.into(x).chunk(3, -1)
        u = F.silu(self.conv(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        b, c, step = self.of_b(u), self.of_c(u), F.softplus(step)
        state = torch.zeros(len(x), 8, 4, device=x.device, dtype=x.dtype)
        outs = []
        for t in range(x.shape[1]):
            decay = torch.exp(-step[:, t, :, None] * self.log_a.exp())
            state = decay * state + (step[:, t] * u[:, t])[..., None] * b[:, t, None]
            outs.append((state * c[:, t, None]).sum(-1))
        return self.out(torch.stack(outs, 1) * F.silu(gate)).square()


class Bags(nn.Module):
    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(50, 8, mode="sum", sparse=sparse)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Any) -> Any:
        return self.head(self.bags(x))


class SparseTable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def forward(self, x: Any) -> Any:
        return self.table(x).sum(1).square()


class Speech(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(8, 11)

    def forward(self, x: Any) -> Any:
        n = len(x)
        log = self.net(x).float().log_softmax(-1).transpose(0, 1)
        targets = torch.ones(n, 3, dtype=torch.long, device=x.device)
        return F.ctc_loss(log, targets, torch.full((n,), 12), torch.full((n,), 3))
