"""Ways to write a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812 - as torch names it

from rehearsing.zoo.attention import TransformerBlock, Vit


class Lora(nn.Module):
    """A frozen layer and a small one beside it."""

    def __init__(self, layer: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Linear(layer.in_features, rank, bias=False)
        self.b = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x: Any) -> Any:
        return self.layer(x) + 0.5 * self.b(F.dropout(self.a(x), 0.1))


class Adapted(Vit):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            assert isinstance(block, TransformerBlock)
            block.attention.into = Lora(block.attention.into)  # type: ignore[assignment]
            block.attention.out = Lora(block.attention.out)  # type: ignore[assignment]


class Branches(nn.Module):
    """Gradients meet while somebody else still holds one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        x = self.first(x)
        y, z = x * 2, x * 3
        a, b, s = y.relu(), z.sigmoid(), y + z
        turned = (x.t().tanh().t() + x.t().sin().t()).view(-1)
        parts = x.chunk(2, -1)
        return s.relu().sum() + a.sum() + b.sum() + turned.sum() + (parts[0] * parts[1]).sum()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Any) -> Any:
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        (x,) = context.saved_tensors
        return gradients[0] * x + x * gradients[0]  # an addition that autograd does not make


class OwnFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 8)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return Square.apply(y) + y


class Reparametrised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.weight_norm(nn.Linear(20, 12))
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(12, 4))

    def forward(self, x: Any) -> Any:
        return self.second(torch.tanh(self.first(x)))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.norm = nn.RMSNorm(8)
        self.head = nn.Linear(8, 50, bias=False)
        self.head.weight = self.table.weight
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.head(self.norm(F.silu(self.layer(self.table(x)))))
        return F.cross_entropy(y.flatten(0, 1), x.flatten())


class Masked(nn.Module):
    """Contents decide shapes and branches."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 8)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        kept = y[y > 0]
        loss = kept.float().sum() + y.masked_select(x[:, :8] > 0).float().mean()
        if loss > 100:
            loss = loss * 0.5
        assert loss.item() < 1e9
        y = y.clone()
        y[0] = 3
        return loss + y.float().mean()


class Mathematics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 8)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        near = torch.cdist(y.float(), y.float()).topk(2, -1).values
        order = y.sort(-1).values.cumsum(-1)
        waves = torch.fft.rfft(y.float()).abs()
        return near.sum() + order.sum() + waves.mean() + torch.einsum("bi,bj->ij", y, y).sum()


class Composite(nn.Module):
    """Ops that torch composes of others on the meta device, and not on CUDA."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(20, 8), nn.RMSNorm(8)

    def forward(self, x: Any) -> Any:
        y = F.mish(self.norm(self.layer(x)))
        hot = F.one_hot(torch.arange(len(x), device=x.device) % 8, 8)
        return (y.softmax(-1, dtype=torch.float32) * hot).sum()


class Cells(nn.Module):
    """A recurrence written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(8, 6), nn.GRUCell(6, 5)

    def forward(self, x: Any) -> Any:
        hidden, state, outs = None, None, []
        for step in x.unbind(1):
            hidden = self.first(step, hidden)
            state = self.second(hidden[0], state)
            outs.append(state)
        return torch.stack(outs, 1).square()


class Losses(nn.Module):
    """Losses that torch keeps in a block of the size of what was reduced."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 8)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        target = x[:, :8].to(y.dtype)
        loss = F.mse_loss(y, target) + F.smooth_l1_loss(y, target, reduction="sum")
        loss = loss + F.soft_margin_loss(y, target) + F.huber_loss(y, target) + F.l1_loss(y, target)
        loss = loss + F.binary_cross_entropy_with_logits(y, target) + F.kl_div(y, target)
        with torch.autocast("cuda", enabled=False):  # it refuses this loss
            likely = F.binary_cross_entropy(y.float().sigmoid(), target.float())
        return loss + likely + F.mse_loss(y, target, reduction="none").mean()
