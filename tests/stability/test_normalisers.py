"""What a loss may divide by: labels before inputs that hold the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from oomph.stability.normalisers import weighings

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("batch", "labels"),
    [
        ({"ids": IDS, "labels": IDS.clone()}, "['labels']"),
        ({"targets": IDS.clone(), "ids": IDS}, "['targets']"),
        ((IDS, IDS.clone()), "[1]"),
    ],
)
def test_labels_are_likelier_than_inputs_with_the_same_numbers(batch: Any, labels: str) -> None:
    assert labels in next(iter(weighings(batch, []))).counted
