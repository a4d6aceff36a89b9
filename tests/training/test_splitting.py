"""Batches of every shape people make, split and put together again."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils import rnn

from oomph.errors import UsageError
from oomph.stability.examples import dims_given, elements_per_example, num_examples
from oomph.training.micro_batches import moved, piece_sizes, split

Pair = namedtuple("Pair", ["x", "y"])


@dataclass(frozen=True)
class Sample:
    x: Any
    scale: float = 1.0


X, Y = torch.arange(20).view(5, 4), torch.arange(5)


@given(num=st.integers(1, 300), limit=st.integers(1, 300))
def test_pieces_are_as_few_and_as_equal_as_can_be(num: int, limit: int) -> None:
    sizes = piece_sizes(num, limit)
    assert sum(sizes) == num
    assert max(sizes) <= limit
    assert max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-num // limit)
    assert num % limit or set(sizes) == {limit}


@pytest.mark.parametrize(
    ("batch", "column"),
    [
        (X, lambda b: b),
        ({"x": X, "y": Y}, lambda b: b["x"]),
        ((X, Y), lambda b: b[0]),
        ([X, Y], lambda b: b[0]),  # as default_collate makes it
        (Pair(X, Y), lambda b: b.x),
        (Sample(X, 0.5), lambda b: b.x),
        (OrderedDict(x=X), lambda b: b["x"]),
        (SimpleNamespace(x=X, name="a"), lambda b: b.x),
        ({"a": {"x": X, "n": 3}, "y": [Y, Y]}, lambda b: b["a"]["x"]),
        ({"x": X, "step": torch.tensor(3), "mask": torch.ones(1, 4)}, lambda b: b["x"]),
        ({"x": X, "names": ["a", "b", "c", "d", "e"]}, lambda b: b["x"]),
        (np.arange(20).reshape(5, 4), torch.as_tensor),
        (X.to_sparse(), lambda b: b.to_dense()),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pieces_are_of_the_same_kind_and_join_to_the_batch(batch: Any, column: Any) -> None:
    assert num_examples(batch) == 5
    pieces = split(batch, [2, 2, 1])
    assert [type(piece) for piece in pieces] == [type(batch)] * 3
    assert torch.equal(torch.cat([column(piece) for piece in pieces]), X)


def test_one_piece_is_the_batch_itself() -> None:
    batch = {"x": X, "odd": object()}
    assert split(batch, [5])[0] is batch


def test_lists_with_one_entry_for_each_example_are_cut() -> None:
    images = [torch.zeros(3, 8 + n, 8) for n in range(4)]  # of unlike shapes, as in detection
    targets = [{"boxes": torch.zeros(n, 4)} for n in range(4)]
    assert num_examples((images, targets)) == 4
    first, second = split((images, targets), [3, 1])
    assert len(first[0]) == len(first[1]) == 3
    assert second[0][0] is images[3]
    assert second[1][0] is targets[3]


def test_images_of_one_shape_are_told_from_columns_by_their_targets() -> None:
    images, targets = [torch.zeros(3, 8, 8)] * 4, [{"label": n} for n in range(4)]
    assert num_examples((images, targets)) == 4
    assert [len(piece[0]) for piece in split((images, targets), [2, 2])] == [2, 2]


@pytest.mark.parametrize("length", [3, 4, 5])
@pytest.mark.parametrize(
    "listed",
    [
        lambda xs, ys: {"x": xs, "y": ys},
        lambda xs, ys: (xs, ys),
        lambda xs, ys: list(zip(xs, ys, strict=True)),
        lambda xs, ys: [Sample((x, y)) for x, y in zip(xs, ys, strict=True)],
    ],
    ids=["dict", "lists", "pairs", "objects"],
)
def test_lists_of_examples_of_one_shape_are_no_columns(listed: Any, length: int) -> None:
    """Not even where examples are as long as there are examples."""
    xs = [torch.full((length, 2), float(n)) for n in range(4)]
    ys = [torch.full((length,), n) for n in range(4)]
    batch = listed(xs, ys)
    assert num_examples(batch) == 4
    pieces = split(batch, [3, 1])
    for piece, first, count in zip(pieces, (0, 3), (3, 1), strict=True):
        expected = listed(xs[first : first + count], ys[first : first + count])
        assert str(piece) == str(expected)


def test_columns_of_one_shape_stay_columns_as_default_collate_makes_them() -> None:
    pairs = torch.utils.data.default_collate([((x, x), (x, x)) for x in X])
    assert num_examples(pairs) == 5
    assert split(pairs, [3, 2])[1][0][1].tolist() == X[3:].tolist()


def test_what_has_one_row_and_what_is_given_whole_are_not_counted() -> None:
    first: dict[str, Any] = {"scale": torch.ones(1), "x": X}
    assert num_examples(first) == 5
    assert split(first, [3, 2])[0]["scale"] is first["scale"]
    weighted: dict[str, Any] = {"loss": {"weights": torch.ones(10)}, "x": X}
    assert num_examples(weighted, whole=("loss.weights",)) == 5
    assert len(split(weighted, [3, 2], whole=("loss.weights",))[1]["x"]) == 2
    assert num_examples(torch.ones(1, 3)) == 1


def test_packed_sequences_are_cut_by_sequences() -> None:
    sequences = [torch.arange(3.0), torch.arange(1.0), torch.arange(5.0), torch.arange(2.0)]
    packed = rnn.pack_sequence(sequences, enforce_sorted=False)
    assert num_examples(packed) == 4
    pieces = split(packed, [3, 1])
    again = [one for piece in pieces for one in rnn.unpack_sequence(piece)]
    assert all(torch.equal(a, b) for a, b in zip(again, sequences, strict=True))


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_cut_by_examples(layout: torch.layout) -> None:
    parts = [torch.ones(n + 1, 2) * n for n in range(5)]
    nested = torch.nested.nested_tensor(parts, layout=layout)
    assert num_examples({"x": nested}) == 5
    pieces = split({"x": nested}, [3, 2])
    again = [one for piece in pieces for one in piece["x"].unbind()]
    assert all(torch.equal(a, b) for a, b in zip(again, parts, strict=True))
    assert pieces[0]["x"].layout is layout


def test_what_transformers_makes_stays_what_it_is() -> None:
    from transformers import BatchEncoding

    pieces = split(BatchEncoding({"input_ids": X, "labels": Y}), [3, 2])
    assert all(isinstance(piece, BatchEncoding) for piece in pieces)
    assert torch.equal(pieces[1].input_ids, X[3:])


def test_a_tensor_that_could_be_either_is_named() -> None:
    batch: dict[str, Any] = {"x": X, "inner": {"mask": torch.ones(4, 4)}}
    with pytest.raises(UsageError, match=r"inner.mask of the batch cannot be split") as caught:
        split(batch, [3, 2])
    assert caught.value.attempt is not None
    assert "whole=('inner.mask',)" in caught.value.attempt
    pieces = split(batch, [3, 2], whole=("inner.mask",))
    assert all(piece["inner"]["mask"] is batch["inner"]["mask"] for piece in pieces)


def test_the_dimension_of_the_examples_is_any_that_is_given() -> None:
    x, y, mask = torch.arange(24).view(4, 3, 2), torch.arange(12).view(4, 3), torch.ones(3, 3)
    for batch, dims in (
        ({"x": x, "y": y, "mask": mask}, {"x": 1, "y": -1, "mask": None}),
        ((x, y, mask), {0: 1, 1: 1, 2: None}),
        ({"in": {"x": x}, "y": y.t(), "mask": mask}, {"in.x": 1, "mask": None}),
    ):
        given = dims_given({str(name): dim for name, dim in dims.items()})
        assert num_examples(batch, dims=given) == 3
        for sizes in ([2, 1], [1, 1, 1]):
            pieces = [[*leaves(piece)] for piece in split(batch, sizes, dims=given)]
            assert torch.equal(torch.cat([piece[0] for piece in pieces], 1), x)
            assert all(piece[2] is mask for piece in pieces)
    assert [piece[1].tolist() for piece in split((x, y), [2, 1], dims=dims_given(1))] == [
        y[:, :2].tolist(),
        y[:, 2:].tolist(),
    ]


def leaves(part: Any) -> Any:
    if isinstance(part, torch.Tensor):
        yield part
        return
    for each in part.values() if isinstance(part, dict) else part:
        yield from leaves(each)


def test_two_columns_of_two_examples_with_time_first_are_no_list_of_examples() -> None:
    pair = (torch.arange(6).view(3, 2), torch.arange(6).view(3, 2))
    for dims in (dims_given(1), dims_given({"0": 1, "1": 1})):
        first, second = split(pair, [1, 1], dims=dims)
        assert first[0].tolist() == first[1].tolist() == [[0], [2], [4]]
        assert second[0].tolist() == [[1], [3], [5]]


def test_what_cannot_be_looked_into_is_never_repeated_in_silence() -> None:
    with pytest.raises(UsageError, match="of type set cannot be split"):
        split({"x": X, "odd": {1, 2}}, [3, 2])
    with pytest.raises(UsageError, match="no tensor or list of examples"):
        num_examples({"a": 1})


def test_examples_of_more_tokens_are_larger() -> None:
    short, long = torch.zeros(4, 8), torch.zeros(4, 64)
    assert elements_per_example({"ids": short}, 4) == 8
    assert elements_per_example({"ids": long, "y": torch.zeros(4)}, 4) == 64
    assert elements_per_example({"x": torch.zeros(4), "y": torch.zeros(4)}, 4) == 2


def test_pieces_are_moved_with_all_that_is_in_them() -> None:
    batch = {"x": X, "pair": Pair(X, "text"), "more": [Y, {"y": Y}], "n": 3, "s": Sample(X)}
    there = moved(batch, "meta")
    assert there["x"].is_meta
    assert there["pair"].x.is_meta
    assert there["more"][1]["y"].is_meta
    assert there["s"].x.is_meta
    assert there["pair"].y == "text"
