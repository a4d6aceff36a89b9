"""What each piece counts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from oomph.errors import UsageError
from oomph.training.micro_batches import labels_of, weigher, weights_of

LABELS = torch.tensor([[1, 2, -100], [-100, -100, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        ("mean", [2, 1]),
        ("sum", [1, 1]),
        ("tokens", [3, 3]),
        ("next-tokens", [2, 2]),  # without the first of each row
        (lambda batch: float(batch["labels"].clamp(min=0).sum()), [6.0, 15.0]),
        (lambda batch: (batch["labels"] == 3).sum() + 1, [2, 1]),
    ],
)
def test_pieces_count_what_the_loss_is_a_mean_of(weight: Any, expected: list[float]) -> None:
    pieces = [{"labels": LABELS[:2]}, {"labels": LABELS[2:]}]
    assert weights_of(pieces, [2, 1], weigher(weight)) == expected


@pytest.mark.parametrize(
    "batch",
    [{"labels": LABELS}, {"x": 0, "target": LABELS}, (0, LABELS), SimpleNamespace(label=LABELS)],
)
def test_labels_are_found_by_name_or_as_the_last(batch: Any) -> None:
    assert labels_of(batch) is LABELS


@pytest.mark.parametrize("batch", [{"x": LABELS}, (0, torch.zeros(3)), SimpleNamespace(), ()])
def test_where_no_labels_are_found_it_says_so(batch: Any) -> None:
    with pytest.raises(UsageError, match="no labels were found"):
        labels_of(batch)


def test_a_batch_in_which_nothing_counts_is_refused() -> None:
    with pytest.raises(UsageError, match="have the weights 0, 0"):
        weights_of([{"labels": LABELS[:1, 2:]}] * 2, [1, 1], weigher("tokens"))
    with pytest.raises(UsageError, match="weigh"):
        weights_of([0, 1], [1, 1], weigher(lambda piece: float("nan") if piece else 1.0))


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(UsageError, match="weight='median' is unknown"):
        weigher("median")  # type: ignore[arg-type]
