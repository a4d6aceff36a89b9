"""Transformer-XL as NVIDIA's DeepLearningExamples trains it on WikiText-103: mem_transformer.py.

fp16 is apex O2. JITLamb goes tensor by tensor, its elementwise stretches fused by TorchScript. With
`adaptive` the vocabulary is divided into four clusters. How many tokens fall into each depends on
the text: `_SHARES` is judgement, and most of the work does not depend on it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from accuracy import apex, by_tensor
from oomph.records.workload import Workload

_VOCABULARY = 267_735  # of WikiText-103
_ENDS = (0, 19_997, 39_997, 199_997, _VOCABULARY)  # of clusters of words, the frequent ones first
_SHARES = (0.93, 0.03, 0.035, 0.005)  # of a text's tokens in each cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    layers: int
    width: int
    heads: int
    ffn: int
    dropout: float
    attention_dropout: float


SIZES = {
    "base": Size(layers=16, width=512, heads=8, ffn=2048, dropout=0.1, attention_dropout=0.0),
    "large": Size(layers=18, width=1024, heads=16, ffn=4096, dropout=0.2, attention_dropout=0.2),
}
_HEAD = 64  # width of one head
_DIVISORS = {"base": 1, "large": 4}  # wt103_base.yaml, wt103_large.yaml: div_val


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        inner = size.heads * _HEAD
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * inner, bias=False)
        self.r = nn.Linear(size.width, inner, bias=False)
        self.out = nn.Linear(inner, size.width, bias=False)
        self.norm1, self.norm2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.drop, self.drop_attention = (
            nn.Dropout(size.dropout),
            nn.Dropout(size.attention_dropout),
        )
        self.ffn = nn.Sequential(
            nn.Linear(size.width, size.ffn),
            nn.ReLU(inplace=True),
            nn.Dropout(size.dropout),
            nn.Linear(size.ffn, size.width),
            nn.Dropout(size.dropout),
        )

    def forward(self, x: Any, places: Any, biases: Any, mask: Any, memory: Any) -> Any:
        length, batch, _ = x.shape
        q, k, v = torch.chunk(self.qkv(torch.cat([memory, x], 0)), 3, dim=-1)
        q = q[-length:].view(length, batch, self.heads, _HEAD)
        k, v = (each.view(-1, batch, self.heads, _HEAD) for each in (k, v))
        r = self.r(places).view(-1, self.heads, _HEAD)
        content = torch.einsum("ibnd,jbnd->bnij", q + biases[0], k)
        position = _shifted(torch.einsum("ibnd,jnd->bnij", q + biases[1], r))
        scores = _Scaled.apply(content, position)
        scores.masked_fill_(mask[None, None], -float("inf"))
        weights = self.drop_attention(F.softmax(scores, dim=3))
        attended = torch.einsum("bnij,jbnd->ibnd", weights, v).contiguous()
        x = self.norm1(x + self.drop(self.out(attended.view(length, batch, -1))))
        return self.norm2(x + self.ffn(x))


class _Scaled(torch.autograd.Function):
    """add_and_scale, which TorchScript makes one kernel, in both directions."""

    @staticmethod
    def forward(_: Any, one: Any, other: Any) -> Any:
        return torch.add(one, other, alpha=0.125)

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:
        gradient = gradients[0] * 0.125
        return gradient, gradient


def _shifted(x: Any) -> Any:
    zeros = torch.zeros((*x.shape[:3], 1), device=x.device, dtype=x.dtype)
    padded = torch.cat([zeros, x], dim=3)
    padded = padded.view(x.size(0), x.size(1), x.size(3) + 1, x.size(2))
    return padded.narrow(2, 1, padded.size(2) - 1).view_as(x)


# ---- words in and out ------------------------------------------------------------------------


class OneVocabulary(nn.Module):
    """One embedding for all words, tied to the output."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(_VOCABULARY, width)
        self.bias = nn.Parameter(torch.zeros(_VOCABULARY))

    def forward(self, tokens: Any) -> Any:
        return self.words(tokens)

    def losses(self, hidden: Any, targets: Any) -> Any:
        logits = F.linear(hidden, self.words.weight, self.bias)
        return -F.log_softmax(logits, dim=-1).gather(1, targets.reshape(-1, 1))


class Clusters(nn.Module):
    """Words by frequency: rare ones have narrower embeddings, `divisor` times per cluster."""

    def __init__(self, width: int, divisor: int) -> None:
        super().__init__()
        self.divisor = divisor
        sizes = [end - start for start, end in itertools.pairwise(_ENDS)]
        widths = [width // divisor**number for number in range(len(sizes))]
        if divisor == 1:  # one embedding, whose rows are divided
            self.words = nn.ParameterList([torch.empty(_VOCABULARY, width)])
        else:
            pairs = zip(sizes, widths, strict=True)
            self.words = nn.ParameterList(torch.empty(size, narrow) for size, narrow in pairs)
            self.projections = nn.ParameterList(torch.empty(width, narrow) for narrow in widths)
            self.first = nn.Parameter(torch.empty(width, widths[0]))  # of the output: not tied
        self.biases = nn.ParameterList(torch.zeros(size) for size in sizes)
        self.cluster_weight = nn.Parameter(torch.zeros(len(sizes) - 1, width))
        self.cluster_bias = nn.Parameter(torch.zeros(len(sizes) - 1))

    def forward(self, tokens: Any) -> Any:
        if self.divisor == 1:
            return F.embedding(tokens, self.words[0])
        flat = tokens.reshape(-1)
        out = torch.zeros(
            (len(flat), len(self.projections[0])), dtype=self.words[0].dtype, device=flat.device
        )
        for number, (start, end) in enumerate(itertools.pairwise(_ENDS)):
            places = _places(flat, number, start, end)
            found = F.embedding(flat.index_select(0, places) - start, self.words[number])
            out.index_copy_(0, places, F.linear(found, self.projections[number]))
        return out.view(*tokens.shape, -1)

    def losses(self, hidden: Any, targets: Any) -> Any:
        targets = targets.reshape(-1)
        head = self._log_softmax(hidden, 0)
        out = torch.zeros(len(targets), dtype=hidden.dtype, device=hidden.device)
        begin = 0
        for number, (start, end) in enumerate(itertools.pairwise(_ENDS)):
            places = _places(targets, number, start, end)
            wanted = (targets.index_select(0, places) - start)[:, None]
            of_head = head.index_select(0, places)
            if number:
                tail = self._log_softmax(hidden.index_select(0, places), number)
                found = of_head[:, -number] + tail.gather(1, wanted).squeeze(1)
            else:
                found = of_head.gather(1, wanted).squeeze(1)
            out[begin : begin + len(places)].copy_(-found)
            begin += len(places)
        return out

    def _log_softmax(self, hidden: Any, number: int) -> Any:
        weight, bias = self._rows(number), self.biases[number]
        if not number:
            weight = torch.cat([weight, self.cluster_weight], dim=0)
            bias = torch.cat([bias, self.cluster_bias], dim=0)
        if self.divisor > 1:
            hidden = hidden @ (self.projections[number] if number else self.first)
            return F.log_softmax(hidden @ weight.t() + bias, dim=1)
        return F.log_softmax(F.linear(hidden, weight, bias), dim=1)

    def _rows(self, number: int) -> Any:
        if self.divisor == 1:
            return self.words[0][_ENDS[number] : _ENDS[number + 1]]
        return self.words[number]


def _places(tokens: Any, number: int, start: int, end: int) -> Any:
    """Return which tokens are in a cluster: as many as its share, after the kernels that look."""
    is_inside = (tokens >= start) & (tokens < end)
    is_inside.sum()  # stands for nonzero, whose result has no size without values
    return torch.arange(max(round(_SHARES[number] * len(tokens)), 1), device=tokens.device)


# ---- the model -------------------------------------------------------------------------------


class TransformerXl(nn.Module):
    """With `memory`, the hidden states of the last segment, which each layer reads."""

    memory: torch.Tensor

    def __init__(self, size: Size, length: int, num_examples: int, words: nn.Module) -> None:
        super().__init__()
        self.words: Any = words
        self.content = nn.Parameter(torch.zeros(size.heads, _HEAD))
        self.position = nn.Parameter(torch.zeros(size.heads, _HEAD))
        self.layers = nn.ModuleList(Layer(size) for _ in range(size.layers))
        self.drop, self.width = nn.Dropout(size.dropout), size.width
        shape = (size.layers, length, num_examples, size.width)
        self.register_buffer("memory", torch.zeros(shape))
        self.register_buffer("frequencies", torch.zeros(size.width // 2))

    def forward(self, tokens: Any, targets: Any) -> Any:
        length = tokens.size(0)
        x = self.words(tokens)
        x.mul_(self.width**0.5)
        mask = torch.triu(x.new_ones(length, 2 * length), diagonal=1 + length).bool()
        order = torch.arange(2 * length - 1, -1, -1.0, device=x.device, dtype=x.dtype)
        angles = torch.ger(order, self.get_buffer("frequencies"))
        places = self.drop(torch.cat([angles.sin(), angles.cos()], dim=-1))[:, None, :]
        x, hidden = self.drop(x), []
        for layer, memory in zip(self.layers, self.memory, strict=True):
            hidden.append(x.detach())
            x = layer(x, places, (self.content, self.position), mask, memory)
        x = self.drop(x)
        self.memory = torch.stack(hidden)
        return self.words.losses(x.view(-1, self.width), targets)


def _loss(model: Any, batch: Any) -> Any:
    # The batch has the examples first, the model the tokens.
    tokens, targets = (each.t().contiguous() for each in batch)
    return model(tokens, targets).float().mean()


def jit_lamb(parameters: list[Any], gradients: list[Any], states: list[dict[str, Any]]) -> None:
    """Each tensor: three fused elementwise kernels, two norms, and a few kernels on scalars."""
    for p, gradient, state in zip(parameters, gradients, states, strict=True):
        if "exp_avg" not in state:
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
        state["exp_avg"] = torch.lerp(state["exp_avg"], gradient, 0.1)
        state["exp_avg_sq"] = torch.addcmul(state["exp_avg_sq"], gradient, gradient, value=0.001)
        step = torch.addcdiv(p, state["exp_avg"], state["exp_avg_sq"])
        weight_norm, step_norm = p.norm(p=2).clamp_(0, 10), step.norm(p=2)
        ratio = weight_norm / (step_norm + 1e-6)
        ratio = (weight_norm == 0.0) * 1.0 + (weight_norm != 0.0) * ratio
        p.copy_(torch.addcmul(p, step, ratio))


def workload(
    name: str, *, is_half: bool, length: int, num_examples: int, batch_size: int
) -> Workload:
    """Of "base" and "large" with one vocabulary, or with clusters: "base adaptive"."""
    size, _, adaptive = name.partition(" ")
    update = by_tensor.adam if name == "large" else jit_lamb
    width = SIZES[size].width

    def words() -> nn.Module:
        if adaptive:
            return Clusters(width, _DIVISORS[size])
        return OneVocabulary(width)

    def batch(n: int) -> Any:
        return tuple(torch.zeros(n, length, dtype=torch.long) for _ in range(2))

    def make() -> Any:
        model = TransformerXl(SIZES[size], length, num_examples, words())
        return apex.in_half(model) if is_half else model

    if not is_half:
        return Workload(
            model=make,
            batch=batch,
            loss=_loss,
            batch_size=batch_size,
            clip_grad_norm=0.25,
            optimizer=lambda ps: by_tensor.Plain(ps, update),
        )
    return Workload(
        model=make,
        batch=batch,
        loss=lambda model, examples: apex.scaled(_loss(model, examples)),
        optimizer=lambda ps: apex.MasterWeights(ps, update, max_norm=0.25),
        batch_size=batch_size,
    )
