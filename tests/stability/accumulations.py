"""Models and losses whose examples come apart, and some whose do not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from oomph.records.workload import Workload

CLASSES, WIDTH, LENGTH, WORDS = 5, 12, 7, 20


@dataclass(frozen=True)
class Case:
    """A workload, and what the check should say of it."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Any]
    normaliser: str | None = "mean"  # None: the examples do not come apart
    module: str | None = None  # where they meet; None: in the loss
    said: str = ""  # part of the conclusion or of a finding

    @property
    def workload(self) -> Workload:
        return Workload(
            model=self.model,
            batch=self.batch,
            loss=self.loss,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            batch_size=32,
        )


# ---- batches -----------------------------------------------------------------------------------


def rows(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(n, WIDTH), "y": torch.randint(0, CLASSES, (n,))}


def images(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(n, 3, 8, 8), "y": torch.randint(0, CLASSES, (n,))}


def maps(n: int) -> dict[str, torch.Tensor]:
    """Images with a label for each pixel, some of which are ignored."""
    y = torch.randint(0, CLASSES, (n, 8, 8))
    return {"x": torch.randn(n, 3, 8, 8), "y": y.masked_fill(torch.rand(n, 8, 8) < 0.3, 255)}


def sentences(n: int) -> dict[str, torch.Tensor]:
    """Sentences of different lengths, padded with -100."""
    x = torch.randint(1, WORDS, (n, LENGTH))
    lengths = torch.randint(2, LENGTH + 1, (n,))
    is_padding = torch.arange(LENGTH)[None] >= lengths[:, None]
    return {
        "x": x.masked_fill(is_padding, 0),
        "y": torch.randint(0, CLASSES, (n, LENGTH)).masked_fill(is_padding, -100),
        "mask": (~is_padding).long(),
        "lengths": lengths,
    }


def time_first(n: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(LENGTH, n, WIDTH), "y": torch.randint(0, CLASSES, (n,))}


def pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(n, WIDTH)
    return x, x + 0.1 * torch.randn(n, WIDTH)


def triplets(n: int) -> list[torch.Tensor]:
    return [torch.randn(n, WIDTH) for _ in range(3)]


# ---- models ------------------------------------------------------------------------------------


def mlp(*between: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Linear(WIDTH, 16), *(make() for make in between), nn.Tanh(), nn.Linear(16, CLASSES)
    )


def cnn(norm: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), norm(), nn.GELU(), nn.Flatten(), nn.Linear(288, CLASSES)
    )


def pixels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, CLASSES, 1))


def frozen_norm() -> nn.Module:
    return nn.BatchNorm2d(8).eval()


def frozen_sync_norm() -> nn.Module:
    return nn.SyncBatchNorm(8).eval()


class Tagger(nn.Module):
    """A transformer that gives a class for each word."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.layer(self.words(x)))


class TiedModel(nn.Module):
    """A language model with one matrix for words in and out, and fp32 inside as transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.mix = nn.GRU(16, 16, batch_first=True)
        self.head = nn.Linear(16, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.mix(self.words(x))[0]
        hidden = hidden.float() * torch.rsqrt(hidden.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.head(hidden.to(self.head.weight.dtype))


class TimeFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.LSTM(WIDTH, 16), nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        start = torch.zeros(1, x.size(1), 16)
        return self.head(self.mix(x, (start, start))[0][-1])


class Experts(nn.Module):
    """Two experts, and the loss that keeps them equally busy over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, CLASSES) for _ in range(2))

    def forward(self, x: torch.Tensor) -> Any:
        shares = self.gate(x).softmax(-1)
        out = sum(shares[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))
        busy = functional.one_hot(shares.argmax(-1), 2).to(shares.dtype).mean(0)
        return out, 2 * (busy * shares.mean(0)).sum()


class WithExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.moe = Experts()

    def forward(self, x: torch.Tensor) -> Any:
        return self.moe(x)


class Autoencoder(nn.Module):
    """A variational one: noise is drawn for the whole batch at once."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(WIDTH, 8), nn.Linear(4, WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        mean, log_var = self.encode(x).chunk(2, -1)
        return self.decode(mean + torch.randn_like(mean) * (log_var / 2).exp()), mean, log_var


class Centred(nn.Module):
    """Subtracts the mean of the batch, in code of its own between two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, 16)
        self.outside = nn.Linear(16, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inside(x)
        return self.outside((hidden - hidden.mean(0)).tanh())


class WithDropPath(nn.Module):
    """Whole examples leave out a branch, as stochastic depth does it."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> Any:
        kept = x.new_empty(x.size(0), 1).bernoulli_(0.7) / 0.7
        return self.head(x + kept * self.branch(x))


# ---- losses ------------------------------------------------------------------------------------


def cross_entropy(**options: Any) -> Callable[[Any, Any], Any]:
    return lambda model, batch: functional.cross_entropy(model(batch["x"]), batch["y"], **options)


def per_word(**options: Any) -> Callable[[Any, Any], Any]:
    return lambda model, batch: functional.cross_entropy(
        model(batch["x"]).flatten(0, 1), batch["y"].flatten(), **options
    )


def class_weights(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    weight = torch.arange(1.0, CLASSES + 1).to(logits)
    return functional.cross_entropy(logits, batch["y"], weight=weight)


WEIGHTED = nn.CrossEntropyLoss(weight=torch.arange(1.0, CLASSES + 1))  # in fp32, outside


def by_hand_per_word(model: Any, batch: Any) -> Any:
    losses = functional.cross_entropy(
        model(batch["x"]).flatten(0, 1), batch["y"].flatten(), reduction="none"
    )
    mask = batch["mask"].flatten()
    return (losses * mask).sum() / mask.sum()


def mean_of_sentence_means(model: Any, batch: Any) -> Any:
    logits = model(batch["x"])
    losses = functional.cross_entropy(logits.transpose(1, 2), batch["y"], reduction="none")
    return (losses.sum(1) / batch["lengths"]).mean()


def next_word(model: Any, batch: Any) -> Any:
    """A language model's loss: padding is word 0."""
    logits = model(batch["x"])[:, :-1]
    return functional.cross_entropy(
        logits.flatten(0, 1), batch["x"][:, 1:].flatten(), ignore_index=0
    )


def focal(model: Any, batch: Any) -> Any:
    losses = functional.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return ((1 - torch.exp(-losses)) ** 2 * losses).mean()


def focal_per_positive(model: Any, batch: Any) -> Any:
    """RetinaNet's: the sum divided by the number of positives."""
    targets = functional.one_hot(batch["y"], CLASSES)[:, 1:].to(torch.get_default_dtype())
    losses = functional.binary_cross_entropy_with_logits(
        model(batch["x"])[:, 1:], targets, reduction="sum"
    )
    return losses / targets.sum()


def ctc(model: Any, batch: Any) -> Any:
    """mean divides by each target's length and then by the examples."""
    logits = model(batch["x"]).transpose(0, 1).log_softmax(-1)
    targets = batch["x"][:, :2] % (CLASSES - 1) + 1
    n = targets.size(0)
    return functional.ctc_loss(logits, targets, torch.full((n,), LENGTH), torch.full((n,), 2))


def triplet(model: Any, batch: Any) -> Any:
    anchor, positive, negative = (model(x) for x in batch)
    return functional.triplet_margin_loss(anchor, positive, negative, margin=5.0)


def hardest_triplet(model: Any, batch: Any) -> Any:
    """Batch-hard mining: for each anchor the nearest of another class."""
    out = model(batch["x"])
    apart = torch.cdist(out, out + 1e-3)
    other = batch["y"][:, None] != batch["y"][None]
    return apart.masked_fill(~other, 1e3).min(1).values.clamp(max=10).mean()


def info_nce(model: Any, batch: Any) -> Any:
    one, other = (functional.normalize(model(x), dim=-1) for x in batch)
    return functional.cross_entropy(one @ other.T / 0.1, torch.arange(one.size(0)))


def barlow(model: Any, batch: Any) -> Any:
    one, other = (model(x) for x in batch)
    one, other = ((z - z.mean(0)) / z.std(0) for z in (one, other))
    across = one.T @ other / one.size(0)
    return ((across - torch.eye(CLASSES).to(across)) ** 2).sum()


def batch_dice(model: Any, batch: Any) -> Any:
    chance, truth = model(batch["x"]).softmax(1)[:, 1], (batch["y"] == 1).double()
    return 1 - 2 * (chance * truth).sum() / (chance.sum() + truth.sum())


def dice_per_example(model: Any, batch: Any) -> Any:
    chance, truth = model(batch["x"]).softmax(1)[:, 1], (batch["y"] == 1).double()
    both, all_ = (chance * truth).sum((1, 2)), chance.sum((1, 2)) + truth.sum((1, 2))
    return (1 - 2 * both / all_).mean()


def with_balance(model: Any, batch: Any) -> Any:
    out, balance = model(batch["x"])
    return functional.cross_entropy(out, batch["y"]) + 0.1 * balance


def mixup(model: Any, batch: Any) -> Any:
    other = torch.randperm(batch["x"].size(0))
    logits = model(0.7 * batch["x"] + 0.3 * batch["x"][other])
    return 0.7 * functional.cross_entropy(logits, batch["y"]) + 0.3 * functional.cross_entropy(
        logits, batch["y"][other]
    )


def sampled_negatives(model: Any, batch: Any) -> Any:
    """Each example against another one that is drawn from the batch."""
    one, other = (model(x) for x in batch)
    n = one.size(0)
    negative = other[torch.randint(0, n, (n,))]
    return functional.softplus((one * negative).sum(-1) - (one * other).sum(-1)).mean()


def with_decay(reduction: str) -> Callable[[Any, Any], Any]:
    def loss(model: Any, batch: Any) -> Any:
        decay = 0.1 * sum(p.square().sum() for p in model.parameters())
        return functional.cross_entropy(model(batch["x"]), batch["y"], reduction=reduction) + decay

    return loss


def evidence_bound(model: Any, batch: Any) -> Any:
    again, mean, log_var = model(batch["x"])
    divergence = -0.5 * (1 + log_var - mean**2 - log_var.exp()).sum(-1).mean()
    return functional.mse_loss(again, batch["x"]) + divergence


def denoising(model: Any, batch: Any) -> Any:
    """A diffusion step: a time and noise for each example."""
    time = torch.randint(0, 10, (batch["x"].size(0), 1)) / 10
    noise = torch.randn_like(batch["x"])
    return functional.mse_loss(model((1 - time) * batch["x"] + time * noise), noise[:, :CLASSES])


def gradient_penalty(model: Any, batch: Any) -> Any:
    x = batch["x"].requires_grad_()
    out = model(x).sum(-1)
    slope = torch.autograd.grad(out.sum(), x, create_graph=True)[0]
    return out.mean() + 10 * ((slope.norm(dim=-1) - 1) ** 2).mean()


def two_divisors(model: Any, batch: Any) -> Any:
    """One term per word and one per sentence: no weight is right for both."""
    logits = model(batch["x"])
    words = functional.cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
    return words + logits.mean(1).square().mean()


def frames(n: int) -> dict[str, torch.Tensor]:
    """Four frames of each clip, one after the other."""
    return {"x": torch.randn(4 * n, WIDTH), "y": torch.randint(0, CLASSES, (n,))}


def over_frames(model: Any, batch: Any) -> Any:
    return functional.cross_entropy(model(batch["x"]).unflatten(0, (-1, 4)).mean(1), batch["y"])


def listed(n: int) -> dict[str, Any]:
    """Targets as a list with an item for each example, as detectors have them."""
    return {"x": torch.randn(n, WIDTH), "y": [torch.randn(1 + i % 3) for i in range(n)]}


def over_list(model: Any, batch: Any) -> Any:
    out = model(batch["x"])
    return sum(
        (row[: len(t)] - t.to(row)).square().sum() for row, t in zip(out, batch["y"], strict=True)
    )


CASES = {
    # Those of the study that the check was made from.
    "an MLP": Case(mlp(), rows, cross_entropy()),
    "an MLP with dropout": Case(mlp(nn.Dropout), rows, cross_entropy()),
    "GroupNorm": Case(cnn(lambda: nn.GroupNorm(2, 8)), images, cross_entropy()),
    "LayerNorm": Case(cnn(lambda: nn.LayerNorm([8, 6, 6])), images, cross_entropy()),
    "InstanceNorm": Case(cnn(lambda: nn.InstanceNorm2d(8)), images, cross_entropy()),
    "BatchNorm in eval mode": Case(cnn(frozen_norm), images, cross_entropy()),
    "BatchNorm": Case(
        cnn(lambda: nn.BatchNorm2d(8)), images, cross_entropy(), None, "1", "statistics"
    ),
    "a spectral norm": Case(
        lambda: nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, CLASSES))),
        rows,
        cross_entropy(),
        said="once for each",
    ),
    "a mean with weight decay": Case(mlp(), rows, with_decay("mean")),
    "a sum with weight decay": Case(
        mlp(), rows, with_decay("sum"), None, None, "does not depend on the data"
    ),
    "a sum over words": Case(Tagger, sentences, per_word(reduction="sum"), "sum"),
    "a mean over words that are not ignored": Case(
        Tagger, sentences, per_word(), "targets", said="not ignored"
    ),
    "class weights": Case(mlp(), rows, class_weights, "class weights"),
    "InfoNCE": Case(mlp(), pairs, info_nce, None, None, "every other"),
    "Barlow Twins": Case(mlp(), pairs, barlow, None, None, "combines examples"),
    "dice of the batch": Case(pixels, maps, batch_dice, None, None, "ratio of sums"),
    "experts with a loss for balance": Case(
        WithExperts, rows, with_balance, None, "moe", "one value for the whole batch"
    ),
    "mixup in the loss": Case(mlp(), rows, mixup, None, None, "mixed"),
    # Others.
    "label smoothing": Case(mlp(), rows, cross_entropy(label_smoothing=0.1)),
    "label smoothing over words": Case(Tagger, sentences, per_word(label_smoothing=0.1), "targets"),
    "class weights of the loss's own": Case(
        mlp(), rows, lambda model, batch: WEIGHTED(model(batch["x"]), batch["y"]), "class weights"
    ),
    "focal loss": Case(mlp(), rows, focal),
    "focal loss per positive": Case(mlp(), rows, focal_per_positive, "targets", said="not 0"),
    "CTC": Case(Tagger, sentences, ctc),
    "triplets that are given": Case(mlp(), triplets, triplet),
    "the hardest triplets of the batch": Case(
        mlp(), rows, hardest_triplet, None, None, "every other"
    ),
    "dice per example": Case(pixels, maps, dice_per_example),
    "pixels that are ignored": Case(pixels, maps, cross_entropy(ignore_index=255), "targets"),
    "a mask by hand": Case(Tagger, sentences, by_hand_per_word, "targets", said="that are not"),
    "means of sentences": Case(Tagger, sentences, mean_of_sentence_means),
    "the next word with tied weights": Case(TiedModel, sentences, next_word, "targets"),
    "an LSTM with time first": Case(TimeFirst, time_first, cross_entropy()),
    "SyncBatchNorm in eval mode": Case(cnn(frozen_sync_norm), images, cross_entropy()),
    "BatchNorm1d deep inside": Case(
        lambda: nn.Sequential(
            nn.Linear(WIDTH, 16), nn.Sequential(nn.BatchNorm1d(16)), nn.Linear(16, CLASSES)
        ),
        rows,
        cross_entropy(),
        None,
        "1.0",
        "BatchNorm1d",
    ),
    "the batch's mean taken by hand": Case(Centred, rows, cross_entropy(), None, "", "Centred"),
    "a variational autoencoder": Case(Autoencoder, rows, evidence_bound),
    "a diffusion step": Case(mlp(), rows, denoising),
    "stochastic depth": Case(WithDropPath, rows, cross_entropy()),
    "a gradient penalty": Case(mlp(), rows, gradient_penalty),
    "negatives drawn from the batch": Case(mlp(), pairs, sampled_negatives, None, None, "mixed"),
    "two terms with different divisors": Case(
        Tagger, sentences, two_divisors, None, None, "different things"
    ),
    "frames in one dimension": Case(mlp(), frames, over_frames),
    "targets in a list": Case(mlp(), listed, over_list, "sum"),
}
