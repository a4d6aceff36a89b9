"""Batches of any make are taken apart by example, and put together of the same types."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from oomph.errors import UsageError
from oomph.stability.examples import take, with_values


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Data:
    x: torch.Tensor
    words: list[str]


class Encoding(UserDict):  # type: ignore[type-arg]
    """As transformers have it: keys are attributes, too."""

    def __getattr__(self, name: str) -> Any:
        return self.data[name]


def test_named_tuples_dataclasses_and_encodings_stay_what_they_are() -> None:
    named = take(lambda n: Named(torch.arange(n), torch.ones(n, 2)), 8).piece(3, 8)
    assert isinstance(named, Named)
    assert named.x.tolist() == [3, 4, 5, 6, 7]
    data = take(lambda n: Data(torch.ones(n, 2), [str(i) for i in range(n)]), 8).piece(0, 3)
    assert isinstance(data, Data)
    assert (data.words, data.x.shape) == (["0", "1", "2"], (3, 2))
    encoding = take(lambda n: Encoding(ids=torch.arange(n)), 8).piece(2, 4)
    assert isinstance(encoding, Encoding)
    assert encoding.ids.tolist() == [2, 3]


def test_the_dimension_of_examples_is_the_one_that_grows_wherever_it_is() -> None:
    taken = take(lambda n: (torch.zeros(8, n), torch.zeros(2 * n, 8), torch.zeros(8)), 8)
    first, second, constant = taken.piece(1, 3)
    assert (first.shape, second.shape, constant.shape) == ((8, 2), (4, 8), (8,))


def test_of_a_given_batch_the_first_rows_are_taken() -> None:
    taken = take({"x": torch.arange(12), "scale": torch.tensor(2.0)}, 8)
    assert taken.num == 8
    assert taken.piece(6, 8)["x"].tolist() == [6, 7]
    assert taken.piece(6, 8)["scale"] == 2


def test_a_part_that_grows_out_of_proportion_is_named() -> None:
    taken = take(lambda n: {"x": torch.zeros(n), "starts": torch.arange(n + 1)}, 8)
    assert taken.cannot_split is not None
    assert "batch['starts']" in taken.cannot_split


def test_a_batch_that_ignores_the_number_of_examples_is_refused() -> None:
    with pytest.raises(UsageError, match="does not have 8 examples"):
        take(lambda _: {"x": torch.zeros(4, 3)}, 8)


def test_values_are_made_up_only_where_all_examples_are_alike() -> None:
    real = take(lambda n: {"x": torch.randn(n, 3), "y": torch.zeros(n, dtype=torch.long)}, 8)
    assert with_values(real, integers=True) is real
    shapes = take(lambda n: {"x": torch.zeros(n, 3), "y": torch.zeros(n, dtype=torch.long)}, 8)
    filled = with_values(shapes, integers=True)
    assert "made-up" in filled.notes[0]
    assert filled.whole["x"].std() > 0.5
    assert set(filled.whole["y"].tolist()) == {0, 1}
    assert with_values(shapes, integers=False).whole["y"].tolist() == [0] * 8
