"""What a loss is a mean of is read off two examples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812 - as torch names it

from oomph.errors import UsageError
from oomph.training import micro_batches
from oomph.training.evaluation import telling_pieces, weights_in
from training.adapters import jobs

NUM = 6
CLASS_WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0])


def batch() -> dict[str, torch.Tensor]:
    return jobs.collate(jobs.examples(NUM))


def logits(part: Any) -> Any:
    """Of each token, by its number: no model is needed."""
    return torch.sin(part["ids"].unsqueeze(-1) * torch.arange(1.0, jobs.NUM_CLASSES + 1))


def of_tokens(part: Any, **options: Any) -> Any:
    return F.cross_entropy(logits(part).flatten(0, 1), part["labels"].flatten(), **options)


def of_next_tokens(part: Any) -> Any:
    some, labels = logits(part)[:, :-1], part["labels"][:, 1:]
    return F.cross_entropy(some.flatten(0, 1), labels.flatten())


def of_examples(part: Any) -> Any:
    return logits(part).square().mean((1, 2)).mean()


def summed(part: Any) -> Any:
    return of_tokens(part, reduction="sum") / 50


LOSSES = {
    "tokens": of_tokens,
    "next-tokens": of_next_tokens,
    "mean": of_examples,
    "sum": summed,
}


def found(loss: Any, data: Any, **options: Any) -> Any:
    first, second, both = telling_pieces(data, NUM, lambda sizes: micro_batches.split(data, sizes))
    losses = float(loss(first)), float(loss(second))
    return weights_in(first, second, losses, float(loss(both)), **options)[0]


@pytest.mark.parametrize("kind", LOSSES)
def test_each_kind_of_loss_is_told_from_the_others(kind: str) -> None:
    assert found(LOSSES[kind], batch()) == kind


@pytest.mark.parametrize("kind", ["tokens", "mean", "sum"])
def test_half_precision_is_rounding_and_no_other_kind(kind: str) -> None:
    def rounded(part: Any) -> Any:
        return LOSSES[kind](part).to(torch.bfloat16)

    assert found(rounded, batch(), is_rounded=True) == kind


def test_a_classifier_counts_its_labels() -> None:
    data = {"ids": batch()["ids"], "labels": torch.tensor([1, 1, -100, 2, 0, 3])}

    def loss(part: Any) -> Any:
        return F.cross_entropy(logits(part).mean(1), part["labels"])

    assert found(loss, data) == "tokens"  # one for each example, and none where it is ignored


@pytest.mark.parametrize("couples", ["pairs", "classes", "a constant"])
def test_what_is_no_such_loss_is_refused(couples: str) -> None:
    def loss(part: Any) -> Any:
        if couples == "pairs":
            means = logits(part).mean(1)
            return (means @ means.t()).logsumexp(1).mean()
        if couples == "classes":
            return of_tokens(part, weight=CLASS_WEIGHTS)
        return summed(part) + 1  # counted once for each piece

    with pytest.raises(UsageError, match="cannot tell"):
        found(loss, batch())


def test_a_loss_that_is_zero_tells_nothing() -> None:
    with pytest.raises(UsageError, match="a sum as well as a mean"):
        found(lambda _: 0.0, batch())
